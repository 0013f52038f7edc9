"""The report: one HTML page that needs no network and runs no script."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from draftkit.io.html import signed
from draftkit.report.format import size
from draftkit.report.memory_cost import memory_cost
from draftkit.report.page.chart import MOST_SERIES, PALETTE, Chart
from draftkit.report.page.series import Series
from draftkit.report.page.svg import TEMPLATES, svg
from draftkit.results.cell import Transcript, TranscriptRound
from draftkit.results.comparison import compare, summary
from draftkit.results.metrics import length, metrics_of, number
from draftkit.results.record import Result
from draftkit.version import __version__

SAMPLES = 6  # shown of each series


def page(results: Sequence[Result], series: Sequence[Series], figures: Mapping[str, Chart]) -> str:
    """The page of results that were joined into `series` and drawn as `figures`.

    Two results are compared, the first with the second.
    """
    compared = compare(*results) if len(results) == 2 else ()
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=size,
        length=length,
        number=number,
        marks=with_marks,
        line_ends=with_line_ends,
    )
    cells = [cell for result in results for cell in result.cells]
    costs = [(one, cost) for one in _once_a_draft(series) if (cost := memory_cost(one.main))]
    modelled = [one for one in series if one.model]
    samples = [(one, [show_transcript(sample) for sample in _samples(one)]) for one in series if _samples(one)]
    html = environment.get_template("page.html").render(
        title=_title(results),
        results=results,
        series=series,
        metrics=metrics_of("page", cells),
        provenance=provenance_table(results),
        verdicts=[(result.path, verdict) for result in results for verdict in result.judged],
        compared=compared,
        comparison=summary(compared) if len(results) == 2 else "",
        figures={name: (figure.title, svg(figure)) for name, figure in figures.items()},
        num_colors=MOST_SERIES,
        conventions=list(dict.fromkeys(name for one in series for name in one.main.acceptance_length_by_convention)),
        costs=costs,
        samples=samples,
        modelled=modelled,
        settings=_settings(series),
        sections=_sections(
            figures,
            k=bool(modelled),
            memory=bool(costs),
            tokens=bool(samples),
            comparison=bool(compared),
        ),
        version=__version__,
        kinds=KINDS,
        palette=PALETTE,
        stylesheet=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )
    return signed(labelled(html))


def _once_a_draft(series: Sequence[Series]) -> list[Series]:
    """The first series of each draft: what it takes of memory is the same at any temperature."""
    found: dict[tuple[object, ...], Series] = {}
    for one in series:
        found.setdefault((one.main.target, one.main.draft, one.main.context, one.main.max_new_tokens), one)
    return list(found.values())


def labelled(html: str) -> str:
    """The page with the head of its column at each cell of a table, which a phone shows beside it, row by row."""
    return re.sub(r"<table.*?</table>", lambda match: _labelled_table(match[0]), html, flags=re.DOTALL)


def _labelled_table(table: str) -> str:
    head, _, body = table.partition("</thead>")
    names = [re.sub(r"<[^>]*>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", head, re.DOTALL)]

    def row(match: re.Match[str]) -> str:
        places = iter(names)
        return re.sub(
            r"<(td|th)( [^>]*)?>",
            lambda cell: f'<{cell[1]} data-label="{next(places, "")}"{cell[2] or ""}>',
            match[0],
        )

    return f"{head}</thead>" + re.sub(r"<tr>.*?</tr>", row, body, flags=re.DOTALL) if body else table


def _sections(figures: Mapping[str, object], **told: bool) -> set[str]:
    """The parts of the page for which there is something to show; `told`: those that do not follow from figures."""
    prefixes = {
        "acceptance": ("acceptance-by", "conditional"),
        "k": ("acceptance-length-by-k", "speed-by-k"),
        "batch": ("throughput", "speed-by-batch"),
        "latency": ("latency",),
    }
    drawn = {section for section, names in prefixes.items() if any(name.startswith(names) for name in figures)}
    return drawn | {"summary", "provenance"} | {section for section, there in told.items() if there}


def _settings(series: Sequence[Series]) -> str:
    """A sentence that says which of the measured settings the figures show, where each shows only one."""
    settings = [f"K={one.main.num_speculative_tokens}, batch {one.main.concurrency}" for one in series]
    if len(set(settings)) == 1:
        return f"Measured at {settings[0]}."
    return "Measured at " + "; ".join(f"{at} ({one.name})" for at, one in zip(settings, series, strict=True)) + "."


def _title(results: Sequence[Result]) -> str:
    return " · ".join(dict.fromkeys(cell.target for result in results for cell in result.cells))


def _samples(one: Series) -> list[Transcript]:
    return list(one.main.samples or ())[:SAMPLES]


def provenance_table(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """A row for each fact that any file states: its name and its value in each file."""
    columns = [dict(_flat(result.provenance)) for result in results]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "–") for column in columns]) for name in names]


def _flat(facts: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


TokenKind = Literal["prefill", "accepted", "recovered", "bonus", "plain", "rejected", "unread"]

# Order and words of the legend.
KINDS: dict[TokenKind, str] = {
    "accepted": "accepted: drafted, and kept by the target",
    "recovered": "recovered: the target's token where it rejected the draft's",
    "bonus": "bonus: the target's token after a draft accepted in full",
    "rejected": "rejected: the draft's token that the target did not keep",
    "unread": "unread: drafted after a rejected token",
    "plain": "plain: nothing was drafted, or the token is the prompt's first",
}


@dataclass(frozen=True)
class ShownToken:
    text: str
    kind: TokenKind


@dataclass(frozen=True)
class ShownRound:
    """`tokens` were added to the text; `proposal` is what the draft offered for their places."""

    tokens: tuple[ShownToken, ...]
    proposal: tuple[ShownToken, ...]

    @property
    def rejected(self) -> ShownToken | None:
        return next((token for token in self.proposal if token.kind == "rejected"), None)

    @property
    def summary(self) -> str:
        if not self.proposal:
            return "nothing drafted"
        return f"{sum(token.kind == 'accepted' for token in self.proposal)} of {len(self.proposal)} accepted"


@dataclass(frozen=True)
class ShownTranscript:
    """A generation. `counts`: tokens of each kind in the text."""

    id: str
    category: str | None
    prompt: str
    first: str
    rounds: tuple[ShownRound, ...]
    counts: Counter[TokenKind]


def show_transcript(transcript: Transcript) -> ShownTranscript:
    rounds = tuple(show_round(round) for round in transcript.rounds)
    counts = Counter(token.kind for round in rounds for token in round.tokens)
    return ShownTranscript(transcript.id, transcript.category, transcript.prompt, transcript.first, rounds, counts)


def show_round(round: TranscriptRound) -> ShownRound:
    """Kinds of all tokens of a round. The end of a text may cut the tokens that a round adds."""
    accepted, drafted = round.accepted, len(round.drafted)
    last: TokenKind = "plain" if not drafted else "bonus" if accepted == drafted else "recovered"
    return ShownRound(
        tuple(ShownToken(text, "accepted" if i < accepted else last) for i, text in enumerate(round.emitted)),
        tuple(ShownToken(text, _fate(i, accepted)) for i, text in enumerate(round.drafted)),
    )


def _fate(position: int, accepted: int) -> TokenKind:
    return "accepted" if position < accepted else "rejected" if position == accepted else "unread"


def with_marks(text: str) -> str:
    """A token by itself: spaces and line ends are seen, and so is a token without text (a part of a character)."""
    return text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥") or "∅"


def with_line_ends(text: str) -> str:
    """A token in its text: the line ends, and it is seen which token holds the end."""
    return text.replace("\n", "↵\n")
