"""What an engine gave to the same prompts with a draft and without one, as a cell of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf, isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from draftkit.data.categories import THOUGHT, language_of
from draftkit.engines.records import Answer, DraftCounts
from draftkit.errors import DraftkitError
from draftkit.evaluate.measure import Run, speedup_interval
from draftkit.evaluate.prompts import Prompt
from draftkit.results.cell import Cell, Heading, Interval, PromptRecord, Slice, Transcript, TranscriptRound
from draftkit.results.settings import Settings
from draftkit.results.statistics import (
    conditional_rates,
    contrast,
    drafted_acceptance_length,
    expected_acceptance_length,
    known,
    length_over_prompts,
    lengths_by_convention,
    percentiles,
    quantiles,
    repetition,
)
from draftkit.runtime.records import Generation, Round

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES = 3  # generations that are kept token by token
SHORT = 256  # tokens of a prompt, below which all are of one class


def cell_of(
    heading: Heading,
    run: Run,
    plain: Run | None,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    passes: int | None = None,
    pace_error: float = inf,
    blocks: int = 1,
) -> Cell:
    """What a run with a draft measured, beside the run of the same requests without one, where there is one.

    `passes` and `pace_error` are those of `interleaved`, which ran so many `blocks`; None and inf where it was not.
    Where the engine counts only all requests together, there is no interval, `interval_known` is false and
    `by_category` empty; where it keeps no record of rounds, what is told from these is None. Raises
    `DraftkitError` for an engine without such a record that has drafted nothing: it cannot say why.
    """
    drafts = run.drafts
    if drafts is None or not (drafts.num_drafts or run.generations):
        raise DraftkitError(
            f"{heading.engine} has drafted nothing", hint="are the prompts and --max-new-tokens too short?"
        )
    own = run.counted_by_request
    num_rounds = drafts.num_drafts + sum(answer.skipped for answer in run.answers)
    by_category = {} if own is None else _by_category(run)
    ttft = [a.ttft for a in run.answers if a.ttft is not None]
    tpot = [a.tpot for a in run.answers if a.tpot is not None]
    itl = [gap for a in run.answers for gap in a.gaps or ()]
    accepted = drafts.num_accepted_tokens_per_pos
    # An engine that counts draft tokens has a count for each position; of others K is what was said.
    k = len(accepted) if accepted and drafts.num_draft_tokens else max(heading.num_speculative_tokens, len(accepted))
    accepted += (0,) * (k - len(accepted)) if accepted else ()
    reader = tokenizer if "thinking" in settings.slices else None
    by_prompt = tuple(_of_prompts(run, plain, reader))
    cell = Cell(
        **vars(replace(heading, num_speculative_tokens=k)),
        engine_version=run.version,
        num_prompts=len(run.answers),
        output_tokens=run.output_tokens,
        num_rounds=num_rounds,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=drafts.num_accepted_tokens,
        num_accepted_tokens_per_pos=accepted or None,
        acceptance_per_pos=tuple(n / max(drafts.num_drafts, 1) for n in accepted) or None,
        conditional_acceptance_per_pos=tuple(conditional_rates(accepted, drafts.num_drafts)) or None,
        acceptance_length=(
            Interval(1 + drafts.num_accepted_tokens / num_rounds, None, None)
            if own is None
            else known(_length(run.answers))
        ),
        drafted_acceptance_length=(
            None if num_rounds == drafts.num_drafts else known(Interval(drafts.acceptance_length, None, None))
        ),
        interval_known=own is not None,
        acceptance_length_by_convention=_by_convention(run, drafts, by_category),
        by_category={**by_category},
        runtime_s=run.seconds,
        tokens_per_second=run.tokens_per_second,
        ttft_ms=percentiles(ttft),
        tpot_ms=percentiles(tpot),
        itl_ms=percentiles(itl),
        ttft_quantiles_ms=quantiles(ttft),
        tpot_quantiles_ms=quantiles(tpot),
        itl_quantiles_ms=quantiles(itl),
        repetition=fmean(repetition(answer.tokens) for answer in run.answers),
        by_prompt=by_prompt or None,
        passes=passes,
    )
    if run.generations:
        cell = replace(cell, **_of_rounds(run, tokenizer))
    return cell if plain is None else _beside(cell, run, plain, settings, pace_error, blocks)


def _of_rounds(run: Run, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """The fields that are told from the record of every round."""
    found = run.generations
    lengths = {**lengths_by_convention(found, run.categories)}
    told: dict[str, Any] = {
        "interval_known": None,
        "num_drafts_beyond": sum(r.beyond for g in found for r in g.rounds if r.drafted),
        "expected_acceptance_length": known(expected_acceptance_length(found)),
        "acceptance_length_by_convention": lengths,
        "samples": None if tokenizer is None else transcripts(found, tokenizer),
    }
    if any(not r.drafted for g in found for r in g.rounds):
        told["drafted_acceptance_length"] = known(drafted_acceptance_length(found))
    return told


def _of_prompts(run: Run, plain: Run | None, tokenizer: PreTrainedTokenizerBase | None) -> list[PromptRecord]:
    """What each request did, of those that were counted one by one. Whether an answer thinks aloud is told where the
    engine gives its text; of one that gives ids, with a `tokenizer`."""
    found = []
    ids = run.ids or [str(number) for number in range(len(run.answers))]
    for number, (name, answer, seconds) in enumerate(zip(ids, run.answers, run.latencies, strict=True)):
        if answer.drafts is None:
            continue
        text = answer.text or ("" if tokenizer is None else str(tokenizer.decode(answer.ids)))
        record = PromptRecord(
            name,
            answer.rounds,
            answer.drafts.num_accepted_tokens,
            answer.num_tokens,
            seconds,
            thinks=bool(THOUGHT.search(text)) if text else None,
            drafts=answer.drafts.num_drafts if answer.skipped else None,
            prompt_tokens=(run.prompt_tokens[number] or None) if run.prompt_tokens else None,
        )
        if plain is not None:
            tokens, seconds = plain.answers[number].num_tokens, plain.latencies[number]
            record = replace(record, plain_tokens=tokens, plain_seconds=seconds)
        found.append(record)
    return found


def _length(answers: Sequence[Answer]) -> Interval:
    """The acceptance length with its interval, from the counts of each prompt."""
    return length_over_prompts([(a.drafts.num_accepted_tokens, a.rounds) for a in answers if a.drafts and a.rounds])


def _by_category(run: Run) -> dict[str, Interval | None]:
    pairs = list(zip(run.answers, run.categories, strict=bool(run.categories)))
    return {
        name: known(_length([answer for answer, category in pairs if category == name]))
        for name in sorted(set(run.categories))
    }


def _by_convention(run: Run, drafts: DraftCounts, by_category: dict[str, Interval | None]) -> dict[str, float | None]:
    """The acceptance length by those conventions that need no record of each round."""
    if not drafts.num_drafts:
        return {}
    lengths: dict[str, float | None] = {
        "vllm": drafts.acceptance_length,
        "sglang": run.output_tokens / drafts.num_drafts,
    }
    own = [counts.acceptance_length for counts in run.counted_by_request or () if counts.num_drafts]
    if own:
        lengths["macro by prompt"] = fmean(own)
    if by_category:
        lengths["macro by category"] = fmean(interval.mean for interval in by_category.values() if interval)
    return lengths


def _beside(cell: Cell, run: Run, plain: Run, settings: Settings, pace_error: float, blocks: int) -> Cell:
    """The cell with speed and output of plain decoding."""
    speedup = run.tokens_per_second / plain.tokens_per_second
    matching = sum(a.equals(b) for a, b in zip(run.answers, plain.answers, strict=True))
    return replace(
        cell,
        baseline_tokens_per_second=plain.tokens_per_second,
        baseline_ttft_ms=percentiles([a.ttft for a in plain.answers if a.ttft is not None]),
        baseline_output_tokens=plain.output_tokens,
        speedup=speedup,
        speedup_interval=speedup_interval(speedup, cell.by_prompt or (), pace_error, blocks),
        pace_error=pace_error if isfinite(pace_error) else None,
        matches_greedy=matching == len(run.answers) if settings.sampling.temperature == 0 else None,
        num_matching_prompts=matching if settings.exact else None,
    )


def transcripts(generations: Sequence[Generation], tokenizer: PreTrainedTokenizerBase) -> tuple[Transcript, ...]:
    """A few generations as text, token by token: what each round drafted, how much of it stood, what was emitted."""
    return tuple(
        Transcript(
            id=g.request.id,
            prompt=tokenizer.decode(list(g.request.prompt)),
            first=tokenizer.decode(g.tokens[:1]),
            rounds=_rounds_as_text(g, tokenizer),
        )
        for g in generations[:: max(len(generations) // SAMPLES, 1)][:SAMPLES]
    )


def _rounds_as_text(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> tuple[TranscriptRound, ...]:
    rounds = []
    at = 1  # the first token is of the prefill
    for r in generation.rounds:
        emitted = generation.tokens[at : at + r.emitted]
        drafted = _shown(r, generation.tokens, at)
        rounds.append(
            TranscriptRound(
                tuple(tokenizer.decode([token]) for token in drafted),
                min(r.accepted, len(drafted)),  # beyond the end of a text, it cannot be told what of a tree stood
                tuple(tokenizer.decode([token]) for token in emitted),
            )
        )
        at += r.emitted
    return tuple(rounds)


def _shown(round: Round, tokens: Sequence[int], at: int) -> Sequence[int]:
    """The draft tokens of a round; of a tree, what stood of it, as far as `tokens` go from `at` on, and the likeliest
    node that might have followed."""
    if not round.parents:
        return round.proposal
    shown: list[int] = []
    row = 0
    for depth in range(round.accepted + 1):
        children = [i for i, parent in enumerate(round.parents) if parent == row]
        if not children:
            break
        last = depth == round.accepted or at + depth >= len(tokens)
        node = children[0] if last else next(i for i in children if round.proposal[i] == tokens[at + depth])
        shown.append(round.proposal[node])
        row = node + 1
    return shown


def with_slices(cell: Cell, prompts: Sequence[Prompt], kinds: Sequence[str]) -> Cell:
    """The cell with what it measured of each slice of the prompts, against the rest; unchanged where nothing is asked,
    or requests were not counted one by one."""
    if not kinds or cell.by_prompt is None:
        return cell
    labels = [*labels_of(cell, prompts, kinds).values()]
    found = [_slice(name, cell.by_prompt, labels) for name in sorted({*chain.from_iterable(labels)}, key=_in_order)]
    return replace(cell, slices=tuple(found))


def labels_of(cell: Cell, prompts: Sequence[Prompt], kinds: Sequence[str]) -> dict[str, list[str]]:
    """The slices of these kinds that each request of a cell is in, as `category=code`, by its id in their order."""
    by_id = {prompt.id: prompt for prompt in prompts}
    return {record.id: _labels(record, _prompt_of(record, by_id), kinds) for record in cell.by_prompt or ()}


def _labels(record: PromptRecord, prompt: Prompt, kinds: Sequence[str]) -> list[str]:
    values = {
        "language": language_of(prompt.text),
        "thinking": None if record.thinks is None else _yes(record.thinks),
        "tools": _yes(prompt.tools),
        "category": prompt.category,
        "length": None if record.prompt_tokens is None else _size_class(record.prompt_tokens),
    }
    return [f"{kind}={values[kind]}" for kind in kinds if values[kind] is not None]


def _size_class(tokens: int) -> str:
    """The stretch of lengths that a prompt of so many tokens is in, each twice as long as the one before."""
    begin = 1 << tokens.bit_length() - 1
    return f"0–{SHORT - 1}" if begin < SHORT else f"{begin}–{2 * begin - 1}"


def _in_order(name: str) -> tuple[str, int, str]:
    """What sorts slices by their names, those of lengths by their sizes."""
    kind, _, value = name.partition("=")
    begin = value.partition("–")[0]
    return kind, int(begin) if begin.isdecimal() else 0, value


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _prompt_of(record: PromptRecord, by_id: Mapping[str, Prompt]) -> Prompt:
    """The prompt whose first or later turn it was."""
    return by_id[record.id] if record.id in by_id else by_id[record.id.rpartition("/")[0]]


def _slice(name: str, records: Sequence[PromptRecord], labels: Sequence[Sequence[str]]) -> Slice:
    inside, outside = (
        [(r.accepted, r.rounds) for r, own in zip(records, labels, strict=True) if (name in own) is within and r.rounds]
        for within in (True, False)
    )
    shift = contrast(inside, outside) if inside and outside else None
    return Slice(name, len(inside), known(length_over_prompts(inside)), shift)
