"""One draft measured at one setting, as every engine fills it in and every view shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draftkit.io.records import json_value
from draftkit.io.shown import Rows, Shown
from draftkit.runtime.memory_plan import MemoryPlan
from draftkit.runtime.tree_kinds import DraftTree

if TYPE_CHECKING:
    from draftkit.results.settings import Settings

QUANTILES = 101  # the 0th … 100th percentile
# What was measured, whatever it is called. None: there is none, or it cannot be seen.
DIGESTS = ("target_sha256", "draft_sha256", "prompts_sha256", "template_sha256")
OPTIONAL = {"optional": True}  # a field that a file has only where there is something to say
OWN_ENGINE = "draftkit"


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over prompts.

    `low` and `high` are None of a single prompt, which tells nothing of others. `prompts`: how many there were.
    """

    mean: float
    low: float | None
    high: float | None
    prompts: int | None = field(default=None, metadata=OPTIONAL)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Where the interval begins and ends; None where there is none."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def above(self, value: float) -> bool:
        """Whether the whole interval lies above the value."""
        return self.low is not None and self.low > value

    def below(self, value: float) -> bool:
        """Whether the whole interval lies below the value."""
        return self.high is not None and self.high < value

    def overlaps(self, other: Interval) -> bool:
        """Whether the intervals have values in common; without one, the mean stands for it."""
        low, high = self.bounds or (self.mean, self.mean)
        other_low, other_high = other.bounds or (other.mean, other.mean)
        return low <= other_high and other_low <= high


NOTHING = dict.fromkeys(("mean", "low", "high"))  # how a file has the interval of no rounds


@dataclass(frozen=True)
class Times:
    """Mean and percentiles of a latency, in milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class TranscriptRound:
    """Texts of the draft tokens, how many were accepted, and the texts of all tokens that the round added."""

    drafted: tuple[str, ...]
    accepted: int
    emitted: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= len(self.drafted):
            raise ValueError(f"{self.accepted} of {len(self.drafted)} draft tokens cannot be accepted")


@dataclass(frozen=True)
class Transcript:
    """One generation as text. `first`: that of the first token, which the prefill gives."""

    id: str
    prompt: str
    first: str
    rounds: tuple[TranscriptRound, ...]
    category: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class NearTie:
    """Where greedy output leaves plain decoding's: the less likely token is `margin` below the best, as rounding may
    put it; `position` counts output tokens from 0."""

    request: str
    position: int
    margin: float


@dataclass(frozen=True)
class PromptRecord:
    """What one request did: the sums of which statistics over prompts are made.

    `drafts`: the rounds that had a draft, there where not all of them did. `seconds`: from its start to its last token,
    the mean of all passes; None where the engine does not say. What begins with `plain` is of plain decoding. `thinks`:
    whether the answer thinks aloud, where that was looked for. `prompt_tokens`: of the prompt, where it was tokenized.
    """

    id: str
    rounds: int
    accepted: int
    tokens: int
    seconds: float | None = None
    plain_tokens: int | None = None
    plain_seconds: float | None = None
    thinks: bool | None = field(default=None, metadata=OPTIONAL)
    drafts: int | None = field(default=None, metadata=OPTIONAL)
    prompt_tokens: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Slice:
    """Prompts that have something in common, as `language=da`: their acceptance length, and its `shift` against that of
    the other prompts; None where there are no others."""

    name: str
    prompts: int
    acceptance_length: Interval | None
    shift: Interval | None


@dataclass(frozen=True)
class MeasuredTree:
    """The tree that was drafted each round: `name` as `--tree` takes it, `nodes` without the root, `note` the same in
    the counting of the program that the kind comes from."""

    kind: str
    name: str
    nodes: int
    depth: int
    note: str = field(default="", compare=False)

    @classmethod
    def of(cls, tree: DraftTree | None) -> MeasuredTree | None:
        return None if tree is None else cls(tree.kind, tree.name, tree.nodes, tree.depth, tree.note)


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The head of a cell: what was measured, and how it was asked for."""

    target: str
    draft: str
    method: str | None = None
    dataset: str | None = None
    engine: str = OWN_ENGINE
    target_sha256: str | None = None
    draft_sha256: str | None = None
    prompts_sha256: str | None = None
    template_sha256: str | None = None
    num_speculative_tokens: int
    tree: MeasuredTree | None = field(default=None, metadata=OPTIONAL)
    temperature: float
    concurrency: int
    context: int | None = field(default=None, metadata=OPTIONAL)
    compiled: bool | None = field(default=None, metadata=OPTIONAL)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    draft_sampling: str | None = None
    min_confidence: float | None = field(default=None, metadata=OPTIONAL)
    verification: str | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}, and is at least 1")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}, and is at least 0")

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        engine: str,
        target: str,
        draft: str,
        method: str | None = None,
        dataset: str | None = None,
    ) -> Heading:
        """The heading of a draft that is measured as `settings` say."""
        return Heading(
            target=target,
            draft=draft,
            method=method,
            dataset=dataset,
            engine=engine,
            num_speculative_tokens=settings.num_speculative_tokens,
            tree=MeasuredTree.of(settings.drafted_tree),
            temperature=settings.sampling.temperature,
            concurrency=settings.concurrency,
            context=settings.context or None,
            compiled=(settings.compile and engine == OWN_ENGINE) or None,
            top_k=settings.sampling.top_k,
            top_p=settings.sampling.top_p,
            min_p=settings.sampling.min_p,
            seed=settings.sampling.seed,
            draft_sampling=settings.draft_mode,
            min_confidence=settings.draft_sampling.min_confidence or None,
            verification=settings.verification if settings.tree is None else "coupled",
            max_new_tokens=settings.max_new_tokens,
        )

    @property
    def asked(self) -> tuple[object, ...]:
        """What tells how a cell was asked for; a result has only one cell of each."""
        return (self.engine, *self.pair, self.compiled)

    @property
    def pair(self) -> tuple[object, ...]:
        """The same, whichever engine measured it."""
        setting = (self.num_speculative_tokens, self.tree_name, self.temperature, self.concurrency, self.context)
        return (self.target, self.draft, *setting, self.min_confidence)

    @property
    def tree_name(self) -> str | None:
        """The tree as `--tree` takes it; None of a chain."""
        return None if self.tree is None else self.tree.name

    @property
    def drafted(self) -> str:
        """K as `K=4`, or the tree, with the confidence from which on is drafted."""
        drafted = f"K={self.num_speculative_tokens}" if self.tree is None else self.tree.name
        return drafted + ("" if self.min_confidence is None else f", draft_confidence {self.min_confidence:g}")

    @property
    def drafts_a_round(self) -> str:
        """K, or of a tree the number of its nodes."""
        return str(self.num_speculative_tokens) if self.tree is None else f"{self.tree.nodes} nodes"

    @property
    def other_engine(self) -> str | None:
        """The engine; None for draftkit's own."""
        return None if self.engine == OWN_ENGINE else self.engine

    @property
    def draft_in_engine(self) -> str:
        """The draft, and the engine that ran it where that is not draftkit's own."""
        return self.draft if self.other_engine is None else f"{self.draft} in {self.engine}"

    @property
    def digests(self) -> dict[str, str | None]:
        """The content of what was measured, by its name in a file."""
        return {name: getattr(self, name) for name in DIGESTS}

    @property
    def key(self) -> tuple[object, ...]:
        """What tells measurements apart: how they were asked for, and what was measured."""
        return (*self.asked, *self.digests.values())

    @property
    def name(self) -> str:
        """The cell as messages call it."""
        context = "" if self.context is None else f", context {self.context}"
        return (
            f"{self.draft}, {self.drafted}, concurrency {self.concurrency}{context}{', compiled' * bool(self.compiled)}"
        )


@dataclass(frozen=True, kw_only=True)
class Cell(Heading, Shown):
    """One draft measured at one setting. Speed in output tokens a second; None and empty: not in the file.

    The acceptance length is over all `num_rounds`, also those in which nothing was drafted, as n-gram lookup may find
    nothing; `drafted_acceptance_length`, there where it differs, over the `num_drafts` that had a draft, and so are
    `acceptance_per_pos`. `interval_known`: whether the engine
    counted each request by itself; else there is no interval. `estimated`: what was accepted is told from the sizes of
    streamed chunks. What begins with `baseline` is of plain decoding. `passes`: how
    often the prompts were run by turns without a draft and with it; `pace_error`: how well, as a share of itself, that
    tells what a round costs against a plain step; both lack where the baseline was run before. `by_prompt`: the sums
    from which everything over prompts follows. `over_context`: by how much it is longer than that of the same prompts
    at the shortest context measured. `longer_by`: the acceptance length less that of the cell of `compared_with`, over
    the same prompts.
    """

    engine_version: str | None = field(default=None, metadata=OPTIONAL)
    num_prompts: int | None = None
    output_tokens: int | None = None
    num_rounds: int | None = field(default=None, metadata=OPTIONAL)
    num_drafts: int | None = None
    num_drafts_beyond: int | None = field(default=None, metadata=OPTIONAL)
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_accepted_tokens_per_pos: tuple[int, ...] | None = None
    acceptance_per_pos: tuple[float, ...] | None = None
    conditional_acceptance_per_pos: tuple[float | None, ...] | None = None
    acceptance_length: Interval | None
    drafted_acceptance_length: Interval | None = field(default=None, metadata=OPTIONAL)
    interval_known: bool | None = field(default=None, metadata=OPTIONAL)
    estimated: bool | None = field(default=None, metadata=OPTIONAL)
    expected_acceptance_length: Interval | None = None
    acceptance_length_by_convention: dict[str, float | None] = field(default_factory=dict)
    by_category: dict[str, Interval | None] = field(default_factory=dict)
    runtime_s: float | None = None
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    baseline_ttft_ms: Times | None = None
    baseline_output_tokens: int | None = None
    speedup: float | None = None
    speedup_interval: Interval | None = field(default=None, metadata=OPTIONAL)
    passes: int | None = field(default=None, metadata=OPTIONAL)
    pace_error: float | None = field(default=None, metadata=OPTIONAL)
    ttft_ms: Times | None = None
    tpot_ms: Times | None = None
    itl_ms: Times | None = None
    ttft_quantiles_ms: tuple[float, ...] | None = None
    tpot_quantiles_ms: tuple[float, ...] | None = None
    itl_quantiles_ms: tuple[float, ...] | None = None
    repetition: float | None = None
    matches_greedy: bool | None = None
    num_matching_prompts: int | None = None
    samples: tuple[Transcript, ...] | None = field(default=None, metadata=OPTIONAL)
    near_ties: tuple[NearTie, ...] | None = field(default=None, metadata=OPTIONAL)
    memory: MemoryPlan | None = field(default=None, metadata=OPTIONAL)
    by_prompt: tuple[PromptRecord, ...] | None = field(default=None, metadata=OPTIONAL)
    slices: tuple[Slice, ...] | None = field(default=None, metadata=OPTIONAL)
    over_context: Interval | None = field(default=None, metadata=OPTIONAL)
    compared_with: str | None = field(default=None, metadata=OPTIONAL)
    longer_by: Interval | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ttft_quantiles_ms", "tpot_quantiles_ms", "itl_quantiles_ms"):
            quantiles = getattr(self, name)
            if quantiles is not None and len(quantiles) != QUANTILES:
                raise ValueError(f"{name} has {len(quantiles)} numbers, and is the 0th to the 100th percentile")

    @property
    def accepted_at(self) -> tuple[float, ...]:
        """Rounds in which the draft token at each position was accepted / rounds, of those that the length is over."""
        counts, rounds = self.num_accepted_tokens_per_pos, self.num_rounds or self.num_drafts
        if self.acceptance_per_pos is not None and self.num_rounds in (None, self.num_drafts):
            return self.acceptance_per_pos
        return tuple(count / rounds for count in counts) if counts and rounds else ()

    @property
    def accepted_after(self) -> tuple[float | None, ...]:
        """The share that was accepted at each position of the rounds that accepted the one before; None without such
        rounds."""
        if self.conditional_acceptance_per_pos is not None:
            return self.conditional_acceptance_per_pos
        rates = self.accepted_at
        return tuple(rate / before if before else None for before, rate in zip((1.0, *rates), rates, strict=False))

    @property
    def times_faster(self) -> float | None:
        """How many times as fast as plain decoding on the same engine."""
        if self.speedup is not None:
            return self.speedup
        if self.tokens_per_second is None or not self.baseline_tokens_per_second:
            return None
        return self.tokens_per_second / self.baseline_tokens_per_second

    @property
    def faster(self) -> Interval | None:
        """How many times as fast as plain decoding, with the interval as far as there is one."""
        speedup = self.times_faster
        return self.speedup_interval or (None if speedup is None else Interval(speedup, None, None))

    @property
    def length_of_drafts(self) -> Interval | None:
        """The acceptance length over the rounds that had a draft, which are all where it does not differ."""
        return self.drafted_acceptance_length or self.acceptance_length

    @property
    def latencies(self) -> tuple[Times | None, ...]:
        """The cell's TTFT, TPOT and ITL, in this order."""
        return self.ttft_ms, self.tpot_ms, self.itl_ms

    def shown(self) -> Iterator[str | Rows]:
        """What was measured and at which setting, and every figure that there is."""
        from draftkit.results.metrics import metrics_of  # which is made of the fields of this class

        yield f"{self.draft_in_engine} with {self.target}, {self.name.partition(', ')[2]}, T={self.temperature:g}"
        told = metrics_of("notebook", [self])
        yield Rows(("metric", ""), [(metric.title, metric.text(self)) for metric in told])

    def to_dict(self) -> dict[str, Any]:
        """The cell as a file has it."""
        cell = fields_of(self)
        if self.num_drafts == 0:
            cell |= {name: cell[name] or NOTHING for name in ("acceptance_length", "expected_acceptance_length")}
        cell["by_category"] = {name: interval or NOTHING for name, interval in cell["by_category"].items()}
        if self.memory is not None:
            cell["memory"] = self.memory.to_dict()
        return cell


def fields_of(record: Any) -> dict[str, Any]:
    """The fields that a file has of a record, as JSON values."""
    return {
        item.name: json_value(getattr(record, item.name), fields_of)
        for item in dataclasses.fields(record)
        if item.metadata != OPTIONAL or getattr(record, item.name) is not None
    }
