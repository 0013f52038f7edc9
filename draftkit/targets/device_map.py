"""A target spread over several devices, where the user says so: its layers in their order, and its embedding and
output layer on the first.

What a draft borrows of the target is on one device then, and so is what it reads. What no GPU has room for waits in the
host's memory, then on the disk, and is copied for each forward by accelerate's hooks: right, and slow.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from transformers import PreTrainedModel

from draftkit.errors import DraftkitError, UnsupportedTarget
from draftkit.targets.recurrent import layers_with_states
from draftkit.targets.states import decoder_layers, decoder_of

FOR_WEIGHTS = 0.8  # of what is free on a device: the rest is for caches and what a forward computes
DISK = "disk"
OTHERWISE = (
    "vLLM splits targets over GPUs: eval --engine vllm --set tensor_parallel_size=N, "
    "data states --vllm-python ENV/bin/python --tensor-parallel N"
)

_log = logging.getLogger(__name__)


def room_from(device: str, *, disk: bool = True) -> dict[str, int]:
    """Bytes for weights on `device`, the GPUs after it, the host and, where wanted, the disk, in this order.

    Raises `DraftkitError` for one of several processes, each of which would take all devices.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise DraftkitError("--device-map for several processes", expected="one process", hint=OTHERWISE)
    room = {}
    if device != "cpu":
        for number in range(int(device.partition(":")[2]), torch.cuda.device_count()):
            room[f"cuda:{number}"] = int(torch.cuda.mem_get_info(number)[0] * FOR_WEIGHTS)
    room["cpu"] = int(available_memory(torch.device("cpu")) * FOR_WEIGHTS)
    return room | ({DISK: 1 << 62} if disk else {})


def map_layers(model: PreTrainedModel, room: Mapping[str, int]) -> dict[str, str]:
    """Where the parts of a model go that has no memory yet, as `from_pretrained` takes it.

    Everything but the decoder's layers is on the first device. A layer follows the one before it, or moves on to the
    next device with room. Raises `DraftkitError` where the embedding and the output layer alone are too large, or all
    layers together, and `UnsupportedTarget` for recurrent layers over several GPUs, whose states would lie on one.
    """
    decoder = decoder_of(model)
    layers = decoder_layers(decoder)
    names = {module: name for name, module in model.named_modules()}
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    first, *others = room
    left = room[first] - sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    if left < 0:
        raise DraftkitError(f"the target's embedding and head alone do not fit on {first}", hint=OTHERWISE)
    placed = dict.fromkeys(_outside(model, set(layers), names), first)
    here = first
    for layer in layers:
        size = sum(p.nbytes for p in layer.parameters())
        while size > left:
            if not others:
                raise DraftkitError("the target's layers do not fit on all devices together", hint=OTHERWISE)
            here = others.pop(0)
            left = room[here]
        left -= size
        placed[names[layer]] = here
    gpus = {place for place in placed.values() if place.startswith("cuda")}
    if len(gpus) > 1 and layers_with_states(model.config):
        raise UnsupportedTarget("a target with recurrent layers is not spread over several GPUs", hint=OTHERWISE)
    counts = {place: sum(placed[names[layer]] == place for layer in layers) for place in dict.fromkeys(placed.values())}
    _log.warning(
        "layers of the target: %s; rounds are not captured in CUDA graphs",
        ", ".join(f"{count} on {place}" for place, count in counts.items()),
    )
    return placed


def _outside(model: nn.Module, layers: set[nn.Module], names: Mapping[nn.Module, str]) -> Iterator[str]:
    """The names of the largest parts without a decoder layer in them."""
    for part in model.children():
        if part in layers:
            continue
        if layers.isdisjoint(part.modules()):
            yield names[part]
        else:
            yield from _outside(part, layers, names)


def is_spread(model: nn.Module) -> bool:
    """Whether a model's parts are in more than one place."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil  # not needed on a GPU

    return psutil.virtual_memory().available


_asked: ContextVar[bool] = ContextVar("device_map", default=False)


@contextmanager
def spread_targets(asked: bool = True) -> Iterator[None]:
    """Let targets that are loaded in the body to be run spread over all devices from theirs on."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def spreads_targets() -> bool:
    return _asked.get()
