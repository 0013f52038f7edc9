"""A digest that tells whether two folders hold the same draft, wherever they lie and whatever wrote their files."""

from __future__ import annotations

import hashlib
import json

from draftkit.layout.folder import Draft


def draft_sha256(draft: Draft) -> str:
    """SHA-256 of a draft's spec and of every byte of its weights, in hexadecimal.

    A foreign checkpoint has that of the unified draft it converts to. Raises `FormatError`/`SourceError` for a file
    that changes or goes away meanwhile.
    """
    digest = hashlib.sha256(json.dumps(draft.spec.to_dict(), sort_keys=True).encode())
    for name, handle in sorted(draft.tensors.items()):
        digest.update(f"\0{name}\0{handle.dtype}\0{list(handle.shape)}\0".encode())
        for chunk in handle.chunks():
            digest.update(chunk)
    return digest.hexdigest()
