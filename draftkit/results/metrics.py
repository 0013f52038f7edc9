"""What is shown of a cell: one row for each metric, which tables, cards, CSV, pages and notebooks read."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from draftkit.results.cell import Cell, Interval, Times

View = Literal["table", "details", "card", "card-acceptance", "card-speed", "model-index", "csv", "page", "notebook"]


def number(value: float | None, format: str = ",.2f", unit: str = "") -> str:
    """A number as tables show it; – for what was not measured."""
    return "–" if value is None else f"{value:{format}}{unit}"


def length(interval: Interval | None, digits: int = 2, *, signed: bool = False, count: bool = False) -> str:
    """A mean with its interval, as far as there is one; `count`: and over how many prompts."""
    if interval is None or not isfinite(interval.mean):
        return "–"
    sign = "+" if signed else ""
    text = f"{interval.mean:{sign}.{digits}f}"
    if interval.bounds is not None:
        text += " [" + ", ".join(f"{bound:{sign}.2f}" for bound in interval.bounds) + "]"
    return text + (f" ({interval.prompts})" if count and interval.prompts is not None else "")


def gained(interval: Interval, *, look: bool) -> str:
    """What a change gained; of a look at a few prompts for many changes the mean alone, as its interval may be wider
    than any acceptance length."""
    return f"{interval.mean:+.2f}" if look else length(interval, signed=True)


def difference(interval: Interval | None) -> str:
    """A difference of lengths, with its sign and its interval."""
    return length(interval, signed=True)


def mean(interval: Interval | None) -> str:
    """A mean without its interval."""
    return number(interval.mean if interval else None)


def _median(times: Times | None) -> str:
    return number(times.p50 if times else None, ",.1f")


def _medians(latencies: Sequence[Times | None]) -> str:
    return " / ".join(map(_median, latencies))


def _shares(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates) or "–"


def _parts(tree: str) -> str:
    """The name of a tree, which wraps between its numbers."""
    return tree.replace(",", ", ")


def _equality(cell: Cell) -> str:
    """Whether the output is plain decoding's; – where that was not run."""
    if cell.num_matching_prompts is None:
        return "drawn" if cell.temperature else "–"
    if cell.num_matching_prompts == cell.num_prompts:
        return "same"
    return f"{cell.num_matching_prompts}/{cell.num_prompts}"


def _equality_in_words(cell: Cell) -> str:
    """How the output compares with plain decoding's, or how it was sampled where it need not be the same."""
    if cell.num_matching_prompts is None:
        return "not compared" if cell.verification is None else f"by {cell.verification}"
    if cell.num_matching_prompts == cell.num_prompts:
        return "the same"
    return f"the same for {cell.num_matching_prompts} of {cell.num_prompts} prompts"


@dataclass(frozen=True)
class Metric:
    """Something that is known of a cell, and how it is shown.

    `name`: what programs call it, in CSV and in a card's `model-index`. `path`: fields and properties that lead to the
    value, with dots between; empty for what is told from the whole cell. `heading`: of its column, with a line break
    where a narrow table needs one. `format`: that of a number, or a function of the value. `where`: the views that have
    it. `sparing`: those of them that leave it out where it tells nothing, because all cells are equal in it, or, with
    `unlike`, because no cell differs in it from what lies at that path. `left`: whether its column begins at the left.
    """

    name: str
    path: str
    heading: str
    format: str | Callable[[Any], str]
    where: tuple[View, ...]
    unit: str = ""
    sparing: tuple[View, ...] = ()
    unlike: str | None = None
    left: bool = False

    @property
    def title(self) -> str:
        """The heading in one line, with the unit."""
        return " ".join((*self.heading.split(), self.unit)).rstrip()

    def value(self, cell: Cell) -> Any:
        """The value of this metric in a cell; None where the cell lacks it."""
        return value_at(cell, self.path)

    def text(self, cell: Cell) -> str:
        """The value as tables show it; – where the cell lacks it."""
        value = self.value(cell)
        if value is None:
            return "–"
        return f"{value:{self.format}}" if isinstance(self.format, str) else self.format(value)

    def tells(self, cells: Sequence[Cell]) -> bool:
        """Whether a column of it says something of these cells that `sparing` views want."""
        if self.unlike is not None:
            return any(self.value(cell) != value_at(cell, self.unlike) for cell in cells)
        return len({self.value(cell) for cell in cells}) > 1


# A view shows its metrics in this order. Every table of a card begins with those of "card".
METRICS = (
    Metric(
        "target", "target", "target", "", ("table", "csv", "page", "notebook"), sparing=("table", "page", "notebook"),
        left=True,
    ),
    Metric("draft", "draft", "draft", "", ("csv",)),
    Metric("method", "method", "method", "", ("csv",)),
    Metric("dataset", "dataset", "dataset", "", ("card", "csv"), left=True),
    Metric("num_speculative_tokens", "drafts_a_round", "K", "", ("table", "details", "card", "page", "notebook")),
    Metric("num_speculative_tokens", "num_speculative_tokens", "K", "", ("csv",)),
    Metric(
        "tree", "tree_name", "tree", _parts, ("table", "details", "card", "page", "notebook"),
        sparing=("table", "details", "card", "page", "notebook"), left=True,
    ),
    Metric("tree", "tree_name", "tree", "", ("csv",)),
    Metric(
        "draft_confidence", "min_confidence", "draft confidence", "g",
        ("table", "details", "card", "csv", "page", "notebook"),
        sparing=("table", "details", "card", "page", "notebook"),
    ),
    Metric(
        "temperature", "temperature", "T", "g",
        ("table", "details", "card", "csv", "page", "notebook"), sparing=("table", "details"),
    ),
    Metric(
        "concurrency", "concurrency", "batch", "", ("table", "details", "csv", "page", "notebook"),
        sparing=("table", "details"),
    ),
    Metric("concurrency", "concurrency", "concurrency", "", ("card",)),
    Metric(
        "context", "context", "context", "", ("table", "details", "card", "csv"),
        sparing=("table", "details", "card"),
    ),
    Metric("engine", "engine", "engine", "", ("card", "csv"), sparing=("card",), left=True),
    Metric(
        "num_prompts", "num_prompts", "prompts", ",",
        ("table", "details", "card-acceptance", "csv", "page", "notebook"), sparing=("table", "details"),
    ),
    Metric("max_new_tokens", "max_new_tokens", "max new tokens", "", ("csv",)),
    Metric("draft_sampling", "draft_sampling", "drafts", "", ("details", "card-acceptance", "csv"), left=True),
    Metric("verification", "verification", "verified by", "", ("details", "csv"), left=True),
    Metric("repetition", "repetition", "repeats", ".0%", ("details", "csv"), sparing=("details",)),
    Metric("output_tokens", "output_tokens", "output tokens", ",", ("csv",)),
    Metric("num_drafts", "num_drafts", "drafts", ",", ("csv",)),
    Metric("num_draft_tokens", "num_draft_tokens", "draft tokens", ",", ("csv",)),
    Metric("num_accepted_tokens", "num_accepted_tokens", "accepted tokens", ",", ("csv",)),
    Metric(
        "acceptance_length", "acceptance_length", "acceptance length", length,
        ("table", "card-acceptance", "model-index", "csv", "page", "notebook"),
    ),
    Metric(
        "longer_by", "longer_by", "longer\nby", difference, ("table", "card-acceptance", "csv", "page", "notebook"),
        sparing=("table", "card-acceptance", "page", "notebook"),
    ),
    Metric("compared_with", "compared_with", "compared with", "", ("csv",)),
    Metric(
        "length_of_drafts", "length_of_drafts", "of\ndrafts", mean, ("table", "card-acceptance", "page", "notebook"),
        sparing=("table", "page"), unlike="acceptance_length",
    ),
    Metric("expected_acceptance_length", "expected_acceptance_length", "expected", length, ("details", "csv")),
    Metric("expected_acceptance_length", "expected_acceptance_length", "expected", mean, ("card-acceptance", "page")),
    Metric("drafted_acceptance_length", "drafted_acceptance_length", "drafted", length, ("details", "csv")),
    Metric("accepted_at", "accepted_at", "accepted at 1…K", _shares, ("details", "card-acceptance"), left=True),
    Metric("acceptance_per_pos", "acceptance_per_pos", "accepted at 1…K", _shares, ("csv",)),
    Metric("conditional_acceptance_per_pos", "conditional_acceptance_per_pos", "accepted after", _shares, ("csv",)),
    Metric(
        "tokens_per_second", "tokens_per_second", "tokens/s", ",.1f", ("details", "card-speed", "csv", "page")
    ),
    Metric(
        "baseline_tokens_per_second", "baseline_tokens_per_second", "plain", ",.1f",
        ("details", "card-speed", "csv", "page"),
    ),
    Metric(
        "speedup", "faster", "speed-up", length, ("table", "card-speed", "model-index", "csv", "page", "notebook")
    ),
    Metric("passes", "passes", "passes", "", ("details",)),
    Metric("runtime_s", "runtime_s", "runtime", ",.1f", ("csv",), unit="s"),
    Metric("latencies", "latencies", "TTFT / TPOT / ITL", _medians, ("details", "card-speed"), unit="ms"),
    *(Metric(f"{name}_ms", f"{name}_ms", name.upper(), _median, ("csv", "page"), unit="ms")
      for name in ("ttft", "tpot", "itl")),
    Metric("matches_greedy", "matches_greedy", "output is plain decoding's", "", ("csv",)),
    Metric("num_matching_prompts", "num_matching_prompts", "prompts with the same output", ",", ("csv",)),
    Metric("output", "", "output", _equality, ("table",)),
    Metric("output", "", "output against plain", _equality_in_words, ("page",), left=True),
)  # fmt: skip


def metrics_of(view: View, cells: Sequence[Cell]) -> list[Metric]:
    """The metrics that a view shows of these cells, in its order."""
    shown = (metric for metric in METRICS if view in metric.where)
    return [metric for metric in shown if view not in metric.sparing or metric.tells(cells)]


def value_at(cell: Cell, path: str) -> Any:
    """The value at a path in a cell; None where the cell lacks it, or lacks something on the way there."""
    value: Any = cell
    for name in filter(None, path.split(".")):
        value = None if value is None else getattr(value, name)
    return value


@functools.cache
def kind_at(path: str) -> Any:
    """The type of what lies at a path in cells, without None. Raises `AttributeError` for a path that leads nowhere."""
    kind: Any = Cell
    for name in filter(None, path.split(".")):
        member = getattr(kind, name, None)
        hints = typing.get_type_hints(member.fget if isinstance(member, property) else kind)
        key = "return" if isinstance(member, property) else name
        if key not in hints:
            raise AttributeError(f"{path} leads nowhere in a cell: {kind.__name__} has no {name}")
        kind = hints[key]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    return kind
