"""From rows to samples: each conversation rendered, its assistant turns marked, and every loss counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from draftkit.data.loss_mask import Renderer, Turn, merged
from draftkit.data.rows import Conversation, Refused, Row, Served
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import CONSEQUENCES, Reason, RowCounts, Sample, SamplesOrigin, Span
from draftkit.errors import FormatError
from draftkit.io.lock import sole_writer
from draftkit.results.statistics import is_looping, repetition
from draftkit.targets.chat import TemplateRejection


def prepare(
    rows: Iterable[Row],
    renderer: Renderer,
    out: Path,
    *,
    max_length: int | None = None,
    drop_loops: bool = False,
    force: bool = False,
) -> RowCounts:
    """Write the samples of all rows to a file, which appears complete or not at all; otherwise as `samples_of`.

    Raises `FormatError` when no row makes a sample, `DraftkitError` while another process writes the file, and what
    reading the rows and writing the file raise.
    """
    report = RowCounts()
    target = renderer.target
    origin = SamplesOrigin(target.name, target.sha256, target.template_sha256, max_length)
    samples = samples_of(rows, renderer, report, max_length, drop_loops=drop_loops)
    with sole_writer(out):
        write_samples(out, samples, origin, force=force)
    return report


def samples_of(
    rows: Iterable[Row],
    renderer: Renderer,
    report: RowCounts,
    max_length: int | None = None,
    *,
    drop_loops: bool = False,
) -> Iterator[Sample]:
    """The samples of rows, counted in `report`; those longer than `max_length` tokens lose their end.

    `drop_loops`: those are left out that repeat themselves in most of their loss mask, as `data check` counts them.
    Raises `FormatError` after the last row when there was no sample.
    """
    for row in rows:
        report.rows += 1
        for sample in _documents(row, renderer, report, max_length):
            if drop_loops and is_looping(repetition(sample.tokens[sample.loss_mask].tolist())):
                report.note(Reason.LOOPS, row.id)
                continue
            report.add(sample)
            yield sample
    if not report.samples:
        raise FormatError(f"none of {report.rows} rows can be trained on{_reasons(report)}")


def _documents(row: Row, renderer: Renderer, report: RowCounts, max_length: int | None) -> Iterator[Sample]:
    try:
        turns = _turns(row, renderer)
    except TemplateRejection as rejection:
        report.note(Reason.REJECTED, row.id, str(rejection))
        return
    if isinstance(row.content, Refused):
        report.note(Reason.REFUSED, row.id, row.content.reason)
        return
    sequences = merged(turn for turn in turns if turn.spans)
    reasons = {reason for turn in turns for reason in turn.reasons}
    if len(sequences) > 1:
        reasons.add(Reason.REWRITTEN)
    if not sequences:
        reasons = reasons & {Reason.REWRITTEN} or {Reason.NO_SPAN}
    for number, sequence in enumerate(sequences, start=1):
        sample = Sample.of(_id(row, number), sequence.tokens[:max_length], sequence.spans, row.category)
        if len(sample) < len(sequence.tokens):
            reasons.add(Reason.TRUNCATED)
        if sample.loss_mask[1:].any():
            yield sample
        else:
            reasons.add(Reason.TOO_SHORT)
    for reason in sorted(reasons):
        report.note(reason, row.id)


def _id(row: Row, number: int) -> str:
    return row.id if number == 1 else f"{row.id}#{number}"


def _turns(row: Row, renderer: Renderer) -> list[Turn]:
    match row.content:
        case Conversation(messages, tools):
            return renderer.turns(messages, tools)
        case Served() as served:
            _check_tokenizer(row, served, renderer)
            return [_served(tokens, spans, renderer) for tokens, spans in served.sequences]
        case str() as text:
            tokens = renderer.encode(text)
            return [Turn(tokens, [(1, len(tokens))] if len(tokens) > 1 else [])]
        case Refused():
            return []


def _served(tokens: list[int], spans: list[Span], renderer: Renderer) -> Turn:
    ended = tokens[-1:] and tokens[-1] in renderer.target.end_ids
    return Turn(tokens, spans, frozenset() if ended else frozenset({Reason.NO_END}))


def _check_tokenizer(row: Row, served: Served, renderer: Renderer) -> None:
    """Served token ids mean nothing to another tokenizer."""
    if served.tokenizer_sha256 != renderer.target.sha256:
        raise FormatError(
            f"the responses were made with another tokenizer than that of {renderer.target.name}",
            where=row.where,
            hint="pass the target that served them, or regenerate them with this one",
        )


def _reasons(report: RowCounts) -> str:
    return "".join(
        f"\n    {reason}: {tally.count} ({CONSEQUENCES[reason]}), as {tally.examples[0]}"
        for reason, tally in report.tallies.items()
    )
