"""`--check`: no tensor of a draft holds NaN or infinity."""

from __future__ import annotations

from draftkit.errors import FormatError
from draftkit.io.finite import find_non_finite
from draftkit.layout.folder import Draft


def check_finite(draft: Draft) -> None:
    """Read every tensor of a draft. Raises `FormatError` that names those with NaN or inf, and how many."""
    found = find_non_finite(draft.tensors)
    if found:
        listing = "\n    ".join(map(str, found))
        raise FormatError(
            f"{len(found)} of {len(draft.tensors)} tensors hold numbers that are not finite:\n    {listing}",
            where=draft.path,
            hint="fetch the checkpoint again; if its author's copy has them too, the training diverged",
        )
