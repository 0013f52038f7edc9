"""A run of draftkit's own engine as a cell of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from transformers import PreTrainedTokenizerBase

from draftkit.data.traffic import THOUGHT
from draftkit.evaluate.by_turns import speedup_interval
from draftkit.evaluate.measure import Run
from draftkit.layout.families import named
from draftkit.results.record import Cell, Heading, NearTie, PromptRecord, Transcript, TranscriptRound
from draftkit.results.settings import Settings
from draftkit.results.statistics import (
    acceptance_length,
    accepted_per_position,
    conditional_rates,
    drafted_acceptance_length,
    drafted_rounds,
    expected_acceptance_length,
    known,
    lengths_by_convention,
    percentiles,
    quantiles,
    repetition,
)
from draftkit.runtime.memory_plan import MemoryPlan
from draftkit.runtime.records import Generation

SAMPLES = 3  # generations that are kept token by token


def drawn_as(heading: Heading, source: str) -> Heading:
    """The heading of a draft, which says greedy of one without a checkpoint: its tokens are certain, however it is
    asked to draw them."""
    return heading if named(source) is None else replace(heading, draft_sampling="greedy")


def cell_of(
    heading: Heading,
    run: Run,
    plain: Run,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    plan: MemoryPlan,
    passes: int | None,
    pace_error: float,
    near_ties: Sequence[NearTie] | None,
) -> Cell:
    """What a run with a draft measured, beside the run without one; `near_ties` None: they were not looked for.

    `passes` and `pace_error` are those of `by_turns`; None and inf where it was not.
    """
    rounds, num_rounds = drafted_rounds(run.generations), sum(len(g.rounds) for g in run.generations)
    accepted = accepted_per_position(run.generations, settings.num_speculative_tokens)
    matching = sum(a.tokens == b.tokens for a, b in zip(run.generations, plain.generations, strict=True))
    by_category = {
        category: [g for g, other in zip(run.generations, run.categories, strict=True) if other == category]
        for category in sorted(set(run.categories))
    }
    ttft = [g.ttft for g in run.generations]
    tpot = [g.tpot for g in run.generations if g.tpot is not None]
    itl = [gap for g in run.generations for gap in g.itl]
    by_prompt = tuple(map(_of_prompt, run.generations, run.latencies, plain.generations, plain.latencies))
    if "thinking" in settings.slices:
        said = (tokenizer.decode(g.tokens, skip_special_tokens=False) for g in run.generations)
        by_prompt = tuple(
            replace(p, thinks=bool(THOUGHT.search(text))) for p, text in zip(by_prompt, said, strict=True)
        )
    speedup = run.tokens_per_second / plain.tokens_per_second
    return Cell(
        **vars(heading),
        num_prompts=len(run.generations),
        output_tokens=run.output_tokens,
        num_rounds=num_rounds,
        num_drafts=len(rounds),
        num_drafts_beyond=sum(r.beyond for r in rounds),
        num_draft_tokens=sum(r.drafted for r in rounds),
        num_accepted_tokens=sum(r.accepted for r in rounds),
        num_accepted_tokens_per_pos=tuple(accepted),
        acceptance_per_pos=tuple(count / max(len(rounds), 1) for count in accepted),
        conditional_acceptance_per_pos=tuple(conditional_rates(accepted, len(rounds))),
        acceptance_length=known(acceptance_length(run.generations)),
        drafted_acceptance_length=(
            known(drafted_acceptance_length(run.generations)) if len(rounds) < num_rounds else None
        ),
        expected_acceptance_length=known(expected_acceptance_length(run.generations)),
        acceptance_length_by_convention={**lengths_by_convention(run.generations, run.categories)},
        by_category={category: known(acceptance_length(inside)) for category, inside in by_category.items()},
        runtime_s=run.seconds,
        tokens_per_second=run.tokens_per_second,
        baseline_tokens_per_second=plain.tokens_per_second,
        baseline_ttft_ms=percentiles([g.ttft for g in plain.generations]),
        baseline_output_tokens=plain.output_tokens,
        speedup=speedup,
        speedup_interval=speedup_interval(speedup, by_prompt, pace_error),
        passes=passes,
        pace_error=pace_error if isfinite(pace_error) else None,
        ttft_ms=percentiles(ttft),
        tpot_ms=percentiles(tpot),
        itl_ms=percentiles(itl),
        ttft_quantiles_ms=quantiles(ttft),
        tpot_quantiles_ms=quantiles(tpot),
        itl_quantiles_ms=quantiles(itl),
        repetition=sum(repetition(g.tokens) for g in run.generations) / len(run.generations),
        matches_greedy=matching == len(run.generations) if settings.sampling.temperature == 0 else None,
        num_matching_prompts=matching if settings.exact else None,
        samples=transcripts(run.generations, tokenizer),
        near_ties=None if near_ties is None else tuple(near_ties),
        memory=plan,
        by_prompt=by_prompt,
    )


def _of_prompt(generation: Generation, seconds: float, plain: Generation, plain_seconds: float) -> PromptRecord:
    rounds = generation.rounds
    return PromptRecord(
        generation.request.id,
        len(rounds),
        sum(r.accepted for r in rounds),
        len(generation.tokens),
        seconds,
        len(plain.tokens),
        plain_seconds,
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
        at += r.emitted
        rounds.append(
            TranscriptRound(
                tuple(tokenizer.decode([token]) for token in r.proposal),
                r.accepted,
                tuple(tokenizer.decode([token]) for token in emitted),
            )
        )
    return tuple(rounds)
