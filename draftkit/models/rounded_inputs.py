"""Linear layers that round their inputs as an engine does before it multiplies quantized weights.

The weights are plain here; what an engine loses by the inputs is part of its acceptance. The arithmetic is that of
compressed-tensors 0.20 (`lifecycle/forward.py`, `utils/helpers.py`, `utils/mxfp_utils.py`), in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from draftkit.layout.folder import Draft
from draftkit.layout.stored_weights import InputFormat, input_format, stored_weights

FP8_MOST, FP4_MOST = 448.0, 6.0
# Where a four-bit float becomes the next: at the number itself in every other case, so that ties go to even ones.
FP4_STEPS = ((0.25, 0.5), (0.75, 0.5), (1.25, 0.5), (1.75, 0.5), (2.5, 1.0), (3.5, 1.0), (5.0, 2.0))
FP4_TIES_UP = (False, True, False, True, False, True, False)
LEAST_FP8 = 0.125  # what stands for a scale of zero in fp8


def round_inputs(module: nn.Module, draft: Draft, prefix: str = "") -> None:
    """Have the linear layers of a module, whose names follow `prefix` in the draft, round their inputs as the draft's
    quantization says."""
    for name, (format, scale) in input_formats(draft).items():
        if not f"{name}.".startswith(prefix):
            continue
        round_inputs_of(module.get_submodule(f"{name}.".removeprefix(prefix).removesuffix(".")), format, scale)


def round_inputs_of(layer: nn.Module | None, format: InputFormat, scale: Tensor | None) -> None:
    """Have a layer round its inputs, where it is a linear one. `scale` as `rounded_inputs` takes it."""
    if isinstance(layer, nn.Linear):
        here = None if scale is None else scale.to(layer.weight.device)
        vars(layer)["forward"] = RoundedInputs(layer, format, here)


def input_formats(draft: Draft) -> dict[str, tuple[InputFormat, Tensor | None]]:
    """How the inputs of each quantized module are rounded, and the scale of all of them that lies in the file, as
    `rounded_inputs` takes it; modules whose inputs stay as they are, are left out."""
    stated = draft.spec.stored_as
    if stated is None:
        return {}
    found = {name: (handle.dtype, handle.shape) for name, handle in draft.tensors.items()}
    formats: dict[str, tuple[InputFormat, Tensor | None]] = {}
    for module, weight in stored_weights(found, stated).items():
        format = input_format(stated, module)
        if format is not None and format.dynamic:
            formats[module] = format, None
        elif format is not None and (scale := _stored_scale(draft, weight.parts, format)) is not None:
            formats[module] = format, scale
    return formats


def _stored_scale(draft: Draft, parts: Mapping[str, str], format: InputFormat) -> Tensor | None:
    """The scale float32 [] of all inputs. Of NVFP4, compressed-tensors stores the factor and ModelOpt its inverse."""
    name = parts.get("input_global_scale") or parts.get("input_scale")
    if name is None:
        return None
    scale = draft.tensors[name].load().float().view(())
    return 1 / scale if format.bits == 4 and "input_scale" in parts else scale


@dataclass(frozen=True)
class RoundedInputs:
    """The forward of a linear layer whose inputs are rounded first. `scale`: of all inputs, where it is not dynamic."""

    layer: nn.Linear
    format: InputFormat
    scale: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        rounded = rounded_inputs(x.float(), self.format, self.scale).to(x.dtype)
        return linear(rounded, self.layer.weight, self.layer.bias)


def rounded_inputs(x: Tensor, format: InputFormat, scale: Tensor | None = None) -> Tensor:
    """Numbers float32 [..., N] as their format holds them. `scale` float32 []: what all are divided by, or, of groups,
    what the scales of the groups are multiplied by before they are kept in fp8."""
    groups = x if format.group is None else _grouped(x, format.group)
    if format.dynamic:
        steps = _dynamic_steps(groups.abs().amax(-1, keepdim=True), format)
    else:
        assert scale is not None
        steps = scale if format.group is None else _steps_in_fp8(groups.abs().amax(-1, keepdim=True), scale)
    rounded = _rounded(groups / steps, format) * steps
    return rounded if format.group is None else rounded.flatten(-2)[..., : x.shape[-1]]


def _grouped(x: Tensor, size: int) -> Tensor:
    """[..., N] → [..., groups, size], the last group filled up with zeros."""
    return pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def _dynamic_steps(most: Tensor, format: InputFormat) -> Tensor:
    """What the greatest number of each row or group, `most`, is divided by."""
    if format.exponents:
        return _power_of_two(most, format.bits)
    if not format.is_float:
        return _nonzero(most / ((1 << format.bits) - 1) * 2)
    return _nonzero(most / (FP8_MOST if format.bits == 8 else FP4_MOST))


def _steps_in_fp8(most: Tensor, scale: Tensor) -> Tensor:
    """Steps of groups of four-bit floats, which are kept in fp8 after they are multiplied by `scale`."""
    steps = (scale * (most / FP4_MOST)).clamp(max=FP8_MOST).to(torch.float8_e4m3fn).float()
    return torch.where(steps == 0, LEAST_FP8, steps) / scale


def _power_of_two(most: Tensor, bits: int) -> Tensor:
    """The power of two that brings `most`, rounded to one, to the greatest power that the numbers have."""
    exponent = 8 if bits == 8 else 2
    whole = (most.contiguous().view(torch.int32) + (1 << 21)) >> 23 & 255  # up from one and three quarters on
    return ((whole - exponent).clamp(min=1) << 23).view(torch.float32)


def _nonzero(steps: Tensor) -> Tensor:
    return torch.where(steps == 0, torch.finfo(torch.float32).eps, steps)


def _rounded(x: Tensor, format: InputFormat) -> Tensor:
    if not format.is_float:
        most = 1 << format.bits - 1
        return x.round().clamp(-most, most - 1)
    if format.bits == 8:
        return x.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn).float()
    size, rounded = x.abs(), torch.zeros_like(x)
    for (least, step), up in zip(FP4_STEPS, FP4_TIES_UP, strict=True):
        rounded = rounded + step * (size >= least if up else size > least)
    return rounded.copysign(x)
