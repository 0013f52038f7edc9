"""Result files of `eval --json`: read, checked, and turned into records.

Fields are added over time and never renamed, so a reader passes over those it does not know, and copes without those
that are optional here: older files, and other engines, lack them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftkit.errors import FormatError, SourceError
from draftkit.io.jsonfile import read_object
from draftkit.io.records import read_record

SCHEMA = 1
QUANTILES = 101  # the 0th … 100th percentile


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over prompts."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Round:
    """Texts of the draft tokens, how many were accepted, and the texts of all tokens that the round added."""

    drafted: tuple[str, ...]
    accepted: int
    emitted: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= len(self.drafted):
            raise ValueError(f"{self.accepted} of {len(self.drafted)} draft tokens cannot be accepted")


@dataclass(frozen=True)
class Sample:
    """One generation. `first`: the text of the first token, which the prefill gives."""

    id: str
    prompt: str
    first: str
    rounds: tuple[Round, ...]
    category: str | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for, whatever the number of slots and for each; `capacity` positions in a slot."""

    fixed: dict[str, int]
    per_slot: dict[str, int]
    num_slots: int
    available: int
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}, and is at least 1")


@dataclass(frozen=True)
class Predicted:
    """The acceptance length that a run at temperature 0 predicts for another setting."""

    temperature: float
    draft_sampling: str
    num_speculative_tokens: int
    acceptance_length: float


@dataclass(frozen=True)
class Cell:
    """One draft measured at one setting. Speed in output tokens a second; None and empty: not in the file.

    There is no acceptance length where nothing was drafted, as n-gram lookup may find nothing.
    """

    target: str
    draft: str
    num_speculative_tokens: int
    temperature: float
    concurrency: int
    acceptance_length: Interval | None
    method: str | None = None
    engine: str = "draftkit"
    dataset: str | None = None
    draft_sampling: str | None = None
    verification: str | None = None
    num_prompts: int | None = None
    max_new_tokens: int | None = None
    output_tokens: int | None = None
    num_drafts: int | None = None
    num_accepted_tokens_per_pos: tuple[int, ...] | None = None
    acceptance_per_pos: tuple[float, ...] | None = None
    conditional_acceptance_per_pos: tuple[float | None, ...] | None = None
    expected_acceptance_length: Interval | None = None
    acceptance_length_by_convention: dict[str, float | None] = field(default_factory=dict)
    by_category: dict[str, Interval | None] = field(default_factory=dict)
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    speedup: float | None = None
    runtime_s: float | None = None
    ttft_ms: Times | None = None
    tpot_ms: Times | None = None
    itl_ms: Times | None = None
    ttft_quantiles_ms: tuple[float, ...] | None = None
    tpot_quantiles_ms: tuple[float, ...] | None = None
    itl_quantiles_ms: tuple[float, ...] | None = None
    matches_greedy: bool | None = None
    num_matching_prompts: int | None = None
    memory: Memory | None = None
    samples: tuple[Sample, ...] | None = None
    predicted: tuple[Predicted, ...] | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}, and is at least 1")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}, and is at least 0")
        for name in ("ttft_quantiles_ms", "tpot_quantiles_ms", "itl_quantiles_ms"):
            quantiles = getattr(self, name)
            if quantiles is not None and len(quantiles) != QUANTILES:
                raise ValueError(f"{name} has {len(quantiles)} numbers, and is the 0th to the 100th percentile")

    @property
    def accepted_at(self) -> tuple[float, ...]:
        """Rounds in which the draft token at each position was accepted / rounds."""
        if self.acceptance_per_pos is not None:
            return self.acceptance_per_pos
        counts, rounds = self.num_accepted_tokens_per_pos, self.num_drafts
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
    ideal_speedup: float | None = None
    predicted: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}, and is at least 1")


@dataclass(frozen=True)
class SpeedModel:
    """What rounds cost, and the speed that follows from it. `schedule`: (first batch, last batch, K)."""

    draft: str
    temperature: float | None = None
    rounds_ms: tuple[RoundTime, ...] = ()
    predicted: tuple[Speedup, ...] = ()
    measured: tuple[Speedup, ...] = ()
    best_k: int | None = None
    schedule: tuple[tuple[int, ...], ...] | None = None
    stop_above: int | None = None
    mean_error: float | None = None

    def __post_init__(self) -> None:
        if any(len(entry) != 3 for entry in self.schedule or ()):
            raise ValueError("schedule has an entry that is not [first batch, last batch, K]")


@dataclass(frozen=True)
class ResultWarning:
    name: str
    message: str


@dataclass(frozen=True)
class Result:
    """One result file."""

    cells: tuple[Cell, ...]
    provenance: dict[str, object]
    warnings: tuple[ResultWarning, ...] = ()
    speed_models: tuple[SpeedModel, ...] = ()
    path: str = ""

    def __post_init__(self) -> None:
        if not self.cells:
            raise ValueError("cells is empty: nothing was measured")


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
