"""Counters as a server shows them in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from draftkit.engines.records import MOST_COUNTED, MOST_DRAFTED, whole_number
from draftkit.errors import FormatError

_QUOTED = r'"(?:\\.|[^"\\])*"'
# A name, labels in braces, a value, and perhaps a time; braces may stand in a label's value too.
_SAMPLE = re.compile(rf'([a-zA-Z_:][\w:]*)(?:\s*\{{((?:[^"}}]|{_QUOTED})*)\}}\s*|\s+)(\S+)(?:\s+\S+)?')
_LABEL = re.compile(rf"\s*([a-zA-Z_]\w*)\s*=\s*({_QUOTED})\s*(?:,|$)")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class MetricSample:
    """One line: a metric, its labels and its value."""

    name: str
    labels: dict[str, str]
    value: float


def parse_samples(text: str) -> list[MetricSample]:
    """The samples of a page of metrics. Raises `FormatError` for a page of something else."""
    lines = (line.strip(" \t\r") for line in text.split("\n"))  # other line breaks may stand in a label's value
    return [_parse(line) for line in lines if line and not line.startswith("#")]


def total(samples: Sequence[MetricSample], name: str) -> int | None:
    """A counter summed over its labels, so over all engines of a server; None where there is no such counter.

    Raises `FormatError` for one that counts nothing: negative, broken, NaN.
    """
    values = [_counted(sample.value, name) for sample in samples if sample.name == f"{name}_total"]
    return sum(values) if values else None


def by_position(samples: Sequence[MetricSample], name: str) -> tuple[int, ...]:
    """A counter of the positions of a draft, from 0 to the last that has one. Raises `FormatError` as `total`."""
    at: dict[int, int] = {}
    for sample in samples:
        if sample.name == f"{name}_total":
            label = sample.labels.get("position", "")
            position = _counted(int(label) if label.isdecimal() else label, f"position of {name}", MOST_DRAFTED)
            at[position] = at.get(position, 0) + _counted(sample.value, name)
    return tuple(at.get(position, 0) for position in range(max(at, default=-1) + 1))


def _counted(value: object, what: str, most: int = MOST_COUNTED) -> int:
    try:
        return whole_number(value, what, most)
    except ValueError as error:
        raise FormatError(str(error)) from None


def _parse(line: str) -> MetricSample:
    match = _SAMPLE.fullmatch(line)
    try:
        if match is None:
            raise ValueError
        return MetricSample(match[1], _labels(match[2] or ""), float(match[3]))
    except ValueError:
        raise FormatError(f"not a line of Prometheus' text format: {line[:100]}") from None


def _labels(text: str) -> dict[str, str]:
    labels, at = {}, 0
    while at < len(text):
        label = _LABEL.match(text, at)
        if label is None:
            raise ValueError
        labels[label[1]] = re.sub(r"\\.", _unescaped, label[2][1:-1])
        at = label.end()
    return labels


def _unescaped(escape: re.Match[str]) -> str:
    return _ESCAPES.get(escape[0], escape[0])
