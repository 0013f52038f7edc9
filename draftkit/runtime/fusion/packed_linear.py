"""Linear layers whose weights lie as products read them: side by side where they read the same rows, and on the CPU as
oneDNN wants them.

A product of a few rows with a plain weight spends most of its time on rearranging the weight. On the CPU that is done
once, and the plain weight is given up. Whoever asks a layer for it, by name, as a parameter, for its state or for a
copy, gets it back, and a plain layer from then on. A forward with gradients is that of a plain layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def pack(model: nn.Module) -> None:
    """Pack the frozen linear layers of `model` that are on the CPU and are torch's own; all others stay as they are.

    A weight that another module shares, as that of tied embeddings, is kept beside its packed copy.
    """
    shared = _shared(model)
    for module in model.modules():
        if _packable(module):
            joint = joint_of(module) or Joint([module])
            if all(_packable(layer) for layer in joint.layers):
                joint.pack(keeps_plain=id(module.weight) in shared)


def kept_twice(model: nn.Module, dtype: torch.dtype) -> int:
    """How many numbers `pack` would keep in both ways, in the dtype; the model may be on the meta device."""
    if not packs(dtype):
        return 0
    shared = _shared(model)
    weights = [module.weight for module in model.modules() if type(module) is nn.Linear]
    return sum(weight.numel() for weight in weights if id(weight) in shared)


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


def own_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model, none of which is unpacked: packed ones are left out. A shared one comes repeatedly."""
    for module in model.modules():
        yield from (parameter for parameter in vars(module)["_parameters"].values() if parameter is not None)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's parameters, none of which is unpacked."""
    return next(own_parameters(model)).dtype


class Joint:
    """One product in the place of those of linear layers that read the same rows.

    Their weights are parts of one tensor, and stay the layers' own; while that is packed they have none.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = tuple(layers)
        self.widths = [layer.out_features for layer in layers]
        self._bias: Tensor | None = None
        self._packed: Tensor | None = None
        self._join()
        for layer in layers:
            vars(layer)["joint"] = self

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] → [..., the sum of the layers' widths]."""
        if self._packed is None:
            return linear(x, self._weight, self._bias)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            self.unpack()
            return linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def renew(self) -> None:
        """Join anew weights that are no parts of one tensor any more, as in a copy of a model that was converted."""
        if self._packed is None and not all(
            layer.weight.dtype == part.dtype and layer.weight.data_ptr() == part.data_ptr()
            for layer, part in zip(self.layers, self._weight.split(self.widths), strict=True)
        ):
            self._join()

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack(self, *, keeps_plain: bool) -> None:
        """Leave the layers without a plain weight, but for one that is needed elsewhere."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)
        del self._weight
        for layer in self.layers:
            weight = vars(layer)["_parameters"].pop("weight")
            vars(layer)["plain"] = weight if keeps_plain else None
            layer.__class__ = PackedLinear

    @torch.inference_mode(False)
    @torch.no_grad()
    def unpack(self) -> None:
        """The layers as they were before they were packed."""
        assert self._packed is not None
        self._weight, self._packed = self._packed.to_dense(), None
        for layer, part in zip(self.layers, self._weight.split(self.widths), strict=True):
            plain = vars(layer).pop("plain")
            own = vars(layer)["_parameters"]
            weight = nn.Parameter(part, requires_grad=False) if plain is None else plain
            vars(layer)["_parameters"] = {"weight": weight} | own  # first, as in a layer that never was packed
            layer.__class__ = nn.Linear
        if len(self.layers) == 1:
            del vars(self.layers[0])["joint"]

    def _join(self) -> None:
        self._weight = _joined([layer.weight for layer in self.layers])
        if self.layers[0].bias is not None:
            self._bias = _joined([layer.bias for layer in self.layers])


def joint_of(layer: nn.Module) -> Joint | None:
    """The module that a linear layer is a part of."""
    joint: Joint | None = vars(layer).get("joint")
    return joint


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed, alone or with others; `plain` is None where it is all it has."""

    joint: Joint
    plain: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        joint = self.joint
        if len(joint.layers) == 1:
            return joint(x)
        return joint(x).split(joint.widths, dim=-1)[joint.layers.index(self)]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return _unpacked(self).weight

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:  # type: ignore[override]
        return vars(_unpacked(self))["_parameters"]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return _unpacked(self).__reduce_ex__(protocol)


def _unpacked(layer: PackedLinear) -> nn.Linear:
    layer.joint.unpack()
    return layer


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0].data
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return joint


def _shared(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have."""
    users = Counter(id(parameter) for parameter in own_parameters(model))
    return {parameter for parameter, count in users.items() if count > 1}


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in vars(module):  # some tools replace that of a module
        return False
    weight = module.weight
    alone = type(weight) is nn.Parameter and not weight.requires_grad and weight.layout == torch.strided
    return alone and weight.device.type == "cpu" and weight.numel() > 0 and packs(weight.dtype)
