"""What a round will cost, from configurations and file headers by arithmetic: nothing is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import PretrainedConfig

from draftkit.evaluate.job import Job
from draftkit.evaluate.planning import weight_bytes
from draftkit.evaluate.present_device import present_device
from draftkit.evaluate.round_cost import DEVICES, PER_LAYER, PER_PASS, PER_ROUND, Device, Forward, RoundCost
from draftkit.layout.folder import Draft
from draftkit.loading import require_runtime
from draftkit.results.settings import Settings, Sweep
from draftkit.runtime.drafters import family_of
from draftkit.targets.cost import EXPERTS, Cost, chosen_share, read_cost
from draftkit.targets.devices import device_named, dtype_named
from draftkit.targets.footprint import footprint
from draftkit.targets.target import read_target_config

TABLE = re.compile(r"(^|\.)(embed_tokens|emb)\.")  # tensors of which a token reads one row
HEAD = re.compile(r"(^|\.)(lm_)?heads?\.")
LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class PlannedRound:
    """A round of `batch` sequences that look back on `context` positions. `bytes_read` by all forwards; `kernels`
    launched; `ms` it takes on the device, and `plain_ms` a round without a draft."""

    device: str
    batch: int
    context: int
    num_speculative_tokens: int
    bytes_read: int
    kernels: int
    ms: float
    plain_ms: float

    @property
    def pays_from(self) -> float:
        """The acceptance length above which the draft makes decoding faster."""
        return self.ms / self.plain_ms

    def to_dict(self) -> dict[str, object]:
        """As `draftkit plan --json` has it."""
        return asdict(self) | {"pays_from": self.pays_from}


def plan_rounds(
    target: str, drafts: Sequence[str], asked: Settings | Sweep | None = None
) -> dict[str, list[PlannedRound]]:
    """What a round of each draft would take, on the device at hand and on those of a small table; no weights are
    loaded. Sequences look back on their prompt and half of what follows, in the mean. Raises `DraftkitError`."""
    sweep = Sweep.of(asked or Settings())
    require_runtime(target, "rounds are planned for draftkit's own engine alone")
    device = device_named(sweep.first.device)
    dtype = dtype_named(sweep.first.dtype, device)
    here = present_device(torch.device(device), dtype)
    with ExitStack() as stack:
        job = Job(target, drafts, sweep, stack)
        asked_at = [job.conversations(sweep.first.at(context=context)).extents for context in sweep.context]
        return plan_time(
            job.folder,
            job.drafts,
            devices=[here, *(listed for listed in DEVICES if listed is not here)],
            dtype=dtype,
            batches=sweep.concurrency,
            contexts=[round(fmean(prompt + new / 2 for _, prompt, new in extents)) for extents in asked_at],
            ks=sweep.k,
        )


def plan_time(
    target: Path,
    drafts: Mapping[str, Draft],
    *,
    devices: Sequence[Device],
    dtype: torch.dtype,
    batches: Sequence[int],
    contexts: Sequence[int],
    ks: Sequence[int],
) -> dict[str, list[PlannedRound]]:
    """Rounds of each of `drafts` with the model in the folder `target`, in all of these combinations."""
    config = read_target_config(target)
    scoring = _of_target(target, config, dtype)
    return {
        source: [
            _planned(RoundCost(scoring, drafting, k, draft.spec.architecture.passes(k)), device, batch, context)
            for device in devices
            for context in contexts
            for batch in batches
            for k in ks
        ]
        for source, draft, drafting in _of_drafts(drafts, config, dtype)
    }


def _planned(drafted: RoundCost, device: Device, batch: int, context: int) -> PlannedRound:
    return PlannedRound(
        device=device.name,
        batch=batch,
        context=context,
        num_speculative_tokens=drafted.k,
        bytes_read=round(drafted.bytes_read(batch, context)),
        kernels=drafted.kernels,
        ms=1e3 * drafted.seconds(device, batch, context),
        plain_ms=1e3 * RoundCost(drafted.target).seconds(device, batch, context),
    )


def _of_target(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> Forward:
    """Its weights as wide as they lie in memory."""
    own = footprint(config)
    width = weight_bytes(folder, config, own, dtype) / own.parameters
    return _forward(read_cost(folder), width, own.cached * dtype.itemsize, PER_ROUND)


def _of_drafts(
    drafts: Mapping[str, Draft], target: PretrainedConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Draft, Forward | None]]:
    """Each draft with a pass of it; None where nothing is learned."""
    for source, draft in drafts.items():
        cached = family_of(draft).slot_bytes(draft, dtype)(1, 1)
        if not draft.tensors:
            yield source, draft, None
            continue
        cost = read_cost(draft.path) if draft.spec.architecture.own_model else _cost(draft, target)
        yield source, draft, _forward(cost, dtype.itemsize, cached, PER_PASS)


def _forward(cost: Cost, width: float, cached: float, others: int) -> Forward:
    """A pass with weights of `width` bytes, and so many kernels beside those of its layers."""
    experts = width * cost.experts
    always = width * cost.per_token - cost.chosen * experts
    return Forward(cost.per_token, always, cached, others + PER_LAYER * cost.layers, experts, cost.chosen)


def _cost(draft: Draft, target: PretrainedConfig) -> Cost:
    """Of a draft that is no model of its own: its output layer may be the target's, or its embedding."""
    text = target.get_text_config()
    sizes = {name: math.prod(tensor.shape) for name, tensor in draft.tensors.items() if len(tensor.shape) > 1}
    tables = sum(size for name, size in sizes.items() if TABLE.search(name))
    head = 0
    if not any(HEAD.search(name) for name in sizes):
        borrowed = not tables or getattr(draft.spec.architecture, "lm_head", None) == "target"
        head = text.vocab_size * text.hidden_size if borrowed else tables
    experts = sum(size for name, size in sizes.items() if EXPERTS in name)
    chosen = chosen_share(text) if experts else 1.0
    layers = {found[1] for name in draft.tensors if (found := LAYER.search(name))}
    parameters = sum(sizes.values())
    per_token = parameters - tables + head - round((1 - chosen) * experts)
    return Cost(parameters, per_token, experts, chosen, len(layers))
