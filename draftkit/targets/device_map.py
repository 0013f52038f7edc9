"""A target spread over several devices, where the user says so: its layers in their order, and its embedding and
output layer on the first.

What a draft borrows of the target is on one device then, and so is what it reads. What no GPU has room for waits in the
host's memory, then on the disk, and is copied for each forward by accelerate's hooks: right, and slow.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
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
    next device with room. Several GPUs that are needed, and hold all of it together, share it evenly. Raises
    `DraftkitError` where the embedding and the output layer alone are too large, or all layers together, and
    `UnsupportedTarget` for recurrent layers over several GPUs, whose states would lie on one.
    """
    decoder = decoder_of(model)
    layers = decoder_layers(decoder)
    names = {module: name for name, module in model.named_modules()}
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    ends = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    room = _shared_evenly(room, ends + sum(sizes), max(sizes))
    first, *others = room
    left = room[first] - ends
    if left < 0:
        raise DraftkitError(f"the target's embedding and head alone do not fit on {first}", hint=OTHERWISE)
    placed = dict.fromkeys(_outside(model, set(layers), names), first)
    here = first
    for layer, size in zip(layers, sizes, strict=True):
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


def _shared_evenly(room: Mapping[str, int], total: int, largest: int) -> Mapping[str, int]:
    """The bytes of `room` that a model of `total` is to take, whose layers have up to `largest`: where it needs several
    GPUs and fits on them, as much of each, so that what is left for caches is alike too."""
    gpus = {name: size for name, size in room.items() if name.startswith("cuda")}
    everywhere = sum(gpus.values())
    if total <= next(iter(room.values())) or total > everywhere - len(gpus) * largest:
        return room
    shares = {name: math.ceil(size * total / everywhere) + largest for name, size in gpus.items()}
    return {name: min(size, shares.get(name, size)) for name, size in room.items()}


Placed = Mapping[str, str | int | torch.device]  # by the name of a part of a model, as `from_pretrained` takes it


def places_of(model: nn.Module) -> Placed:
    """Where the parts of a loaded model are."""
    return getattr(model, "hf_device_map", None) or {"": next(model.parameters()).device}


def layer_shares(model: PreTrainedModel, placed: Placed) -> dict[torch.device, float]:
    """The share of a model's decoder layers that each device runs, and keeps the caches of; the first one, which comes
    first, runs those besides that wait in the host's memory or on the disk for it."""
    layers = decoder_layers(decoder_of(model))
    names = {module: name for name, module in model.named_modules()}
    first = next(torch.device(place) for place in placed.values() if place != DISK)
    shares = {first: 0.0}
    for layer in layers:
        place = _place_of(names[layer], placed)
        device = first if place == DISK or torch.device(place).type != first.type else torch.device(place)
        shares[device] = shares.get(device, 0.0) + 1 / len(layers)
    return shares


def weight_shares(model: nn.Module, placed: Placed) -> dict[torch.device, float]:
    """The share of a model's weights that each device holds; those on the disk are left out."""
    held: Counter[torch.device] = Counter()
    for name, parameter in model.named_parameters():
        place = _place_of(name, placed)
        if place != DISK:
            held[torch.device(place)] += parameter.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    return {device: count / total for device, count in held.items()}


def _place_of(name: str, placed: Placed) -> str | int | torch.device:
    """Where a part of a model is that is placed itself, or with a part that it belongs to; else all is in one place."""
    while name and name not in placed:
        name = name.rpartition(".")[0]
    return placed[name] if name in placed else next(iter(placed.values()))


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
