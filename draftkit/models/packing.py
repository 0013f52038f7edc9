"""Linear layers on the CPU whose weights lie as oneDNN's products read them.

A product of a few rows with a plain weight spends most of its time on rearranging the weight. Here that is done once,
and the plain weight is given up. Whoever asks a layer for it, by name, as a parameter, for its state or for a copy,
gets it back, and a plain layer from then on. A forward with gradients is that of a plain layer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, SupportsIndex, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Measured in float32: below so many multiplications the plain product is the faster one. A weight with fewer numbers
# may be asked for both, and is kept in both ways.
LITTLE_WORK = 1 << 19
LITTLE_WEIGHT = 1 << 18


def pack(model: nn.Module) -> None:
    """Pack the frozen linear layers of `model` that are on the CPU and are torch's own; all others stay as they are.

    A weight that another module shares, as that of tied embeddings, is kept beside its packed copy.
    """
    shared = _shared(model)
    for module in model.modules():
        if _packable(module):
            weight = module.weight
            _pack(module, keeps_plain=id(weight) in shared or is_little(weight.numel(), weight.dtype))


def kept_twice(model: nn.Module, dtype: torch.dtype) -> int:
    """How many numbers `pack` would keep in both ways, in the dtype; the model may be on the meta device."""
    if not packs(dtype):
        return 0
    shared = _shared(model)
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    return sum(w.numel() for w in weights if id(w) in shared or is_little(w.numel(), dtype))


def is_little(numbers: int, dtype: torch.dtype) -> bool:
    """Whether a weight of so many numbers is kept in both ways."""
    return dtype == torch.float32 and numbers < LITTLE_WEIGHT


def packs(dtype: torch.dtype) -> bool:
    """Whether this CPU and this torch multiply with packed weights of the dtype."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def dtype_of(model: nn.Module) -> torch.dtype:
    """That of a model's parameters, none of which is unpacked."""
    known = (p for module in model.modules() for p in vars(module)["_parameters"].values() if p is not None)
    return next(known).dtype


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight; `plain` is None where that is all it has."""

    packed: Tensor
    plain: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        plain = self.plain
        if plain is not None and x.numel() * self.out_features < LITTLE_WORK:
            return linear(x, plain, self.bias)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _unpacked(self).weight

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:  # type: ignore[override]
        return vars(_unpacked(self))["_parameters"]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return _unpacked(self).__reduce_ex__(protocol)


def _shared(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have."""
    users = Counter(id(p) for module in model.modules() for p in vars(module)["_parameters"].values())
    return {parameter for parameter, count in users.items() if count > 1}


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in vars(module):  # some tools replace that of a module
        return False
    weight = module.weight
    alone = type(weight) is nn.Parameter and not weight.requires_grad and weight.layout == torch.strided
    return alone and weight.device.type == "cpu" and weight.numel() > 0 and packs(weight.dtype)


@torch.inference_mode(False)
@torch.no_grad()
def _pack(layer: nn.Linear, *, keeps_plain: bool) -> None:
    weight = vars(layer)["_parameters"].pop("weight")
    layer.__class__ = PackedLinear
    vars(layer)["packed"] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    vars(layer)["plain"] = weight if keeps_plain else None


@torch.inference_mode(False)
@torch.no_grad()
def _unpacked(layer: PackedLinear) -> nn.Linear:
    """The layer as it was before it was packed."""
    packed, plain = vars(layer).pop("packed"), vars(layer).pop("plain")
    layer.__class__ = nn.Linear  # type: ignore[assignment]
    weight = nn.Parameter(packed.to_dense(), requires_grad=False) if plain is None else plain
    own = vars(layer)["_parameters"]
    vars(layer)["_parameters"] = {"weight": weight} | own  # first, as in a layer that never was packed
    return layer
