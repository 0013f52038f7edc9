"""A measurement as a cell of the result object; `eval --json` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from draftkit.evaluate.measure import Run
from draftkit.results.settings import Settings
from draftkit.results.statistics import (
    acceptance_length,
    accepted_per_position,
    conditional_rates,
    drafted_rounds,
    expected_acceptance_length,
    lengths_by_convention,
    percentiles,
    quantiles,
    repetition,
)
from draftkit.runtime.records import Generation

SAMPLES = 3  # generations that are kept token by token


def cell_of(run: Run, plain: Run, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """What a run with a draft measured, beside the run without one."""
    rounds = drafted_rounds(run.generations)
    k = settings.num_speculative_tokens
    accepted = accepted_per_position(run.generations, k)
    matching = sum(a.tokens == b.tokens for a, b in zip(run.generations, plain.generations, strict=True))
    by_category = {
        category: [g for g, other in zip(run.generations, run.categories, strict=True) if other == category]
        for category in sorted(set(run.categories))
    }
    ttft = [g.ttft for g in run.generations]
    tpot = [g.tpot for g in run.generations if g.tpot is not None]
    itl = [gap for g in run.generations for gap in g.itl]
    return {
        "engine": "draftkit",
        **asked_for(settings),
        "num_prompts": len(run.generations),
        "output_tokens": run.output_tokens,
        "num_drafts": len(rounds),
        "num_drafts_beyond": sum(r.beyond for r in rounds),
        "num_draft_tokens": sum(r.drafted for r in rounds),
        "num_accepted_tokens": sum(r.accepted for r in rounds),
        "num_accepted_tokens_per_pos": accepted,
        "acceptance_per_pos": [count / max(len(rounds), 1) for count in accepted],
        "conditional_acceptance_per_pos": conditional_rates(accepted, len(rounds)),
        "acceptance_length": acceptance_length(run.generations).to_dict(),
        "expected_acceptance_length": expected_acceptance_length(run.generations).to_dict(),
        "acceptance_length_by_convention": lengths_by_convention(run.generations, run.categories),
        "by_category": {category: acceptance_length(inside).to_dict() for category, inside in by_category.items()},
        "runtime_s": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "baseline_tokens_per_second": plain.tokens_per_second,
        "baseline_ttft_ms": percentiles([g.ttft for g in plain.generations]),
        "baseline_output_tokens": plain.output_tokens,
        "speedup": run.tokens_per_second / plain.tokens_per_second,
        "ttft_ms": percentiles(ttft),
        "tpot_ms": percentiles(tpot),
        "itl_ms": percentiles(itl),
        "ttft_quantiles_ms": quantiles(ttft),
        "tpot_quantiles_ms": quantiles(tpot),
        "itl_quantiles_ms": quantiles(itl),
        "repetition": sum(repetition(g.tokens) for g in run.generations) / len(run.generations),
        "matches_greedy": matching == len(run.generations) if settings.sampling.temperature == 0 else None,
        "num_matching_prompts": matching if settings.exact else None,
        "samples": samples(run.generations, tokenizer),
    }


def asked_for(settings: Settings) -> dict[str, object]:
    """How a cell was asked to be measured."""
    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.sampling.temperature,
        "top_k": settings.sampling.top_k,
        "top_p": settings.sampling.top_p,
        "min_p": settings.sampling.min_p,
        "seed": settings.sampling.seed,
        "draft_sampling": settings.draft_mode,
        "verification": settings.verification,
        "concurrency": settings.concurrency,
        "max_new_tokens": settings.max_new_tokens,
    }


def samples(generations: Sequence[Generation], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """A few generations as text, token by token: what each round drafted, how much of it stood, what was emitted."""
    return [
        {
            "id": g.request.id,
            "prompt": tokenizer.decode(list(g.request.prompt)),
            "first": tokenizer.decode(g.tokens[:1]),
            "rounds": _rounds_as_text(g, tokenizer),
        }
        for g in generations[:: max(len(generations) // SAMPLES, 1)][:SAMPLES]
    ]


def _rounds_as_text(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    rounds: list[dict[str, object]] = []
    at = 1  # the first token is of the prefill
    for r in generation.rounds:
        emitted = generation.tokens[at : at + r.emitted]
        at += r.emitted
        rounds.append(
            {
                "drafted": [tokenizer.decode([token]) for token in r.proposal],
                "accepted": r.accepted,
                "emitted": [tokenizer.decode([token]) for token in emitted],
            }
        )
    return rounds
