"""A measurement: made by every engine, returned by `evaluate_draft`, written as JSON and read back, shown by reports.

Fields are added over time and never renamed, so a reader passes over those it does not know, and copes without those
that are optional here, which engines lack that cannot tell them.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftkit.errors import FormatError, SourceError
from draftkit.finding import Finding, Severity
from draftkit.hub.local_paths import names_of_paths, with_names
from draftkit.io.jsonfile import finite, read_object
from draftkit.io.records import read_record
from draftkit.io.shown import Rows, Shown
from draftkit.results.cell import OPTIONAL, Cell, fields_of
from draftkit.results.metrics import metrics_of
from draftkit.results.verdict import ResultVerdict, verdicts

SCHEMA = 1


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of a round; K = 0 is plain decoding."""

    concurrency: int
    num_speculative_tokens: int
    ms: float


@dataclass(frozen=True)
class Speedup:
    """Against plain decoding: measured or by the model."""

    concurrency: int
    num_speculative_tokens: int
    speedup: float
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

    def __post_init__(self) -> None:
        if any(len(entry) != 3 for entry in self.schedule or ()):
            raise ValueError("schedule has an entry that is not [first batch, last batch, K]")


@dataclass(frozen=True)
class ResultWarning:
    """A reason to doubt a number, or a note on what there is none of. `extent`: how far it goes, more is worse."""

    name: str
    message: str
    severity: Severity = "warning"
    extent: float | None = field(default=None, metadata=OPTIONAL)

    @classmethod
    def of(cls, finding: Finding) -> ResultWarning:
        return cls(finding.name, finding.message, finding.severity, finding.extent)


@dataclass(frozen=True)
class Result(Shown):
    """A measurement: a cell for each draft and setting, and how all of them were made.

    `verdicts`: what `results/verdict.py` says of the cells; of a run that was stopped, none. `path`: the name of the
    file that it was read from.
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

    @property
    def judged(self) -> tuple[ResultVerdict, ...]:
        """The verdicts; those of a run that was stopped follow from its cells."""
        return self.verdicts or verdicts(self.cells)

    @property
    def warned(self) -> tuple[tuple[ResultWarning, str], ...]:
        """The worst warning of each kind, and its name with how many there are."""
        kinds: dict[str, list[ResultWarning]] = {}
        for warning in self.warnings:
            kinds.setdefault(warning.name, []).append(warning)
        worst = {name: max(alike, key=lambda one: one.extent or 0.0) for name, alike in kinds.items()}
        return tuple((worst[n], n if len(k) == 1 else f"{n}: the worst of {len(k)}") for n, k in kinds.items())

    def shown(self) -> Iterator[str | Rows]:
        """Verdicts, a row for each cell, and the worst warning of each kind."""
        yield from (verdict.sentence for verdict in self.judged)
        told = metrics_of("notebook", self.cells)
        rows = [(cell.draft_in_engine, *(metric.text(cell) for metric in told)) for cell in self.cells]
        yield Rows(("draft", *(metric.title for metric in told)), rows)
        yield from (f"{warning.severity}: {warning.message} [{kind}]" for warning, kind in self.warned)

    def to_dict(self) -> dict[str, Any]:
        """The result as `eval --json` prints it, with names instead of paths."""
        judged = {"verdicts": [fields_of(verdict) for verdict in self.verdicts]} if self.verdicts else {}
        models = {"speed_models": [fields_of(model) for model in self.speed_models]} if self.speed_models else {}
        return named_result(
            {
                "schema": SCHEMA,
                **judged,
                "provenance": self.provenance,
                "cells": [cell.to_dict() for cell in self.cells],
                **models,
                "warnings": [fields_of(warning) for warning in self.warnings],
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
    result, problems = read_record(Result, {**data, "path": where.name}, lenient=True)
    if problems:
        raise FormatError(
            f"{where.name} is not a result of draftkit eval:\n    " + "\n    ".join(problems), where=where
        )
    return typing.cast(Result, result)
