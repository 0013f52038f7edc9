"""vLLM's counters: as a server shows them in Prometheus' text format, and as its offline engine lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from draftkit.engines.vllm.records import DraftCounts
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


@dataclass(frozen=True)
class Metrics:
    """Counters at one time: of drafts, and of requests and output tokens; None where they are not counted."""

    drafts: DraftCounts | None
    finished: int | None
    tokens: int | None


def metrics_of(samples: Sequence[MetricSample]) -> Metrics:
    """What a measurement needs of vLLM's counters, summed over its engines."""
    finished, tokens = (total(samples, f"vllm:{name}") for name in ("request_success", "generation_tokens"))
    return Metrics(draft_counts(samples), finished, tokens)


def parse_samples(text: str) -> list[MetricSample]:
    """The samples of a page of metrics. Raises `FormatError` for a page of something else."""
    lines = (line.strip(" \t\r") for line in text.split("\n"))  # other line breaks may stand in a label's value
    return [_parse(line) for line in lines if line and not line.startswith("#")]


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


def total(samples: Sequence[MetricSample], name: str) -> int | None:
    """A counter summed over its labels, so over all engines of a server; None where there is no such counter."""
    values = [sample.value for sample in samples if sample.name == f"{name}_total"]
    return int(sum(values)) if values else None


def draft_counts(samples: Sequence[MetricSample]) -> DraftCounts | None:
    """The counters of speculative decoding; None of a server without it."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, drafted, accepted = (total(samples, f"vllm:spec_decode_{name}") for name in names)
    if drafts is None or drafted is None or accepted is None:
        return None
    at: dict[int, int] = {}
    for sample in samples:
        if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            position = int(sample.labels["position"])
            at[position] = at.get(position, 0) + int(sample.value)
    return DraftCounts(drafts, drafted, accepted, tuple(at.get(i, 0) for i in range(max(at, default=-1) + 1)))
