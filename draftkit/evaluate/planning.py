"""What a measurement will take of memory, from configurations and file headers: nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PretrainedConfig

from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.models.footprint import footprint
from draftkit.models.target import read_target_config
from draftkit.runtime.memory import MemoryPlan, available_memory, slot_bytes

INT64 = 8


def plan_memory(
    target: Path,
    drafts: Mapping[str, Draft | None],
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int,
    longest: int,
    k: int,
) -> dict[str, MemoryPlan]:
    """A plan for each of `drafts` (None: n-gram lookup), measured in one run against the model in the folder `target`.

    `longest`: tokens of the longest sequence, prompt and output.
    """
    config = read_target_config(target)
    text = config.get_text_config()
    weights, position = _causal_lm_bytes(target, config, dtype)
    fixed = {"target weights": weights}
    for source, draft in drafts.items():
        if draft is not None:
            fixed[f"weights of {source}"] = sum(math.prod(t.shape) for t in draft.tensors.values()) * dtype.itemsize
    available = available_memory(device)
    plans = {}
    for source, draft in drafts.items():
        draft_position, states = _draft_bytes(draft, dtype)
        per_slot = slot_bytes(
            target_position=position,
            draft_position=draft_position,
            feature_size=states * text.hidden_size,
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


def _draft_bytes(draft: Draft | None, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a cached position, and how many of the target's hidden states are kept for the draft."""
    if draft is None:
        return INT64, 0
    match draft.spec.architecture:
        case EagleSpec(decoder=decoder, aux_layer_ids=ids):
            return decoder.cached_numbers * dtype.itemsize, len(ids or (0,))
        case CausalLMSpec(target_features=features):
            _, position = _causal_lm_bytes(draft.path, read_target_config(draft.path), dtype)
            return position, len(features.layer_ids) if features else 0
        case _:
            return 0, 1  # heads on the last state
