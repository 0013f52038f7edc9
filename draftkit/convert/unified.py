"""Writing a unified draft folder, which engines load as it is, or refuse where they would run it wrongly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError
from draftkit.io.atomic import atomic_folder
from draftkit.io.jsonfile import dump
from draftkit.io.records import to_dict
from draftkit.io.tensors import TensorToWrite, write_checkpoint
from draftkit.layout.folder import TOKENIZER_FILES, Draft, is_unified
from draftkit.layout.provenance import Provenance
from draftkit.layout.spec import DraftSpec

# An architecture that no engine registers: vLLM refuses the folder instead of running it wrongly.
REFUSED_ARCHITECTURE = "DraftkitOnlyModel"
PROVENANCE_FILE = "draftkit-provenance.json"  # marks a draft in another layout as written by draftkit
# What draftkit writes into the folder of a draft, or of a checkpoint in training.
WRITTEN = (
    "config.json", PROVENANCE_FILE, "*.safetensors", "*.safetensors.index.json", "*.bin", *TOKENIZER_FILES, "README.md",
    "eval", "figures", "adapter", "train.yaml", "versions.json", "trainer_state.json", "optimizer*", "scheduler.pt",
    "scaler.pt", "rng_state*", "pytorch_model*",
)  # fmt: skip


def write_draft(out: Path, draft: Draft, *, force: bool = False, on_bytes: Callable[[int], None] | None = None) -> None:
    """Write a draft folder atomically: `out` appears complete or not at all.

    The tensors are streamed one at a time; `on_bytes` is told how many bytes each write had. Raises `LayoutError`
    before anything is written when they do not fit the spec, and `DraftkitError` as `draft_folder` does.
    """
    draft.spec.check_tensors({t.name: (t.dtype, t.shape) for t in draft.tensors.values()}, out)
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
    config = spec.engine_config()
    if refusal_by_vllm(spec) is not None:
        config["architectures"] = [REFUSED_ARCHITECTURE]
    return config | {"draftkit": {"spec": spec.to_dict(), "provenance": to_dict(provenance)}}
