"""What a round takes by arithmetic: the bytes that it reads, what it computes, the kernels that it launches.

A forward takes the longer of reading its weights, keys and values once and of computing its products; each kernel adds
a gap in which nothing is read. What that leaves out: how far an engine stays from a data sheet's figures, sampling from
large vocabularies, prompts, and the host.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
from transformers import PretrainedConfig

from draftkit.evaluate.job import Job, processor
from draftkit.evaluate.planning import weight_bytes
from draftkit.layout.folder import Draft
from draftkit.loading import OpenedTarget, open_target
from draftkit.results.settings import Settings, Sweep
from draftkit.runtime.drafters import family_of
from draftkit.targets.cost import EXPERTS, Cost, chosen_share, read_cost
from draftkit.targets.devices import device_named, dtype_named

# Kernels of a captured round at temperature 0, as benchmarks/data/launches.json counts them for Llama and Qwen3: of a
# decoder layer; of the target beside its layers, with the verdict; of a pass of a draft beside its layers; of drafting
# at all.
PER_LAYER, PER_ROUND, PER_PASS, DRAFTING = 11, 47, 8, 25
# Patterns for the names of a draft's tensors.
TABLE = re.compile(r"(^|\.)(embed_tokens|emb)\.")  # a token reads one of its rows
HEAD = re.compile(r"(^|\.)(lm_)?heads?\.")
LAYER = re.compile(r"layers\.(\d+)\.")
# How the device at hand is measured.
READ = 1 << 27  # bytes of a matrix that no cache of a CPU's cores holds
SQUARE = 1024  # rows of a matrix for products
LAUNCHES = 1000
REPEATS = 3


@dataclass(frozen=True)
class Device:
    """`bandwidth` in bytes a second, `speed` in bfloat16 operations a second, and the seconds that a kernel takes
    beside its work: `launch_gap`, within a CUDA graph."""

    name: str
    bandwidth: float
    speed: float
    launch_gap: float = 1.5e-6


# Bandwidth and speed (without sparsity) are those of NVIDIA's data sheets; the gap is assumed.
A100_40 = Device("A100 40 GB", 1.555e12, 312e12)
A100 = Device("A100 80 GB", 2.039e12, 312e12)
L40S = Device("L40S", 0.864e12, 362e12)
H100 = Device("H100", 3.35e12, 989e12)
H200 = Device("H200", 4.8e12, 989e12)
B200 = Device("B200", 8.0e12, 2250e12)
DEVICES = (A100, L40S, H100, H200, B200)


@dataclass(frozen=True)
class Forward:
    """A pass of a model over new rows of B sequences.

    `numbers`: of the weights that a row is multiplied with. `weights`: bytes that are read whatever the rows are; of
    `experts` bytes more, a row reads the share `chosen`. `cached`: bytes of a position's keys and values. `kernels`: of
    a pass.
    """

    numbers: float
    weights: float
    cached: float
    kernels: int
    experts: float = 0.0
    chosen: float = 1.0

    def bytes_read(self, sequences: int, rows: int, positions: int) -> float:
        """The bytes that `rows` in each sequence read, which look back on `positions`; experts are chosen by chance."""
        experts = self.experts * (1 - (1 - self.chosen) ** (sequences * rows))
        return self.weights + experts + self.cached * positions * sequences

    def seconds(self, device: Device, sequences: int, rows: int, positions: int) -> float:
        """The seconds of the forward without the gaps between kernels."""
        operations = 2 * sequences * rows * self.numbers
        return max(self.bytes_read(sequences, rows, positions) / device.bandwidth, operations / device.speed)


@dataclass(frozen=True)
class RoundCost:
    """A round of `k` drafts that takes `passes` of `draft`, the first over the rows that the target has accepted; in a
    single one there are those of all drafts besides. `passes` below 1 read so much of a draft alone. K = 0 and no draft
    is plain decoding."""

    target: Forward
    draft: Forward | None = None
    k: int = 0
    passes: float = 0.0

    @property
    def kernels(self) -> int:
        drafting = 0 if self.draft is None else DRAFTING + round(self.passes * self.draft.kernels)
        return self.target.kernels + drafting

    def bytes_read(self, sequences: int, positions: int) -> float:
        forwards = self._forwards
        return sum(share * forward.bytes_read(sequences, rows, positions) for forward, rows, share in forwards)

    def floor(self, device: Device, sequences: int, positions: int) -> float:
        """Seconds of its forwards alone, as if nothing were between kernels."""
        forwards = self._forwards
        return sum(share * forward.seconds(device, sequences, rows, positions) for forward, rows, share in forwards)

    def seconds(self, device: Device, sequences: int, positions: int) -> float:
        return self.floor(device, sequences, positions) + self.kernels * device.launch_gap

    @property
    def _forwards(self) -> list[tuple[Forward, int, float]]:
        """Each forward with its rows in a sequence, and how often it is run."""
        scoring = [(self.target, self.k + 1, 1.0)]
        if self.draft is None:
            return scoring
        if self.passes <= 1:
            return [*scoring, (self.draft, 2 * self.k, self.passes)]
        return [*scoring, (self.draft, self.k + 1, 1.0), (self.draft, 1, self.passes - 1)]


def present_device(device: torch.device, dtype: torch.dtype) -> Device:
    """The device at hand: a GPU of the table by its data sheet, any other device measured, which takes about a second.

    A product of a matrix with a vector tells the bandwidth, with a matrix the speed, and an operation on one number
    the gap."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    words = set(name.upper().replace("-", " ").split())
    known = [listed for listed in DEVICES if device.type == "cuda" and listed.name.split()[0] in words]
    if known and "40GB" not in words:
        return known[0]
    matrix = torch.ones(READ // dtype.itemsize // SQUARE, SQUARE, dtype=dtype, device=device)
    square, vector, one = matrix[:SQUARE], matrix[0], matrix[0, :1]
    return Device(
        name,
        bandwidth=READ / _seconds(lambda: matrix @ vector, device),
        speed=2 * SQUARE**3 / _seconds(lambda: square @ square, device),
        launch_gap=_seconds(lambda: [one + one for _ in range(LAUNCHES)], device) / LAUNCHES,
    )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few timings of a function, after a first call that warms up."""
    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


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
        """The cost as `draftkit eval --dry-run --json` has it."""
        return asdict(self) | {"pays_from": self.pays_from}


def plan_rounds(
    target: str | OpenedTarget, drafts: Sequence[str], asked: Settings | Sweep | None = None
) -> dict[str, list[PlannedRound]]:
    """What a round of each draft would take, on the device at hand and on those of a small table; no weights are
    loaded. Sequences look back on their prompt and half of what follows, in the mean. Raises `DraftkitError`."""
    sweep = Sweep.of(asked or Settings())
    target = open_target(target)
    target.require_runtime("rounds are planned for draftkit's own engine alone")
    device = device_named(sweep.first.device)
    dtype = dtype_named(sweep.first.dtype, device)
    here = present_device(torch.device(device), dtype)
    with ExitStack() as stack:
        job = Job(target, drafts, sweep, stack)
        asked_at = [job.conversations(sweep.first.at(context=context)).extents for context in sweep.context]
        return plan_time(
            job.opened_target,
            job.drafts,
            devices=[here, *(listed for listed in DEVICES if listed is not here)],
            dtype=dtype,
            batches=sweep.concurrency,
            contexts=[round(fmean(prompt + new / 2 for _, prompt, new in extents)) for extents in asked_at],
            ks=sweep.k,
        )


def plan_time(
    target: OpenedTarget,
    drafts: Mapping[str, Draft],
    *,
    devices: Sequence[Device],
    dtype: torch.dtype,
    batches: Sequence[int],
    contexts: Sequence[int],
    ks: Sequence[int],
) -> dict[str, list[PlannedRound]]:
    """Rounds of each of `drafts` with the model `target`, in all of these combinations."""
    config = target.config
    scoring = _of_target(target, dtype)
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


def _of_target(target: OpenedTarget, dtype: torch.dtype) -> Forward:
    """The cost of a target's forward, with its weights as wide as they lie in memory."""
    config, own = target.supported
    width = weight_bytes(target.folder, config, own, dtype) / own.parameters
    return _forward(read_cost(target.folder), width, own.cached * dtype.itemsize, PER_ROUND)


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
    """The cost of a draft that is no model of its own: its output layer may be the target's, or its embedding."""
    text = target.get_text_config()
    sizes = {name: math.prod(shape) for name, (_, shape) in draft.plain_tensors.items() if len(shape) > 1}
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
