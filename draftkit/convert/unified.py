"""Writing a unified draft folder, which engines load as it is, or refuse where they would run it wrongly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.layout.atomic import atomic_folder
from draftkit.layout.folder import Draft
from draftkit.layout.jsonfile import dump
from draftkit.layout.provenance import Provenance
from draftkit.layout.records import to_dict
from draftkit.layout.spec import DraftSpec
from draftkit.layout.tensors import TensorToWrite, write_checkpoint

# An architecture that no engine registers: vLLM refuses the folder instead of running it wrongly.
REFUSED_ARCHITECTURE = "DraftkitOnlyModel"


def write_draft(out: Path, draft: Draft, *, force: bool = False, on_bytes: Callable[[int], None] | None = None) -> None:
    """Write a draft folder atomically: `out` appears complete or not at all.

    The tensors are streamed one at a time; `on_bytes` is told how many bytes each write had. Raises `LayoutError`
    before anything is written when they do not fit the spec.
    """
    found = {t.name: (t.dtype, t.shape) for t in draft.tensors.values()}
    draft.spec.check_tensors(found, out)
    tensors = [TensorToWrite(t.name, t.dtype, t.shape, t.chunks()) for t in draft.tensors.values()]
    with atomic_folder(out, force) as folder:
        (folder / "config.json").write_text(dump(config_of(draft.spec, draft.provenance)), encoding="utf-8")
        for path in draft.files:
            shutil.copyfile(path, folder / path.name)
        write_checkpoint(folder, tensors, metadata={"format": "pt"}, on_bytes=on_bytes)


def config_of(spec: DraftSpec, provenance: Provenance) -> dict[str, object]:
    """The whole config.json of a draft: the engines' keys, and the `draftkit` block that draftkit reads back."""
    config = spec.engine_config()
    if refusal_by_vllm(spec) is not None:
        config["architectures"] = [REFUSED_ARCHITECTURE]
    return config | {"draftkit": {"spec": spec.to_dict(), "provenance": to_dict(provenance)}}
