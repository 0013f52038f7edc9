"""What a measurement will take of memory, from configurations and file headers: nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PretrainedConfig

from draftkit.layout.folder import Draft
from draftkit.models.footprint import footprint
from draftkit.models.target import read_target_config
from draftkit.runtime.drafters import family_of
from draftkit.runtime.memory import available_memory
from draftkit.runtime.memory_plan import MemoryPlan, slot_bytes


def plan_memory(
    target: Path,
    drafts: Mapping[str, Draft],
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int,
    longest: int,
    k: int,
) -> dict[str, MemoryPlan]:
    """A plan for each of `drafts`, measured in one run against the model in the folder `target`.

    `longest`: tokens of the longest sequence, prompt and output.
    """
    config = read_target_config(target)
    text = config.get_text_config()
    weights, position = _causal_lm_bytes(target, config, dtype)
    fixed = {"target weights": weights}
    for source, draft in drafts.items():
        if draft.tensors:
            fixed[f"weights of {source}"] = sum(math.prod(t.shape) for t in draft.tensors.values()) * dtype.itemsize
    available = available_memory(device)
    plans = {}
    for source, draft in drafts.items():
        per_slot = slot_bytes(
            target_position=position,
            draft_position=family_of(draft).position_bytes(draft, dtype),
            feature_size=draft.spec.architecture.states_read * text.hidden_size,
            vocab_size=text.vocab_size,
            itemsize=dtype.itemsize,
            capacity=longest + k + 1,
            k=k,
        )
        plans[source] = MemoryPlan(fixed, per_slot, num_slots, longest + k + 1, available)
    return plans


def _causal_lm_bytes(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Of the weights, and of a position's keys and values. Quantized weights are as large as their files."""
    parameters, cached = footprint(config)
    if getattr(config, "quantization_config", None) is not None:
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    else:
        weights = parameters * dtype.itemsize
    return weights, cached * dtype.itemsize
