"""Reading and writing a unified draft folder: config.json, weights, and tokenizer files where the draft has any."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import LayoutError
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


@dataclass(frozen=True)
class Draft:
    """A validated unified draft on disk; no weight has been read yet."""

    path: Path
    spec: DraftSpec
    provenance: Provenance
    tensors: dict[str, TensorHandle]


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
    return Draft(folder, spec, provenance, tensors)


def write_draft(
    out: Path,
    spec: DraftSpec,
    provenance: Provenance,
    tensors: Sequence[TensorToWrite],
    *,
    copied_files: Iterable[Path] = (),
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write a draft folder atomically: `out` appears complete or not at all.

    `tensors` are streamed one at a time; `on_bytes` is told how many bytes each write had. `copied_files` are
    tokenizer files. Raises `LayoutError` before anything is written when the tensors do not fit the spec.
    """
    check_tensors(spec, {t.name: (t.dtype, t.shape) for t in tensors}, out)
    with atomic_folder(out, force) as folder:
        (folder / "config.json").write_text(dump(config_of(spec, provenance)), encoding="utf-8")
        for path in copied_files:
            shutil.copyfile(path, folder / path.name)
        write_checkpoint(folder, tensors, metadata={"format": "pt"}, on_bytes=on_bytes)


def config_of(spec: DraftSpec, provenance: Provenance) -> dict[str, object]:
    """The whole config.json of a draft: the engines' keys, and the `draftkit` block that draftkit reads back."""
    config = engine_config(spec)
    if refusal_by_vllm(spec) is not None:
        config["architectures"] = [REFUSED_ARCHITECTURE]
    return config | {"draftkit": {"spec": spec.to_dict(), "provenance": to_dict(provenance)}}
