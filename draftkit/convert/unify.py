"""A foreign checkpoint as a unified draft: the plan applied to its tensors, none of which is read yet."""

from __future__ import annotations

import hashlib
from pathlib import Path

from draftkit.convert.checkpoint import ADAPTER_CONFIG, Checkpoint
from draftkit.convert.keypaths import value_at
from draftkit.convert.operations import carry_out
from draftkit.convert.plan import Plan
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import InputFile, Provenance
from draftkit.layout.target import TargetFacts
from draftkit.version import __version__

SMALL_FILE = 16 << 20  # bytes; reading less for a digest costs nothing that a user would notice


def unify(checkpoint: Checkpoint, plan: Plan, target: TargetFacts | None, *, digest: bool = False) -> Draft:
    """The draft that a plan describes, and where it comes from. Raises `LayoutError` when facts are missing.

    `digest`: large local files are read for their SHA-256 too.
    """
    provenance = Provenance(
        source=checkpoint.source.name,
        source_revision=checkpoint.source.revision,
        format=plan.format,
        files=_input_files(checkpoint, digest),
        target=target.name if target else None,
        target_revision=target.revision if target else None,
        facts=plan.facts,
        dropped_config={key: value_at(checkpoint.config, key) for key in plan.dropped_keys},
        losses=plan.losses + plan.agreed_losses,
        draftkit_version=__version__,
    )
    tensors = carry_out(plan.moves, checkpoint.tensors)
    return Draft(
        checkpoint.source.path, plan.require_spec(checkpoint.source.path), provenance, tensors, plan.copied_files
    )


def _input_files(checkpoint: Checkpoint, digest: bool) -> tuple[InputFile, ...]:
    origins = {handle.origin for handle in checkpoint.tensors.values()}
    configs = [checkpoint.source.path / name for name in ("config.json", ADAPTER_CONFIG)]
    paths = [*configs, *sorted(origins)]
    return tuple(
        InputFile(name=path.name, size=path.stat().st_size, sha256=_sha256(path, digest))
        for path in paths
        if path.is_file()
    )


def _sha256(path: Path, digest: bool) -> str | None:
    """The digest of a file: the Hub's own, which names the cached blob of a large file, else computed where cheap."""
    blob = path.resolve().name
    if path.is_symlink() and len(blob) == 64 and all(c in "0123456789abcdef" for c in blob):
        return blob
    if not digest and path.stat().st_size > SMALL_FILE:
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
