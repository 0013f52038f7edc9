"""The memory that a measurement will take, from configurations and file headers; nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PretrainedConfig

from draftkit.evaluate.job import Job
from draftkit.layout.folder import Draft
from draftkit.loading import OpenedTarget, open_target
from draftkit.results.settings import Settings, Sweep
from draftkit.runtime.drafters import family_of
from draftkit.runtime.fusion.packed_linear import kept_twice
from draftkit.runtime.memory import Load, plan_of
from draftkit.runtime.memory_plan import MemoryPlan
from draftkit.runtime.tree_kinds import DraftTree
from draftkit.targets.device_map import (
    available_memory,
    layer_shares,
    map_layers,
    room_from,
    spreads_targets,
    weight_shares,
)
from draftkit.targets.devices import device_named, dtype_named
from draftkit.targets.footprint import Footprint
from draftkit.targets.pretrained import empty_model, stays_quantized
from draftkit.targets.rope import Positions
from draftkit.targets.target import own_model


def plan_evaluation(
    target: str | OpenedTarget, drafts: Sequence[str], settings: Settings | None = None
) -> dict[str, MemoryPlan]:
    """What `evaluate_draft` would take of memory with each draft; no weights are loaded. Raises `DraftkitError`."""
    settings = settings or Settings()
    target = open_target(target)
    target.require_runtime("vLLM plans its memory itself: run draftkit eval --engine vllm")
    with ExitStack() as stack:
        return plans_of(Job(target, drafts, Sweep.of(settings), stack), settings)


def plans_of(job: Job, settings: Settings) -> dict[str, MemoryPlan]:
    """A plan for each draft of a job. Raises `DraftkitError` for prompts that the target has no positions for."""
    asked, device = job.conversations(settings), device_named(settings.device)
    positions = Positions.of(job.loaded_target.config)
    for name, prompt, new in asked.extents:
        positions.check(name, prompt, new)
    return plan_memory(
        job.loaded_target,
        job.drafts,
        device=torch.device(device),
        dtype=dtype_named(settings.dtype, device),
        num_slots=min(settings.concurrency, len(asked.prompts)),
        longest=asked.longest,
        k=settings.num_speculative_tokens,
        tree=settings.drafted_tree,
    )


def plan_memory(
    target: OpenedTarget,
    drafts: Mapping[str, Draft],
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int,
    longest: int,
    k: int,
    tree: DraftTree | None = None,
) -> dict[str, MemoryPlan]:
    """A plan for each of `drafts`, measured in one run against the model `target`.

    `longest`: tokens of the longest sequence, prompt and output.
    """
    config = target.config
    own = target.supported.footprint
    shares, held = {device: 1.0}, {device: 1.0}
    if spreads_targets():
        empty = empty_model(config, dtype)
        placed = map_layers(empty, room_from(str(device)))
        shares, held = layer_shares(empty, placed), weight_shares(empty, placed)
    whole = weight_bytes(target.folder, config, own, dtype)
    weights = {place: {"target weights": round(share * whole)} for place, share in held.items()}
    first = weights[next(iter(shares))]
    for source, draft in drafts.items():
        if draft.tensors:
            first[f"weights of {source}"] = (
                sum(math.prod(shape) for _, shape in draft.plain_tensors.values()) * dtype.itemsize
            )
    if device.type == "cpu":
        first["packed copies"] = dtype.itemsize * _kept_twice(config, drafts.values(), dtype)
    available = {place: available_memory(place) for place in shares}
    plans = {}
    for source, draft in drafts.items():
        load = Load(
            config=config,
            footprint=own,
            dtype=dtype,
            draft=family_of(draft).slot_bytes(draft, dtype),
            feature_size=draft.spec.architecture.states_read * config.get_text_config().hidden_size,
            capacity=longest + (k if tree is None else tree.span) + 1,
            k=k if tree is None else tree.nodes,
        )
        plans[source] = plan_of(load, num_slots, shares, available, weights)
    return plans


def weight_bytes(folder: Path, config: PretrainedConfig, own: Footprint, dtype: torch.dtype) -> int:
    """The bytes of a model's weights; those that stay quantized are as large as their files."""
    if stays_quantized(config):
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return own.parameters * dtype.itemsize


def _kept_twice(config: PretrainedConfig, drafts: Iterable[Draft], dtype: torch.dtype) -> int:
    """How many numbers of linear layers the CPU keeps both plain and packed."""
    count = 0 if stays_quantized(config) else kept_twice(empty_model(config, dtype), dtype)
    for draft in drafts:
        if draft.tensors and draft.spec.architecture.own_model:
            count += kept_twice(empty_model(draft.kept(own_model).config, dtype), dtype)
    return count
