"""Digests that tell whether stored states belong to a target and to a file of samples."""

from __future__ import annotations

import hashlib
from pathlib import Path

from draftkit.errors import SourceError
from draftkit.io.tensors import open_checkpoint

SAMPLE_BYTES = 4096  # of each tensor


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file. Raises `SourceError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", where=path) from error


def target_sha256(folder: Path) -> str:
    """A digest of a target's config.json and of the names, shapes and first bytes of its weights.

    A fine-tuned copy has another one; it takes one small read a tensor, whatever the target's size. Raises
    `SourceError` and `FormatError` for a folder that is no checkpoint.
    """
    digest = hashlib.sha256(file_sha256(folder / "config.json").encode())
    for name, handle in sorted(open_checkpoint(folder).items()):
        digest.update(f"\0{name}\0{handle.dtype}\0{handle.shape}\0".encode())
        digest.update(next(iter(handle.chunks(SAMPLE_BYTES)), b"")[:SAMPLE_BYTES])
    return digest.hexdigest()
