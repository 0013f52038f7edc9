"""NaN and infinities: weights that hold them are refused, and a forward that makes them is asked where they began."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor, nn

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


def first_non_finite(module: nn.Module, run: Callable[[], object]) -> tuple[str, int] | None:
    """The first submodule, in order of execution, whose output [B, T, ...] in `run` holds NaN or infinity, and the
    first such row of T; None where all outputs are finite."""
    found: list[tuple[str, int]] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(_module: nn.Module, _arguments: object, output: object) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if found or not isinstance(output, Tensor) or not output.is_floating_point():
                return
            sound = output.isfinite()
            if not sound.all():
                rows = sound.flatten(2).all(2).all(0) if output.dim() > 2 else sound.all(-1)
                found.append((name, int((~rows).nonzero()[0])))

        return look

    hooks = [part.register_forward_hook(watch(name)) for name, part in module.named_modules() if name]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
