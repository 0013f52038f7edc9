"""A run of vLLM as a cell of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from draftkit.engines.vllm.records import DraftCounts, VllmRun
from draftkit.errors import DraftkitError
from draftkit.results.record import Cell, Heading, Interval
from draftkit.results.settings import Settings
from draftkit.results.statistics import bootstrap_length, conditional_rates, known, percentiles, quantiles, repetition


def vllm_cell(
    heading: Heading,
    run: VllmRun,
    plain: VllmRun | None,
    settings: Settings,
    categories: Sequence[str] | None = None,
) -> Cell:
    """The cell of a run with a draft; `plain`: the same requests without one; `categories`: one for each request.

    Where vLLM counts only all requests together, there is no interval: `low` and `high` are the mean,
    `interval_known` is false and `by_category` empty. Raises `DraftkitError` for a run that drafted nothing.
    """
    drafts = run.drafts
    if drafts is None or not drafts.num_drafts:
        raise DraftkitError("vLLM has drafted nothing", hint="are the prompts and --max-new-tokens too short?")
    own = run.counted_by_request
    mean = drafts.acceptance_length
    by_category = {} if own is None or categories is None else _by_category(own, categories)
    ttft = [a.ttft for a in run.answers if a.ttft is not None]
    tpot = [a.tpot for a in run.answers if a.tpot is not None]
    itl = [gap for a in run.answers for gap in a.gaps or ()]
    counted = replace(heading, num_speculative_tokens=len(drafts.num_accepted_tokens_per_pos))
    cell = Cell(
        **vars(counted),
        engine_version=run.version,
        num_prompts=len(run.answers),
        output_tokens=run.output_tokens,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=drafts.num_accepted_tokens,
        num_accepted_tokens_per_pos=drafts.num_accepted_tokens_per_pos,
        acceptance_per_pos=tuple(n / drafts.num_drafts for n in drafts.num_accepted_tokens_per_pos),
        conditional_acceptance_per_pos=tuple(conditional_rates(drafts.num_accepted_tokens_per_pos, drafts.num_drafts)),
        acceptance_length=Interval(mean, mean, mean) if own is None else _length(own),
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
    return cell if plain is None else _beside(cell, run, plain, settings)


def _length(counts: Sequence[DraftCounts]) -> Interval:
    """The acceptance length with its interval, from the counts of each prompt."""
    return bootstrap_length([(c.num_accepted_tokens, c.num_drafts) for c in counts if c.num_drafts])


def _by_category(own: Sequence[DraftCounts], categories: Sequence[str]) -> dict[str, Interval | None]:
    return {
        name: known(_length([c for c, category in zip(own, categories, strict=True) if category == name]))
        for name in sorted(set(categories))
    }


def _by_convention(
    run: VllmRun, drafts: DraftCounts, by_category: dict[str, Interval | None]
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


def _beside(cell: Cell, run: VllmRun, plain: VllmRun, settings: Settings) -> Cell:
    """The cell with speed and output of plain decoding."""
    matching = sum(a.tokens == b.tokens for a, b in zip(run.answers, plain.answers, strict=True))
    return replace(
        cell,
        baseline_tokens_per_second=plain.tokens_per_second,
        baseline_ttft_ms=percentiles([a.ttft for a in plain.answers if a.ttft is not None]),
        baseline_output_tokens=plain.output_tokens,
        speedup=run.tokens_per_second / plain.tokens_per_second,
        matches_greedy=matching == len(run.answers) if settings.sampling.temperature == 0 else None,
        num_matching_prompts=matching if settings.exact else None,
    )
