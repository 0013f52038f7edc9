"""Reading and writing a unified draft folder: config.json, weights, and tokenizer files where the draft has any."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from draftkit.errors import DraftkitError, LayoutError, SourceError
from draftkit.layout.atomic import atomic_folder
from draftkit.layout.config import engine_config, refusal_by_vllm
from draftkit.layout.jsonfile import dump, read_object
from draftkit.layout.provenance import Provenance
from draftkit.layout.records import from_dict, to_dict
from draftkit.layout.schema import check_tensors
from draftkit.layout.spec import DraftSpec
from draftkit.layout.tensors import TensorHandle, TensorToWrite, open_checkpoint, write_checkpoint

# An architecture that no engine registers: vLLM refuses the folder instead of running it wrongly.
REFUSED_ARCHITECTURE = "DraftkitOnlyModel"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "tekken.json",
    "generation_config.json",
)
PROVENANCE_FILE = "draftkit-provenance.json"  # marks a draft in another layout as written by draftkit
# What draftkit writes into the folder of a draft, or of a checkpoint in training.
WRITTEN = (
    "config.json", PROVENANCE_FILE, "*.safetensors", "*.safetensors.index.json", "*.bin", *TOKENIZER_FILES, "README.md",
    "eval", "figures", "adapter", "train.yaml", "versions.json", "trainer_state.json", "optimizer*", "scheduler.pt",
    "scaler.pt", "rng_state*", "pytorch_model*",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A unified draft; no weight has been read yet.

    `path` is its folder, or that of the checkpoint it will be converted from. `files`: its tokenizer, where it is a
    causal language model.
    """

    path: Path
    spec: DraftSpec
    provenance: Provenance
    tensors: dict[str, TensorHandle]
    files: tuple[Path, ...] = ()


def is_unified(folder: Path) -> bool:
    """Whether the folder's config.json has a `draftkit` block. Anything else is a foreign checkpoint."""
    return (folder / "config.json").is_file() and "draftkit" in read_object(folder / "config.json")


def read_draft(folder: Path) -> Draft:
    """Read and validate a unified draft.

    Raises `LayoutError` listing every fact or tensor that does not fit, `FormatError` for damaged files,
    `SourceError` for missing ones.
    """
    config_path = folder / "config.json"
    block = read_object(config_path).get("draftkit")
    if not isinstance(block, dict) or set(block) != {"spec", "provenance"} or not isinstance(block["spec"], dict):
        raise LayoutError("config.json has no draftkit block", where=config_path, hint=f"draftkit convert {folder} OUT")
    spec = DraftSpec.from_dict(block["spec"], config_path)
    provenance = from_dict(Provenance, block["provenance"], config_path)
    tensors = open_checkpoint(folder)
    found = {name: (handle.dtype, handle.shape) for name, handle in tensors.items()}
    check_tensors(spec, found, folder, hint="convert the source again")
    return Draft(folder, spec, provenance, tensors, tokenizer_files(folder) if spec.kind == "causal-lm" else ())


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files of a causal language model that belong to its tokenizer, and its generation settings.

    Raises `SourceError` for one that cannot be copied: a broken link, a pipe.
    """
    found = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if not path.is_dir()}
    if odd := [path for path in sorted(found) if not path.is_file()]:
        raise SourceError(f"{odd[0].name} is a broken link or no file", where=odd[0], hint="fetch the checkpoint again")
    return tuple(sorted(found))


def write_draft(out: Path, draft: Draft, *, force: bool = False, on_bytes: Callable[[int], None] | None = None) -> None:
    """Write a draft folder atomically: `out` appears complete or not at all.

    The tensors are streamed one at a time; `on_bytes` is told how many bytes each write had. Raises `LayoutError`
    before anything is written when they do not fit the spec, and `DraftkitError` as `draft_folder` does.
    """
    check_tensors(draft.spec, {t.name: (t.dtype, t.shape) for t in draft.tensors.values()}, out)
    tensors = [TensorToWrite(t.name, t.dtype, t.shape, t.chunks()) for t in draft.tensors.values()]
    with draft_folder(out, draft, force=force) as folder:
        (folder / "config.json").write_text(dump(config_of(draft.spec, draft.provenance)), encoding="utf-8")
        for path in draft.files:
            shutil.copyfile(path, folder / path.name)
        write_checkpoint(folder, tensors, metadata={"format": "pt"}, on_bytes=on_bytes)


@contextmanager
def draft_folder(out: Path, draft: Draft, *, force: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes `out`, as `atomic_folder` does.

    `force` lets it replace a folder that draftkit has written, and no other. Raises `DraftkitError` where there is
    another, and where the draft itself would be read from what it replaces.
    """
    files = {*draft.files, *(handle.origin for handle in draft.tensors.values())}
    if any(Path(os.path.realpath(file.parent)).is_relative_to(os.path.realpath(out)) for file in files if file != out):
        raise DraftkitError("the output is the source itself", where=out, hint="choose another folder")
    with atomic_folder(out, is_written_by_draftkit if force else None) as folder:
        yield folder


def is_written_by_draftkit(folder: Path) -> bool:
    """Whether a folder has draftkit's mark, and nothing that draftkit does not write: no work tree, no notes."""
    entries = [path.name for path in folder.iterdir()]
    if not all(any(fnmatchcase(name, pattern) for pattern in WRITTEN) for name in entries):
        return False
    try:
        return PROVENANCE_FILE in entries or is_unified(folder)
    except DraftkitError:  # a config.json that cannot be read
        return False


def config_of(spec: DraftSpec, provenance: Provenance) -> dict[str, object]:
    """The whole config.json of a draft: the engines' keys, and the `draftkit` block that draftkit reads back."""
    config = engine_config(spec)
    if refusal_by_vllm(spec) is not None:
        config["architectures"] = [REFUSED_ARCHITECTURE]
    return config | {"draftkit": {"spec": spec.to_dict(), "provenance": to_dict(provenance)}}
