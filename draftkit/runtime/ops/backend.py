"""Where kernels run: Triton on CUDA, Triton's interpreter on request, the torch reference everywhere else.

The interpreter is chosen by TRITON_INTERPRET=1 in the environment before Triton is first imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform, or the gpu extra is not installed
    triton = tl = None

__all__ = ["jit", "next_power_of_2", "tl", "uses_triton"]

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def jit(function: Callable[..., None] | None = None, *, varying: Sequence[str] = ()) -> Any:
    """`triton.jit`; the function itself where Triton is missing and nothing will call it.

    Triton compiles a kernel anew for an integer that is 1 or a multiple of 16. `varying` names the arguments that
    change from launch to launch of one run, for which that would happen in the middle of being timed.
    """
    if function is None:
        return partial(jit, varying=varying)
    return function if triton is None else triton.jit(function, do_not_specialize=varying)


def uses_triton(tensor: Tensor) -> bool:
    """Whether the kernel, not its torch reference, computes on this tensor's device. No kernel can on `meta`."""
    return triton is not None and (tensor.is_cuda or (_INTERPRETED and not tensor.is_meta))


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
