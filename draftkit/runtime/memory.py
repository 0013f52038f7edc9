"""That a run fits into a device's memory before any of it is allocated, and what is said where it did not."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from transformers import PretrainedConfig

from draftkit.errors import DraftkitError
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.memory_plan import FLOAT32, MemoryPlan, slot_bytes
from draftkit.runtime.ops.slot_attention import LONGEST_SPLIT
from draftkit.runtime.prefill import PREFILL_CHUNK
from draftkit.targets.device_map import DISK, available_memory, is_spread
from draftkit.targets.footprint import activation_bytes, largest
from draftkit.targets.target import Target

RESERVE = 32  # the share of a GPU's free memory that is left: libraries' workspaces, graphs, blocks too small for use


def working_memory(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, feature_size: int, available: int
) -> dict[str, int]:
    """The bytes that no slot has for its own, by what they are for: the activations of the largest forward, which is
    that of prompts, with what a drafter reads of its rows; and on a GPU a reserve of what is `available`."""
    activations = activation_bytes(config, PREFILL_CHUNK, dtype) + 2 * PREFILL_CHUNK * feature_size * dtype.itemsize
    return {"activations": activations} | ({"reserve": available // RESERVE} if device.type == "cuda" else {})


def partial_bytes(config: PretrainedConfig, device: torch.device, capacity: int, k: int) -> int:
    """What the partial results of a sequence's attention take on a GPU, in float32, when its rows are split."""
    heads = largest(config, "num_attention_heads")
    width = (
        largest(config, "v_head_dim") or largest(config, "head_dim") or largest(config, "hidden_size") // max(heads, 1)
    )
    splits = -(-capacity // LONGEST_SPLIT)
    return heads * (k + 1) * splits * (width + 1) * FLOAT32 if device.type == "cuda" and splits > 1 else 0


def require_memory(target: Target, drafter: Drafter | None, *, num_slots: int, capacity: int, k: int) -> None:
    """Raise `DraftkitError` where the state of so many slots does not fit beside the weights, which are loaded."""
    config, device = target.model.config, target.device
    per_slot = slot_bytes(
        target=target.slot_bytes,
        draft=(drafter and drafter.slot_bytes) or (lambda capacity, k: 0),
        feature_size=target.feature_size,
        vocab_size=target.vocab_size,
        itemsize=target.dtype.itemsize,
        capacity=capacity,
        k=k,
        partials=partial_bytes(config, device, capacity, k),
    )
    if is_spread(target.model):  # what a slot needs is too
        places = {torch.device(place) for place in target.model.hf_device_map.values() if place != DISK}
        available = sum(map(available_memory, places))
    else:
        available = available_memory(target.device)
    working = working_memory(config, target.dtype, device, feature_size=target.feature_size, available=available)
    MemoryPlan(working, per_slot, num_slots, capacity, available).require()


class Sized(Protocol):
    """What decodes `num_slots` sequences together."""

    num_slots: int


Made = TypeVar("Made", bound=Sized)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def explains_memory(
    method: Callable[Concatenate[Made, Given], Result],
) -> Callable[Concatenate[Made, Given], Result]:
    """Have a device that runs out of memory in a method end in a `DraftkitError` that says what would need less."""

    @wraps(method)
    def explained(made: Made, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return method(made, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, made.num_slots) from error

    return explained


def out_of_memory(error: torch.OutOfMemoryError, num_slots: int) -> DraftkitError:
    """The error for a device whose memory did not suffice for `num_slots` sequences together."""
    fewer = f"decode fewer together (--concurrency {num_slots // 2}), " if num_slots > 1 else ""
    return DraftkitError(
        f"the device ran out of memory while {num_slots} sequence{'s' * (num_slots > 1)} "
        f"were decoded together: {str(error).split('. ', 1)[0]}",
        hint=f"{fewer}take shorter prompts or answers (--context, --max-new-tokens), or let the allocator's blocks "
        "grow: PYTORCH_ALLOC_CONF=expandable_segments:True",
    )
