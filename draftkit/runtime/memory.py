"""What memory a device has left, and that a run fits into it before any of it is allocated."""

from __future__ import annotations

import torch

from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.memory_plan import MemoryPlan, slot_bytes
from draftkit.targets.device_map import DISK, is_spread
from draftkit.targets.target import Target


def require_memory(target: Target, drafter: Drafter | None, *, num_slots: int, capacity: int, k: int) -> None:
    """Raise `DraftkitError` where the state of so many slots does not fit beside the weights, which are loaded."""
    per_slot = slot_bytes(
        target=target.slot_bytes,
        draft=(drafter and drafter.slot_bytes) or (lambda capacity, k: 0),
        feature_size=target.feature_size,
        vocab_size=target.vocab_size,
        itemsize=target.dtype.itemsize,
        capacity=capacity,
        k=k,
    )
    if is_spread(target.model):  # what a slot needs is too
        places = {torch.device(place) for place in target.model.hf_device_map.values() if place != DISK}
        available = sum(map(available_memory, places))
    else:
        available = available_memory(target.device)
    MemoryPlan({}, per_slot, num_slots, capacity, available).require()


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil  # not needed on a GPU

    return psutil.virtual_memory().available
