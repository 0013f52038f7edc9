"""Fewer kernels in transformers' models: parts of theirs that are many small operations become one operation of ours.

They are found by their structure, and taken over only where the module's own result on random input is that of the
operation's reference, bit for bit. Everything else is left as it is, and so is everything with gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftkit.runtime.fusion.layers import SAMPLE, FusedAttention, FusedDecoder, FusedLayer, FusedMLP, Joints, same
from draftkit.runtime.fusion.norms import FusedNorm, norm_form
from draftkit.runtime.fusion.packed_linear import joint_of
from draftkit.runtime.fusion.rotary import angles, angles_reference, rotate, rotate_reference
from draftkit.runtime.ops.backend import uses_triton

ROTARY_FUNCTION = "apply_rotary_pos_emb"  # what modules of transformers call their function

Rotate = Callable[..., tuple[Tensor, Tensor]]


def fuse(model: nn.Module) -> None:
    """Take over the norms, MLPs, attention, decoder layers and rotary embeddings of `model`, and the rotation in the
    files of its modules.

    Weights that one product reads are moved next to each other in memory, module by module, and stay the modules' own:
    beyond the weights that takes as much as the largest of these products, and what a GPU held for them is given back.
    """
    with torch.enable_grad():  # with which what was taken over before computes as its own
        _take_over(model)
        for file in {type(module).__module__ for module in model.modules()}:
            own = vars(sys.modules[file]).get(ROTARY_FUNCTION)
            if own is not None and not isinstance(own, FusedRotary) and _rotates_halves(own):
                setattr(sys.modules[file], ROTARY_FUNCTION, FusedRotary(own))
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # else the memory of the separate weights stays the allocator's


def _take_over(model: nn.Module) -> None:
    joints = Joints(model)
    for module in model.modules():
        joint = joint_of(module)
        if joint is not None:
            joint.renew()
        if isinstance(module, nn.Linear) or "forward" in vars(module):
            continue
        form = norm_form(module)
        fused = (
            FusedNorm(module, form)
            if form is not None
            else FusedDecoder.of(module)
            or FusedLayer.of(module)
            or FusedAttention.of(module, joints)
            or FusedMLP.of(module, joints)
            or FusedAngles.of(module)
        )
        if fused is not None:
            vars(module)["forward"] = fused
    for module in model.modules():
        layers = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child)]
        for one in layers:
            _tell_what_follows(module, list(one))


def _tell_what_follows(model: Any, layers: list[Any]) -> None:
    """Tell each layer of the norm that its rows go to."""
    norms = [getattr(layer, "input_layernorm", None) for layer in layers[1:]] + [getattr(model, "norm", None)]
    for layer, norm in zip(layers, norms, strict=True):
        taken, follows = vars(layer).get("forward"), vars(norm).get("forward") if norm is not None else None
        if isinstance(taken, FusedLayer) and isinstance(follows, FusedNorm):
            taken.next_norm = follows


class FusedAngles:
    """The forward of a rotary embedding whose frequencies are the same for all sequences."""

    def __init__(self, module: Any):
        self._module = module

    @classmethod
    def of(cls, module: Any) -> FusedAngles | None:
        frequencies, scale = getattr(module, "inv_freq", None), getattr(module, "attention_scaling", None)
        if not isinstance(frequencies, Tensor) or frequencies.dim() != 1 or not isinstance(scale, (int, float)):
            return None
        x = _random(1, SAMPLE, 1).to(frequencies.device)
        positions = torch.arange(SAMPLE, device=frequencies.device)[None] * 1009
        try:
            found = module(x, positions)
        except (TypeError, RuntimeError, ValueError, KeyError, IndexError):  # it takes other arguments
            return None
        expected = angles_reference(positions, frequencies, scale, x.dtype)
        return cls(module) if all(same(one, other) for one, other in zip(found, expected, strict=True)) else None

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, D] of `position_ids` int64 [B, T], of the type of `x`."""
        own = self._module
        several = position_ids.dim() != 2  # of one token: in time, height and width
        if torch.is_grad_enabled() or own.inv_freq.device != x.device or several:
            found: tuple[Tensor, Tensor] = type(own).forward(own, x, position_ids)
            return found
        return angles(position_ids, own.inv_freq, own.attention_scaling, x.dtype)


class FusedRotary:
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
        with torch.cuda.device_of(query):  # of a target that is spread over devices
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


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
