"""From rows to samples: each conversation rendered, its assistant turns marked, and every loss counted."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from draftkit.data.decontamination import NearPrompts
from draftkit.data.loss_mask import REFUSALS, Renderer, RowImages, Turn, merged
from draftkit.data.rows import Conversation, Refused, Row, Served
from draftkit.data.sample_files import media_folder, read_origin, read_samples, write_samples
from draftkit.data.samples import CONSEQUENCES, Reason, RowCounts, Sample, SamplesOrigin, Span
from draftkit.data.tokenizer import TargetTokenizer
from draftkit.errors import FormatError
from draftkit.io.lock import sole_writer
from draftkit.io.store import is_address, written
from draftkit.media import FiledMedium, MediaSpan
from draftkit.results.statistics import is_looping, repetition


def prepare(
    rows: Iterable[Row],
    renderer: Renderer,
    out: str | Path | None,
    *,
    max_length: int | None = None,
    drop_loops: bool = False,
    without: NearPrompts | None = None,
    media_root: Path | None = None,
    force: bool = False,
) -> RowCounts:
    """Write the samples of all rows, as `samples_of` makes them, to a file or an address, which appears complete or not
    at all; where `out` is None they are only counted.

    `media_root`: the folder below which the images of the rows lie, which is stated in the file. Raises `FormatError`
    when no row makes a sample, `DraftkitError` while another process writes the file, and what reading the rows and
    writing the file raise.
    """
    report = RowCounts()
    samples = samples_of(rows, renderer, report, max_length, drop_loops=drop_loops, without=without)
    _write(out, samples, origin_of_rows(renderer.target, max_length), media_root, force=force)
    return report


def rewrite(
    source: Path, target: TargetTokenizer, out: str | Path | None, *, limit: int | None = None, force: bool = False
) -> RowCounts:
    """Write the samples of a file, the first `limit` of them, anew as they are, as `prepare` writes those of rows.

    Raises `FormatError` for those of another tokenizer than the target's.
    """
    origin, report = read_origin(source), RowCounts()
    if origin.tokenizer_sha256 != target.sha256:
        raise FormatError(
            f"the samples were made with another tokenizer than that of {target.name}",
            where=source,
            expected=f"the target that they were prepared for: {origin.target}",
        )
    samples = _all_of(itertools.islice(read_samples(source), limit), report)
    _write(out, samples, origin, media_folder(source).folder, force=force)
    return report


def _all_of(samples: Iterable[Sample], report: RowCounts) -> Iterator[Sample]:
    for sample in samples:
        report.rows += 1
        report.add(sample)
        yield sample


def _write(
    out: str | Path | None, samples: Iterable[Sample], origin: SamplesOrigin, root: Path | None, *, force: bool
) -> None:
    if out is None:
        deque(samples, maxlen=0)
        return
    with written(out, force=force) as place, sole_writer(place):
        stated = None if is_address(out) else root_from(place, root)
        write_samples(place, samples, replace(origin, media_root=stated), force=force)


def origin_of_rows(target: TargetTokenizer, max_length: int | None) -> SamplesOrigin:
    """What is said of samples that are made of rows."""
    return SamplesOrigin(target.name, target.sha256, target.template_sha256, max_length)


def root_from(out: Path, media_root: Path | None) -> str | None:
    """The folder of images as samples in `out` state it; None where there is none."""
    return None if media_root is None else os.path.relpath(media_root.resolve(), out.absolute().parent.resolve())


def samples_of(
    rows: Iterable[Row],
    renderer: Renderer,
    report: RowCounts,
    max_length: int | None = None,
    *,
    drop_loops: bool = False,
    without: NearPrompts | None = None,
) -> Iterator[Sample]:
    """The samples of rows, counted in `report`; those longer than `max_length` tokens lose their end.

    `drop_loops`: those are left out that repeat themselves in most of their loss mask, as `data check` counts them.
    `without`: those in which a prompt of these is, or nearly. Raises `FormatError` after the last row when there was no
    sample.
    """
    for row in rows:
        report.rows += 1
        for sample in _documents(row, renderer, report, max_length):
            if drop_loops and is_looping(repetition(sample.tokens[sample.loss_mask].tolist())):
                report.note(Reason.LOOPS, row.id)
            elif without is not None and (found := without.found_in(_text(sample, renderer))):
                report.note(Reason.NEAR, row.id, found)
            else:
                report.add(sample)
                yield sample
    if not report.samples:
        raise FormatError(f"none of {report.rows} rows can be trained on{_reasons(report)}")


def _text(sample: Sample, renderer: Renderer) -> str:
    return renderer.target.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)


def _documents(row: Row, renderer: Renderer, report: RowCounts, max_length: int | None) -> Iterator[Sample]:
    try:
        images = _images(row, renderer)
        turns = _turns(row, renderer, images)
    except tuple(REFUSALS) as refusal:
        report.note(REFUSALS[type(refusal)], row.id, str(refusal).partition("\n")[0])
        return
    if isinstance(row.content, Refused):
        report.note(Reason.REFUSED, row.id, row.content.reason)
        return
    if isinstance(row.content, Served) and row.content.unread:
        report.note(Reason.UNREAD, row.id)
        return
    sequences = merged(turn for turn in turns if turn.spans)
    reasons = {reason for turn in turns for reason in turn.reasons}
    if len(sequences) > 1:
        reasons.add(Reason.REWRITTEN)
    if not sequences:
        reasons = reasons & {Reason.REWRITTEN} or {Reason.NO_SPAN}
    for number, sequence in enumerate(sequences, start=1):
        media, files = _media(row, renderer, images, sequence)
        kept = [span for span in media if max_length is None or span.start < max_length]
        if kept and max_length is not None and _cuts(media, max_length):
            reasons.add(Reason.CUT_IMAGE)
            continue
        files = files[: len({span.index for span in kept})]
        tokens = sequence.tokens[:max_length]
        sample = Sample.of(_id(row, number), tokens, sequence.spans, row.category, tuple(kept), files)
        if len(sample) < len(sequence.tokens):
            reasons.add(Reason.TRUNCATED)
        if sample.loss_mask[1:].any():
            yield sample
        else:
            reasons.add(Reason.TOO_SHORT)
    for reason in sorted(reasons):
        report.note(reason, row.id)


def _images(row: Row, renderer: Renderer) -> RowImages | None:
    return renderer.images(row.content.messages, row.folder) if isinstance(row.content, Conversation) else None


def _media(
    row: Row, renderer: Renderer, images: RowImages | None, sequence: Turn
) -> tuple[tuple[MediaSpan, ...], tuple[FiledMedium, ...]]:
    """The tokens of a sequence that stand for images, and these."""
    if isinstance(row.content, Served) and row.content.media:
        stated = dict(zip((tuple(tokens) for tokens, _ in row.content.sequences), row.content.media, strict=True))
        return stated[tuple(sequence.tokens)]
    if images is None:
        return (), ()
    spans = renderer.vision.spans(sequence.tokens, images.read.first(sequence.images))
    return spans, images.files[: sequence.images]


def _cuts(media: Iterable[MediaSpan], length: int) -> bool:
    """Whether the first tokens have some of an image's and not all."""
    inside = {span.index for span in media if span.start < length}
    return any(span.start + span.length > length and span.index in inside for span in media)


def _id(row: Row, number: int) -> str:
    return row.id if number == 1 else f"{row.id}#{number}"


def _turns(row: Row, renderer: Renderer, images: RowImages | None) -> list[Turn]:
    match row.content:
        case Conversation(messages, tools):
            return renderer.turns(messages, tools, images)
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
