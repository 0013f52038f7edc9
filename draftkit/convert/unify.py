"""A foreign checkpoint as a unified draft: the plan applied to its tensors, none of which is read yet."""

from __future__ import annotations

from pathlib import Path

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.operations import carry_out
from draftkit.convert.plan import Plan
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import InputFile, Provenance
from draftkit.layout.target import TargetFacts
from draftkit.version import __version__


def unify(checkpoint: Checkpoint, plan: Plan, target: TargetFacts | None) -> Draft:
    """The draft that a plan describes, and where it comes from. Raises `LayoutError` when facts are missing."""
    provenance = Provenance(
        source=checkpoint.source.name,
        source_revision=checkpoint.source.revision,
        format=plan.format,
        files=_input_files(checkpoint),
        target=target.name if target else None,
        target_revision=target.revision if target else None,
        facts=plan.facts,
        dropped_config={key: checkpoint.config[key] for key in plan.dropped_keys},
        losses=plan.losses,
        draftkit_version=__version__,
    )
    tensors = carry_out(plan.moves, checkpoint.tensors)
    return Draft(
        checkpoint.source.path, plan.require_spec(checkpoint.source.path), provenance, tensors, plan.copied_files
    )


def _input_files(checkpoint: Checkpoint) -> tuple[InputFile, ...]:
    origins = {handle.origin for handle in checkpoint.tensors.values()}
    paths = [checkpoint.source.path / "config.json", *sorted(origins)]
    return tuple(InputFile(name=path.name, size=path.stat().st_size, sha256=_hub_digest(path)) for path in paths)


def _hub_digest(path: Path) -> str | None:
    """The SHA-256 of a large file of the Hub, which names its blob in the cache. Others are not read for it."""
    blob = path.resolve().name
    is_digest = path.is_symlink() and len(blob) == 64 and all(c in "0123456789abcdef" for c in blob)
    return blob if is_digest else None
