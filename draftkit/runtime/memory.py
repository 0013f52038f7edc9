"""That a run fits into a device's memory before any of it is allocated, and what is said where it did not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from transformers import PretrainedConfig

from draftkit.errors import out_of_device_memory
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.memory_plan import FLOAT32, MemoryPlan, SlotBytes, slot_bytes
from draftkit.runtime.ops.slot_attention import LONGEST_SPLIT
from draftkit.runtime.prefill import PREFILL_CHUNK
from draftkit.targets.device_map import available_memory, layer_shares, places_of
from draftkit.targets.footprint import Footprint, activation_bytes, largest, state_bytes
from draftkit.targets.target import Target, footprint_of

RESERVE = 32  # the share of a GPU's free memory that is left: libraries' workspaces, graphs, blocks too small for use
STATES_OF_PROMPTS = 4  # times that the states of a forward's rows are there: tapped, joined, put before a draft, in it


@dataclass(frozen=True)
class Load:
    """What is to be run: a target of `config` and `footprint` with a draft that keeps `draft` of a slot and reads
    `feature_size` numbers of a row; slots have `capacity` positions, and a round scores `k` nodes of each."""

    config: PretrainedConfig
    footprint: Footprint
    dtype: torch.dtype
    draft: SlotBytes
    feature_size: int
    capacity: int
    k: int

    def fixed(self, device: torch.device, available: int) -> dict[str, int]:
        """The bytes that no slot has for its own, by what they are for: the activations of the largest forward, which
        is that of prompts, with what a drafter reads of its rows; and on a GPU a layer's keys and values of the longest
        sequence, which are copied where prompts are joined, and a reserve of what is `available`."""
        activations = activation_bytes(self.config, PREFILL_CHUNK, self.dtype, self.footprint.recurrences)
        states = STATES_OF_PROMPTS * PREFILL_CHUNK * self.feature_size * self.dtype.itemsize
        found = {"activations": activations + states}
        if device.type == "cuda":
            found["reserve"] = available // RESERVE
            if not self.footprint.recurrences:  # beside which no prompts are joined
                layers = max(largest(self.config, "num_hidden_layers"), 1)
                found["activations"] += self.capacity * self.footprint.cached * self.dtype.itemsize // layers
        return found

    def per_slot(self, device: torch.device, share: float = 1.0, *, first: bool = True) -> dict[str, int]:
        """The bytes of a slot on a device that runs a `share` of the layers, and, as the `first` one, all else."""
        found = slot_bytes(
            target=partial(self.footprint.slot_bytes, self.dtype),
            draft=self.draft,
            feature_size=self.feature_size,
            vocab_size=self.config.get_text_config().vocab_size,
            itemsize=self.dtype.itemsize,
            capacity=self.capacity,
            k=self.k,
            row=activation_bytes(self.config, 1, self.dtype),
            state=state_bytes(self.footprint.recurrences),
            partials=self._partials if device.type == "cuda" else 0,
        )
        of_layers = {name: math.ceil(share * found[name]) for name in LAYERS_KEEP if name in found}
        return found | of_layers if first else of_layers | {name: found[name] for name in EVERYWHERE if name in found}

    @property
    def _partials(self) -> int:
        """What the partial results of a sequence's attention take, in float32, when its rows are split."""
        heads = largest(self.config, "num_attention_heads")
        width = max(
            largest(self.config, "v_head_dim"), largest(self.config, "kv_lora_rank"),
            largest(self.config, "head_dim") or largest(self.config, "hidden_size") // max(heads, 1),
        )  # fmt: skip
        splits = -(-self.capacity // LONGEST_SPLIT)
        return heads * (self.k + 1) * splits * (width + 1) * FLOAT32 if splits > 1 else 0


LAYERS_KEEP = ("target cache", "target states")  # parts of a slot that lie where the layers do
EVERYWHERE = ("activations of a round", "attention partials")  # parts that every device has


def plan_of(
    load: Load,
    num_slots: int,
    shares: Mapping[torch.device, float],
    available: Mapping[torch.device, int],
    weights: Mapping[torch.device, Mapping[str, int]] | None = None,
) -> MemoryPlan:
    """The plan of a run: of the devices, each with its share of the layers, the one with room for the fewest slots.
    `available` bytes are free on each, and `weights` are still to be loaded."""
    plans = []
    for number, (device, share) in enumerate(shares.items()):
        fixed = dict((weights or {}).get(device, {})) | load.fixed(device, available[device])
        per_slot = load.per_slot(device, share, first=number == 0)
        place = str(device) if len(shares) > 1 else None
        plans.append(MemoryPlan(fixed, per_slot, num_slots, load.capacity, available[device], place))
    return min(plans, key=lambda plan: plan.largest_batch)


def load_of(target: Target, drafter: Drafter | None, *, capacity: int, k: int) -> Load:
    """What an engine of the two runs."""
    return Load(
        config=target.model.config,
        footprint=footprint_of(target.model),
        dtype=target.dtype,
        draft=(drafter and drafter.slot_bytes) or (lambda capacity, k: 0),
        feature_size=target.feature_size,
        capacity=capacity,
        k=k,
    )


def require_memory(target: Target, drafter: Drafter | None, *, num_slots: int, capacity: int, k: int) -> None:
    """Raise `DraftkitError` where the state of so many slots does not fit beside the weights, which are loaded."""
    shares = layer_shares(target.model, places_of(target.model))
    available = {device: available_memory(device) for device in shares}
    plan_of(load_of(target, drafter, capacity=capacity, k=k), num_slots, shares, available).require()


class Sized(Protocol):
    """What decodes `num_slots` sequences together, with room for `capacity` tokens each."""

    num_slots: int

    @property
    def capacity(self) -> int: ...


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
            count = made.num_slots
            room = f", with room for {made.capacity:,} tokens each" if made.capacity else ""
            doing = f"{count} sequence{'s' * (count > 1)} were decoded together{room}"
            fewer = f"decode fewer together (--concurrency {count // 2})" if count > 1 else ""
            raise out_of_device_memory(error, doing, fewer) from error

    return explained
