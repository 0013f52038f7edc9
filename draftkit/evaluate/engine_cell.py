"""The run of an engine that is not draftkit's own, as a cell of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf, isfinite
from statistics import fmean

from draftkit.data.traffic import THOUGHT
from draftkit.engines.records import Answer, DraftCounts, EngineRun, Lane
from draftkit.errors import DraftkitError
from draftkit.evaluate.by_turns import block_sizes, by_turns, sides, speedup_interval
from draftkit.requests import Request
from draftkit.results.record import Cell, Heading, Interval, PromptRecord
from draftkit.results.settings import Settings
from draftkit.results.statistics import bootstrap_length, conditional_rates, known, percentiles, quantiles, repetition


def measured_by(
    heading: Heading,
    requests: Sequence[Request],
    settings: Settings,
    plain: Lane | None,
    drafting: Lane,
    categories: Sequence[str] | None,
    repeats: int,
) -> tuple[Cell, tuple[str, ...]]:
    """The cell of what `drafting` runs, by turns with `plain` where there is one, and what may be wrong with it.

    `categories`: one for each request. `repeats`: passes at most; 0 runs `plain` once, before.
    """
    ids = [request.id for request in requests]
    if plain is None:
        run = drafting(requests)
        return engine_cell(heading, run, None, settings, categories, ids=ids), run.concerns
    sizes = block_sizes(len(requests), settings.concurrency)
    blocks = [requests[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if repeats:
        passes, error = by_turns(blocks, plain, drafting, repeats)
    else:
        passes, error = [[(plain(requests), drafting(requests))]], inf
    without, run = (EngineRun.joined(runs) for runs in sides(passes))
    cell = engine_cell(heading, run, without, settings, categories, error, ids)
    return replace(cell, passes=len(passes) if repeats else None), run.concerns


def engine_cell(
    heading: Heading,
    run: EngineRun,
    plain: EngineRun | None,
    settings: Settings,
    categories: Sequence[str] | None = None,
    pace_error: float = inf,
    ids: Sequence[str] | None = None,
) -> Cell:
    """The cell of a run with a draft; `plain`: the same requests without one; `categories`, `ids`: those of requests.
    `pace_error` as of `by_turns`.

    Where the engine counts only all requests together, there is no interval, `interval_known` is false and
    `by_category` empty. Raises `DraftkitError` for a run that drafted nothing.
    """
    drafts = run.drafts
    if drafts is None or not drafts.num_drafts:
        raise DraftkitError(
            f"{heading.engine} has drafted nothing", hint="are the prompts and --max-new-tokens too short?"
        )
    own = run.counted_by_request
    num_rounds = drafts.num_drafts + sum(answer.skipped for answer in run.answers)
    length = Interval(1 + drafts.num_accepted_tokens / num_rounds, None, None)
    by_category = {} if own is None or categories is None else _by_category(run.answers, categories)
    ttft = [a.ttft for a in run.answers if a.ttft is not None]
    tpot = [a.tpot for a in run.answers if a.tpot is not None]
    itl = [gap for a in run.answers for gap in a.gaps or ()]
    accepted = drafts.num_accepted_tokens_per_pos
    # An engine that counts draft tokens has a count for each position; of others K is what was said.
    k = len(accepted) if accepted and drafts.num_draft_tokens else max(heading.num_speculative_tokens, len(accepted))
    accepted += (0,) * (k - len(accepted)) if accepted else ()
    counted = replace(heading, num_speculative_tokens=k)
    cell = Cell(
        **vars(counted),
        engine_version=run.version,
        num_prompts=len(run.answers),
        output_tokens=run.output_tokens,
        num_rounds=num_rounds,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=drafts.num_accepted_tokens,
        num_accepted_tokens_per_pos=accepted or None,
        acceptance_per_pos=tuple(n / drafts.num_drafts for n in accepted) or None,
        conditional_acceptance_per_pos=tuple(conditional_rates(accepted, drafts.num_drafts)) or None,
        acceptance_length=length if own is None else _length(run.answers),
        drafted_acceptance_length=(
            None if num_rounds == drafts.num_drafts else Interval(drafts.acceptance_length, None, None)
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
    )
    names = ids or [str(number) for number in range(len(run.answers))]
    by_prompt = tuple(
        _of_prompt(name, answer) for name, answer in zip(names, run.answers, strict=True) if answer.drafts
    )
    cell = replace(cell, by_prompt=by_prompt or None)
    return cell if plain is None else _beside(cell, run, plain, settings, pace_error)


def _of_prompt(name: str, answer: Answer) -> PromptRecord:
    """What one request did. Whether it thinks aloud is told where the engine gives its text."""
    assert answer.drafts is not None
    thinks = bool(THOUGHT.search(answer.text)) if answer.text else None
    accepted = answer.drafts.num_accepted_tokens
    return PromptRecord(name, answer.rounds, accepted, answer.num_tokens, answer.latency, thinks=thinks)


def _length(answers: Sequence[Answer]) -> Interval:
    """The acceptance length with its interval, from the counts of each prompt."""
    counted = [(a.drafts.num_accepted_tokens, a.rounds) for a in answers if a.drafts]
    return bootstrap_length([(accepted, rounds) for accepted, rounds in counted if rounds])


def _by_category(answers: Sequence[Answer], categories: Sequence[str]) -> dict[str, Interval | None]:
    return {
        name: known(_length([a for a, category in zip(answers, categories, strict=True) if category == name]))
        for name in sorted(set(categories))
    }


def _by_convention(
    run: EngineRun, drafts: DraftCounts, by_category: dict[str, Interval | None]
) -> dict[str, float | None]:
    """Those conventions that can be had without the record of each round."""
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


def _beside(cell: Cell, run: EngineRun, plain: EngineRun, settings: Settings, pace_error: float) -> Cell:
    """The cell with speed and output of plain decoding."""
    by_prompt = tuple(
        replace(record, plain_tokens=other.num_tokens, plain_seconds=other.latency)
        for record, other in zip(cell.by_prompt or (), plain.answers, strict=False)
    )
    speedup = run.tokens_per_second / plain.tokens_per_second
    matching = sum(a.equals(b) for a, b in zip(run.answers, plain.answers, strict=True))
    return replace(
        cell,
        baseline_tokens_per_second=plain.tokens_per_second,
        baseline_ttft_ms=percentiles([a.ttft for a in plain.answers if a.ttft is not None]),
        baseline_output_tokens=plain.output_tokens,
        speedup=speedup,
        speedup_interval=speedup_interval(speedup, by_prompt, pace_error),
        pace_error=pace_error if isfinite(pace_error) else None,
        by_prompt=by_prompt or None,
        matches_greedy=matching == len(run.answers) if settings.sampling.temperature == 0 else None,
        num_matching_prompts=matching if settings.exact else None,
    )
