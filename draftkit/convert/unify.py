"""A foreign checkpoint as a unified draft: the plan applied to its tensors, none of which is read yet."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from draftkit.convert.checkpoint import ADAPTER_CONFIG, Checkpoint
from draftkit.convert.keypaths import value_at
from draftkit.convert.operations import carry_out
from draftkit.convert.plan import Plan
from draftkit.errors import FormatError
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import InputFile, Provenance
from draftkit.layout.target import TargetFacts
from draftkit.version import __version__

SMALL_FILE = 16 << 20  # bytes; reading less for a digest costs nothing that a user would notice


def unify(checkpoint: Checkpoint, plan: Plan, target: TargetFacts | None, *, digest: bool = False) -> Draft:
    """The draft that a plan describes, and where it comes from. Raises `LayoutError` when facts are missing.

    `digest`: large files are read for their SHA-256 too. Raises `FormatError` where the Hub has another one.
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
    return tuple(_input_file(path, digest) for path in paths if path.is_file())


def _input_file(path: Path, digest: bool) -> InputFile:
    """A file with its digest, where that is wanted or cheap. Raises `FormatError` when the Hub has another one."""
    size = path.stat().st_size
    hub_sha256, sha256 = _hub_sha256(path), None
    if digest or size <= SMALL_FILE:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is not None and hub_sha256 not in (None, sha256):
        raise FormatError(
            f"{path.name} is not the file that the Hub has: its SHA-256 is {sha256}",
            where=path,
            expected=hub_sha256,
            hint="the download was damaged: remove the file that the link leads to, and run the command again",
        )
    return InputFile(name=path.name, size=size, sha256=sha256, hub_sha256=hub_sha256)


def _hub_sha256(path: Path) -> str | None:
    """What the Hub says of a large file: the name of the blob in its cache."""
    blob = path.resolve().name
    return blob if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", blob) else None
