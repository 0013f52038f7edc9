"""A draft in training, its weights, gradients and optimizer sharded among processes by FSDP2 (`accelerate launch`).

What is trained is one group, which is whole from the beginning of a step's forward to the end of its backward pass.
Groups of single layers would be gathered at other times in each process: how often a layer runs depends on the rows
(parts of a parallel pass), and losses and contexts read weights outside the forward of their modules. What is frozen,
the target's own parameters among it, stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from draftkit.errors import DraftkitError


def shard_trained_alone(plugin: FullyShardedDataParallelPlugin, recipe: nn.Module) -> None:
    """Have accelerate shard the parameters of `recipe` that are trained, in float32, and compute as one process does.

    Raises `DraftkitError` for FSDP's first version.
    """
    if plugin.fsdp_version != 2:
        raise DraftkitError(
            "FSDP 1 cannot leave out what a draft shares with its target",
            hint="accelerate launch --use_fsdp --fsdp_version 2 … (fsdp_version: 2 in accelerate's configuration)",
        )
    plugin.ignored_modules = [nn.ParameterList(p for p in recipe.parameters() if not p.requires_grad)]
    plugin.auto_wrap_policy = None
    plugin.cpu_ram_efficient_loading = False  # would take the target's parameters away, to fill them from rank 0
    plugin.mixed_precision_policy = None  # autocast does it, here as in one process


def is_sharded(recipe: nn.Module) -> bool:
    """Whether this process holds a part of the parameters at this moment."""
    return any(isinstance(parameter, DTensor) for parameter in recipe.parameters())


@contextmanager
def whole(recipe: nn.Module) -> Iterator[None]:
    """A recipe, for a while whole on each device: all processes come here together."""
    sharded = isinstance(recipe, FSDPModule) and is_sharded(recipe)
    if isinstance(recipe, FSDPModule) and sharded:
        recipe.unshard()
    try:
        yield
    finally:
        if isinstance(recipe, FSDPModule) and sharded:
            recipe.reshard()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` of a module that is whole; FSDP has a hook that would take it apart for its own."""
    lasting = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        for name in part._buffers.keys() - part._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in lasting}
    return {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)} | buffers


def whole_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer as that of one process has it, on the CPU: all processes come here together."""
    found: dict[str, Any] = optimizer.state_dict()
    for number, state in found["state"].items():
        found["state"][number] = {
            name: value.full_tensor().cpu() if isinstance(value, DTensor) else value for name, value in state.items()
        }
    return found


def load_whole_optimizer(optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
    """Go on with what `whole_optimizer` gave, or the optimizer of one process: each process keeps its part."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in found["state"].items():
        found["state"][number] = {name: _like(parameters[number], name, value) for name, value in state.items()}
    optimizer.load_state_dict(found)


def _like(parameter: Tensor, name: str, value: Any) -> Any:
    """What the optimizer keeps of a parameter, sharded as it is; the number of steps is one for all."""
    if name == "step" or not isinstance(parameter, DTensor):
        return value
    moved = value.to(parameter.device)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
