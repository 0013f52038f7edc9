"""NaN and infinities: weights that hold them are refused, and logits that do are found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from draftkit.errors import NonFiniteError
from draftkit.io.finite import find_non_finite_loaded

HINT = "run it in bfloat16 or float32: float16 overflows in some models"


def require_finite(tensors: Iterable[tuple[str, Tensor]], where: Path) -> None:
    """Raise `NonFiniteError` that names the tensors with NaN or infinity; they were loaded from the folder `where`."""
    found = find_non_finite_loaded(tensors)
    if found:
        listing = "\n    ".join(map(str, found))
        raise NonFiniteError(
            f"weights that are NaN or infinite:\n    {listing}",
            where=where,
            hint="fetch the checkpoint again; if its file is sound, the dtype cannot hold it: --dtype bfloat16",
        )


def has_finite_peak(logits: Tensor) -> Tensor:
    """bool [...]: rows of logits [..., V] whose largest entry is a number.

    A row may hold −∞ for tokens that cannot come; NaN and +∞ are its largest entry, and so is −∞ where all are.
    """
    return logits.amax(-1).isfinite()
