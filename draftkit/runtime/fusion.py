"""Fewer kernels in transformers' models: parts of theirs that are many small operations become one of `runtime.ops`.

They are found by their structure, and taken over only where the module's own result on random input is that of the
operation's reference, bit for bit. Everything else is left as it is, and so is everything with gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftkit.runtime.ops.backend import uses_triton
from draftkit.runtime.ops.rms_norm import rms_norm, rms_norm_reference
from draftkit.runtime.ops.rotation import rotate, rotate_reference

ROTATION = "apply_rotary_pos_emb"  # what modules of transformers call their function
SAMPLE = 3  # rows of random input

Rotate = Callable[..., tuple[Tensor, Tensor]]


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Take over the norms of `model`, and the rotation in the files of its modules."""
    for module in model.modules():
        form = None if "forward" in vars(module) else _norm_form(module)
        if form is not None:
            vars(module)["forward"] = FusedNorm(module, *form)
    for file in {type(module).__module__ for module in model.modules()}:
        own = vars(sys.modules[file]).get(ROTATION)
        if own is not None and not isinstance(own, FusedRotation) and _rotates_halves(own):
            setattr(sys.modules[file], ROTATION, FusedRotation(own))


class FusedNorm:
    """The forward of an RMSNorm `module`."""

    def __init__(self, module: nn.Module, eps: float, one_plus: bool):
        self._module, self._eps, self._one_plus = module, eps, one_plus

    def __call__(self, x: Tensor) -> Tensor:
        weight: Any = self._module.weight
        if torch.is_grad_enabled() or x.dtype != weight.dtype or not uses_triton(x):
            return type(self._module).forward(self._module, x)
        return rms_norm(x, weight, self._eps, one_plus=self._one_plus)


def _norm_form(module: nn.Module) -> tuple[float, bool] | None:
    """The eps of an RMSNorm, and whether its factor is 1 + its weight; None of other modules."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = dict(module.named_parameters()).keys() == {"weight"} and not list(module.children())
    if not alone or not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    x = _random(SAMPLE, len(weight), like=weight)
    try:
        own = module(x)
    except (TypeError, RuntimeError):  # it wants something else
        return None
    for one_plus in (False, True):
        if isinstance(own, Tensor) and torch.equal(own, rms_norm_reference(x, weight, eps, one_plus)):
            return eps, one_plus
    return None


class FusedRotation:
    """A file's function that rotates queries and keys."""

    def __init__(self, own: Rotate):
        self._own = own

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        same = {query.dtype, key.dtype, cos.dtype, sin.dtype} == {query.dtype}
        plain = cos.shape == (query.shape[0], *query.shape[2:]) and not rest and not named
        if torch.is_grad_enabled() or not same or not plain or not uses_triton(query):
            return self._own(query, key, cos, sin, *rest, **named)
        return rotate(query, key, cos, sin)


def _rotates_halves(own: Rotate) -> bool:
    """Whether a function rotates queries and keys as `rotate` does."""
    query, key = _random(1, 4, SAMPLE, 8), _random(1, 2, SAMPLE, 8)
    cos, sin = _random(1, SAMPLE, 8), _random(1, SAMPLE, 8)
    try:
        found = own(query, key, cos, sin)
    except (TypeError, RuntimeError, ValueError, IndexError):  # it takes other arguments
        return False
    expected = rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _random(*shape: int, like: Tensor | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator)
    return drawn if like is None else drawn.to(like.device, like.dtype)
