"""Carrying out a plan: tensors stream from the source into a new draft folder, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.plan import Plan
from draftkit.layout.folder import write_draft
from draftkit.layout.provenance import InputFile, Provenance
from draftkit.layout.target import TargetFacts
from draftkit.layout.tensors import TensorToWrite
from draftkit.version import __version__


def execute(
    plan: Plan,
    checkpoint: Checkpoint,
    target: TargetFacts | None,
    out: Path,
    *,
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the draft that a plan describes to `out`, atomically.

    Raises `LayoutError` when facts are missing, `DraftkitError` when `out` exists and `force` is not given.
    """
    spec = plan.require_spec(checkpoint.source.path)
    provenance = Provenance(
        source=checkpoint.source.name,
        source_revision=checkpoint.source.revision,
        format=plan.format,
        files=_input_files(checkpoint),
        target=target.name if target else None,
        target_revision=target.revision if target else None,
        facts=plan.facts,
        draftkit_version=__version__,
    )
    tensors = [
        TensorToWrite(move.destination, move.dtype, move.shape, checkpoint.tensors[move.source].chunks())
        for move in plan.moves
        if move.destination is not None
    ]
    write_draft(out, spec, provenance, tensors, copied_files=plan.copied_files, force=force, on_bytes=on_bytes)


def _input_files(checkpoint: Checkpoint) -> tuple[InputFile, ...]:
    origins = {handle.origin for handle in checkpoint.tensors.values()}
    paths = [checkpoint.source.path / "config.json", *sorted(origins)]
    return tuple(InputFile(name=path.name, size=path.stat().st_size, sha256=_sha256(path)) for path in paths)


def _sha256(path: Path) -> str:
    """The digest of a file's content: the Hub's own, which names the cached blob of a large file, else computed."""
    blob = path.resolve().name
    if path.is_symlink() and len(blob) == 64 and all(c in "0123456789abcdef" for c in blob):
        return blob
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
