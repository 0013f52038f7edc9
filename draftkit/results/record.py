"""A measurement: made by every engine, returned by `evaluate_draft`, written as JSON and read back, shown by reports.

Fields are added over time and never renamed, so a reader passes over those it does not know, and copes without those
that are optional here: older files, and other engines, lack them.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftkit.errors import FormatError, SourceError
from draftkit.finding import Finding, Severity
from draftkit.hub.local_paths import names_of_paths, with_names
from draftkit.io.jsonfile import finite, read_object
from draftkit.io.records import read_record
from draftkit.runtime.memory_plan import MemoryPlan

if TYPE_CHECKING:
    from draftkit.results.settings import Settings

SCHEMA = 1
TRUSTED = 0.1  # the mean error up to which a speed model is believed, where no interval says
QUANTILES = 101  # the 0th … 100th percentile
# What was measured, whatever it is called. None: there is none, or it cannot be seen, or an older file does not say.
DIGESTS = ("target_sha256", "draft_sha256", "prompts_sha256", "template_sha256")
OPTIONAL = {"optional": True}  # a field that a file has only where there is something to say
VerdictKind = Literal["use", "none", "unclear", "unmeasured"]
OWN_ENGINE = "draftkit"
OWN = {"engine": OWN_ENGINE}  # one that only this engine's cells have
OTHERS = {"engine": "other"}  # one that only other engines' cells have


@dataclass(frozen=True)
class Interval:
    """A mean with the 95 % interval of a bootstrap over prompts.

    `low` and `high` are None of a single prompt, which tells nothing of others. `prompts`: how many were resampled;
    older files do not say.
    """

    mean: float
    low: float | None
    high: float | None
    prompts: int | None = field(default=None, metadata=OPTIONAL)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Where the interval begins and ends; None where there is none, as older files say it with equal ends."""
        if self.low is None or self.high is None or (self.prompts is None and self.low == self.high):
            return None
        return self.low, self.high

    def above(self, value: float) -> bool:
        """Whether all of the interval is."""
        return self.low is not None and self.low > value

    def below(self, value: float) -> bool:
        """Whether all of the interval is."""
        return self.high is not None and self.high < value

    def overlaps(self, other: Interval) -> bool:
        """Whether the intervals have values in common; without one, the mean stands for it."""
        low, high = self.bounds or (self.mean, self.mean)
        other_low, other_high = other.bounds or (other.mean, other.mean)
        return low <= other_high and other_low <= high


NOTHING = dict.fromkeys(("mean", "low", "high"))  # how a file has the interval of no rounds


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

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

    `seconds`: from its start to its last token, the mean of all passes; None where the engine does not say. What begins
    with `plain` is of plain decoding. `thinks`: whether the answer thinks aloud, where that was looked for.
    """

    id: str
    rounds: int
    accepted: int
    tokens: int
    seconds: float | None = None
    plain_tokens: int | None = None
    plain_seconds: float | None = None
    thinks: bool | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Slice:
    """Prompts that have something in common, as `language=da`: their acceptance length, and its `shift` against that of
    the other prompts; None where there are no others."""

    name: str
    prompts: int
    acceptance_length: Interval | None
    shift: Interval | None


@dataclass(frozen=True)
class Predicted:
    """The acceptance length that the probabilities of a run predict for another setting.

    `extrapolated`: beyond the draft tokens that the run drafted.
    """

    temperature: float
    draft_sampling: str
    num_speculative_tokens: int
    acceptance_length: float
    extrapolated: bool = False


@dataclass(frozen=True, kw_only=True)
class Heading:
    """What was measured, and how it was asked for."""

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
    temperature: float
    concurrency: int
    context: int | None = field(default=None, metadata=OPTIONAL)
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
            temperature=settings.sampling.temperature,
            concurrency=settings.concurrency,
            context=settings.context or None,
            top_k=settings.sampling.top_k,
            top_p=settings.sampling.top_p,
            min_p=settings.sampling.min_p,
            seed=settings.sampling.seed,
            draft_sampling=settings.draft_mode,
            min_confidence=settings.draft_sampling.min_confidence or None,
            verification=settings.verification,
            max_new_tokens=settings.max_new_tokens,
        )

    @property
    def asked(self) -> tuple[object, ...]:
        """How a cell was asked for; of those that were asked for alike, a result has one."""
        return (self.engine, *self.pair)

    @property
    def pair(self) -> tuple[object, ...]:
        """The same, whichever engine measured it."""
        setting = (self.num_speculative_tokens, self.temperature, self.concurrency, self.context)
        return (self.target, self.draft, *setting)

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
        return f"{self.draft}, K={self.num_speculative_tokens}, concurrency {self.concurrency}{context}"


@dataclass(frozen=True, kw_only=True)
class Cell(Heading):
    """One draft measured at one setting. Speed in output tokens a second; None and empty: not in the file.

    The acceptance length is over all `num_rounds`, also those in which nothing was drafted, as n-gram lookup may find
    nothing; `drafted_acceptance_length`, there where it differs, over the `num_drafts` that had a draft, and so are
    `acceptance_per_pos` and the length of older files, which lack `num_rounds`. `interval_known`: whether the engine
    counted each request by itself; else there is no interval. `estimated`: what was accepted is told from the sizes of
    streamed chunks. What begins with `baseline` is of plain decoding. `passes`: how
    often the prompts were run by turns without a draft and with it; `pace_error`: how well, as a share of itself, that
    tells what a round costs against a plain step; both lack where the baseline was run before. `by_prompt`: the sums
    from which everything over prompts follows.
    """

    engine_version: str | None = field(default=None, metadata=OTHERS)
    num_prompts: int | None = None
    output_tokens: int | None = None
    num_rounds: int | None = field(default=None, metadata=OPTIONAL)
    num_drafts: int | None = None
    num_drafts_beyond: int | None = field(default=None, metadata=OWN)
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_accepted_tokens_per_pos: tuple[int, ...] | None = None
    acceptance_per_pos: tuple[float, ...] | None = None
    conditional_acceptance_per_pos: tuple[float | None, ...] | None = None
    acceptance_length: Interval | None
    drafted_acceptance_length: Interval | None = field(default=None, metadata=OPTIONAL)
    interval_known: bool | None = field(default=None, metadata=OTHERS)
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
    samples: tuple[Transcript, ...] | None = field(default=None, metadata=OWN)
    near_ties: tuple[NearTie, ...] | None = field(default=None, metadata=OWN)
    memory: MemoryPlan | None = field(default=None, metadata=OWN)
    predicted: tuple[Predicted, ...] | None = field(default=None, metadata=OPTIONAL)
    by_prompt: tuple[PromptRecord, ...] | None = field(default=None, metadata=OPTIONAL)
    slices: tuple[Slice, ...] | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ttft_quantiles_ms", "tpot_quantiles_ms", "itl_quantiles_ms"):
            quantiles = getattr(self, name)
            if quantiles is not None and len(quantiles) != QUANTILES:
                raise ValueError(f"{name} has {len(quantiles)} numbers, and is the 0th to the 100th percentile")

    def measures(self, predicted: Predicted, of: Cell) -> bool:
        """Whether it is the setting that was predicted from the cell `of`."""
        asked = (predicted.temperature, predicted.draft_sampling, predicted.num_speculative_tokens)
        same = (self.draft, self.target, self.engine, self.context) == (of.draft, of.target, of.engine, of.context)
        return same and (self.temperature, self.draft_sampling, self.num_speculative_tokens) == asked

    @property
    def accepted_at(self) -> tuple[float, ...]:
        """Rounds in which the draft token at each position was accepted / rounds, of those that the length is over."""
        counts, rounds = self.num_accepted_tokens_per_pos, self.num_rounds or self.num_drafts
        if self.acceptance_per_pos is not None and self.num_rounds in (None, self.num_drafts):
            return self.acceptance_per_pos
        return tuple(count / rounds for count in counts) if counts and rounds else ()

    @property
    def accepted_after(self) -> tuple[float | None, ...]:
        """The same over the rounds in which the position before was accepted; None where there was none."""
        if self.conditional_acceptance_per_pos is not None:
            return self.conditional_acceptance_per_pos
        rates = self.accepted_at
        return tuple(rate / before if before else None for before, rate in zip((1.0, *rates), rates, strict=False))

    @property
    def times_faster(self) -> float | None:
        """Than plain decoding on the same engine."""
        if self.speedup is not None:
            return self.speedup
        if self.tokens_per_second is None or not self.baseline_tokens_per_second:
            return None
        return self.tokens_per_second / self.baseline_tokens_per_second

    @property
    def faster(self) -> Interval | None:
        """The same with its interval, as far as there is one."""
        speedup = self.times_faster
        return self.speedup_interval or (None if speedup is None else Interval(speedup, None, None))

    @property
    def length_of_drafts(self) -> Interval | None:
        """The acceptance length over the rounds that had a draft, which are all where it does not differ."""
        return self.drafted_acceptance_length or self.acceptance_length

    @property
    def latencies(self) -> tuple[Times | None, ...]:
        """TTFT, TPOT and ITL."""
        return self.ttft_ms, self.tpot_ms, self.itl_ms

    def to_dict(self) -> dict[str, Any]:
        """The cell as a file has it."""
        cell = _fields(self)
        if self.num_drafts == 0:
            cell |= {name: cell[name] or NOTHING for name in ("acceptance_length", "expected_acceptance_length")}
        cell["by_category"] = {name: interval or NOTHING for name, interval in cell["by_category"].items()}
        if self.memory is not None:
            cell["memory"] = self.memory.to_dict()
        return cell


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of a round; K = 0 is plain decoding."""

    concurrency: int
    num_speculative_tokens: int
    ms: float


@dataclass(frozen=True)
class Speedup:
    """Against plain decoding: measured or by the model; `ideal_speedup` if every draft token were accepted."""

    concurrency: int
    num_speculative_tokens: int
    speedup: float
    ideal_speedup: float | None = field(default=None, metadata=OPTIONAL)
    predicted: float | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}, and is at least 1")


@dataclass(frozen=True)
class SpeedModel:
    """What rounds cost, and the speed that follows from it. `schedule`: (first batch, last batch, K).

    `mean_error`: how far `predicted` is from what was measured. `stop_above`: the batch beyond which no K pays.
    `withheld`: why there is no schedule and no best K, and what to measure instead.
    """

    draft: str
    temperature: float | None = None
    rounds_ms: tuple[RoundTime, ...] = ()
    predicted: tuple[Speedup, ...] = ()
    measured: tuple[Speedup, ...] = ()
    mean_error: float | None = None
    best_k: int | None = None
    schedule: tuple[tuple[int, ...], ...] | None = None
    stop_above: int | None = None
    largest_batch: int | None = None
    context: int | None = field(default=None, metadata=OPTIONAL)
    withheld: str | None = field(default=None, metadata=OPTIONAL)

    @property
    def drafted(self) -> int | None:
        """The most draft tokens that were measured; what is predicted of more is extrapolated."""
        return max((one.num_speculative_tokens for one in self.measured), default=None)

    @property
    def doubt(self) -> str | None:
        """Why its advice is not to be relied on; of an older file, which compared without intervals, by the mean."""
        if self.withheld is None and self.mean_error is not None and self.mean_error > TRUSTED:
            return f"the predictions were off by {self.mean_error:.0%} on average"
        return self.withheld

    def __post_init__(self) -> None:
        if any(len(entry) != 3 for entry in self.schedule or ()):
            raise ValueError("schedule has an entry that is not [first batch, last batch, K]")


@dataclass(frozen=True)
class ResultWarning:
    """A reason to doubt a number, or a note on what there is none of."""

    name: str
    message: str
    severity: Severity = "warning"

    @classmethod
    def of(cls, finding: Finding) -> ResultWarning:
        return cls(finding.name, finding.message, finding.severity)


@dataclass(frozen=True)
class ResultVerdict:
    """`sentence` says it all. `draft` at `num_speculative_tokens` is what to serve, or, unless `kind` is `use`, what
    came closest; `up_to`: the largest batch at which it pays. `more_prompts`: how many it would take, beside those
    measured, to tell what could not be told. `commands`: engine → what serves it."""

    kind: VerdictKind
    sentence: str
    engine: str = OWN_ENGINE
    temperature: float = 0.0
    draft: str | None = None
    num_speculative_tokens: int | None = None
    up_to: int | None = None
    speedup: Interval | None = None
    more_prompts: int | None = field(default=None, metadata=OPTIONAL)
    commands: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A measurement: a cell for each draft and setting, and how all of them were made.

    `verdicts`: what `results/verdict.py` says of the cells; older files lack them. `path`: the name of the file that it
    was read from.
    """

    cells: tuple[Cell, ...]
    provenance: dict[str, object]
    warnings: tuple[ResultWarning, ...] = ()
    speed_models: tuple[SpeedModel, ...] = ()
    verdicts: tuple[ResultVerdict, ...] = ()
    path: str = ""

    def __post_init__(self) -> None:
        if not self.cells:
            raise ValueError("cells is empty: nothing was measured")

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        from draftkit.results.notebook import result_html

        return result_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The result as `eval --json` prints it, with names instead of paths."""
        verdicts = {"verdicts": [_fields(verdict) for verdict in self.verdicts]} if self.verdicts else {}
        models = {"speed_models": [_fields(model) for model in self.speed_models]} if self.speed_models else {}
        return named_result(
            {
                "schema": SCHEMA,
                **verdicts,
                "provenance": self.provenance,
                "cells": [cell.to_dict() for cell in self.cells],
                **models,
                "warnings": [_fields(warning) for warning in self.warnings],
            }
        )

    def named(self) -> Result:
        """The result as it is read again from its file."""
        return result_from(self.to_dict(), Path(self.path))


def named_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result object with names instead of the paths of this machine; what the target wrote stays as it is."""
    headings = [[cell.get(key) for key in ("target", "draft", "dataset")] for cell in result["cells"]]
    names = names_of_paths([headings, result["provenance"]])
    cells = [
        {key: value if key == "samples" else with_names(value, names) for key, value in cell.items()}
        for cell in result["cells"]
    ]
    return {key: cells if key == "cells" else with_names(value, names) for key, value in result.items()}


def result_json(result: object) -> str:
    """A result as JSON; what has no number, as the acceptance length of no rounds, is null."""
    return json.dumps(finite(result), indent=2, ensure_ascii=False, allow_nan=False)


def _fields(record: Any) -> dict[str, Any]:
    """The fields that a file has of a record, as JSON values."""
    return {
        item.name: _plain(getattr(record, item.name)) for item in dataclasses.fields(record) if _written(record, item)
    }


def _written(record: Any, item: dataclasses.Field[Any]) -> bool:
    if item.metadata == OPTIONAL and getattr(record, item.name) is None:
        return False
    return "engine" not in item.metadata or (item.metadata == OWN) == (record.other_engine is None)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def read_result(path: Path) -> Result:
    """The result in a file that `eval --json` wrote.

    Raises `SourceError` when it cannot be read, `FormatError` that names the file and every key that is wrong.
    """
    if not path.exists():
        raise SourceError(
            f"{path.name} is missing", where=path, hint="write it with draftkit eval --json > result.json"
        )
    return result_from(read_object(path), path)


def result_from(data: Mapping[str, object], where: Path) -> Result:
    """The records of a result object; `where` is named in errors. Raises `FormatError`."""
    schema = data.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        what = "has no schema" if schema is None else f"has schema {schema!r}, which this draftkit does not read"
        raise FormatError(
            f"{where.name} {what}", where=f"{where}: schema", expected=f"{SCHEMA}, from draftkit eval --json"
        )
    result, problems = read_record(Result, {**data, "path": where.name}, measured=True)
    if problems:
        raise FormatError(
            f"{where.name} is not a result of draftkit eval:\n    " + "\n    ".join(problems), where=where
        )
    return typing.cast(Result, result)
