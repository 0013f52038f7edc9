"""A draft in training, its weights, gradients and optimizer sharded among processes by FSDP2 (`accelerate launch`).

A layer that runs once in each forward, whatever the batch (`Recipe.layers_run_once`), is a group of its own: gathered
for its forward and once more for its backward pass. All else that is trained is one group, which is whole from the
beginning of a step's forward to the end of its backward pass, as losses read weights outside the forward of their
modules. So are layers that run several times: FSDP2 would reduce their gradients after each, and processes would wait
for each other at different times where how often depends on the rows (parts of a parallel pass). What is frozen, the
target's own parameters among it, stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from draftkit.errors import DraftkitError


def shard_trained_alone(
    plugin: FullyShardedDataParallelPlugin, recipe: nn.Module, layers: Sequence[nn.Module] = ()
) -> None:
    """Have accelerate shard the parameters of `recipe` that are trained, in float32, and compute as one process does.

    `layers`: those of `recipe` that are groups of their own; every module of their classes is. Raises `DraftkitError`
    for FSDP's first version.
    """
    if plugin.fsdp_version != 2:
        raise DraftkitError(
            "FSDP 1 cannot leave out what a draft shares with its target",
            hint="accelerate launch --use_fsdp --fsdp_version 2 … (fsdp_version: 2 in accelerate's configuration)",
        )
    plugin.ignored_modules = [nn.ParameterList(p for p in recipe.parameters() if not p.requires_grad)]
    classes = sorted({type(layer).__name__ for layer in layers})
    plugin.auto_wrap_policy = transformer_auto_wrap_policy if classes else None
    plugin.transformer_cls_names_to_wrap = classes or None
    plugin.reshard_after_forward = True  # of the layers
    plugin.cpu_ram_efficient_loading = False  # would take the target's parameters away, to fill them from rank 0
    plugin.mixed_precision_policy = None  # autocast does it, here as in one process


def is_sharded(recipe: nn.Module) -> bool:
    """Whether this process holds a part of the parameters at this moment."""
    return any(isinstance(parameter, DTensor) for parameter in recipe.parameters())


@contextmanager
def whole(recipe: nn.Module) -> Iterator[None]:
    """A recipe, for a while whole on each device: all processes come here together."""
    if not isinstance(recipe, FSDPModule) or not is_sharded(recipe):
        yield
        return
    recipe._get_fsdp_state()._lazy_init()  # or the first layer that runs would be taken for the root
    groups = [module for module in recipe.modules() if isinstance(module, FSDPModule)]
    layers = [group for group in groups if group is not recipe]
    for group in groups:
        group.unshard()
    for before, layer in pairwise([recipe, *layers]):
        layer.set_reshard_after_forward(False, recurse=False)
        # By itself a backward pass gathers ahead what ran before, be it here, which differs between processes.
        layer.set_modules_to_backward_prefetch([before])
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)
        for group in groups:
            group.reshard()


@contextmanager
def judging(recipe: nn.Module) -> Iterator[None]:
    """A recipe in training, for a while whole on each device and without dropout."""
    was_training = recipe.training
    recipe.eval()
    try:
        with whole(recipe):  # its forward would do so, but chains and tensors are methods of their own
            yield
    finally:
        recipe.train(was_training)


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
