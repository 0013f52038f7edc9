"""From a run of vLLM to a cell of the result object, with the keys that draftkit's own engine gives."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from statistics import fmean

from draftkit.engines.vllm.records import DraftCounts, VllmRun
from draftkit.errors import DraftkitError
from draftkit.evaluate.cells import asked_for
from draftkit.results.settings import Settings
from draftkit.results.statistics import (
    Interval,
    bootstrap_length,
    conditional_rates,
    percentiles,
    quantiles,
    repetition,
)

# What a cell says of the run without a draft; null without one.
BESIDE_PLAIN = (
    "baseline_tokens_per_second", "baseline_ttft_ms", "baseline_output_tokens", "speedup", "matches_greedy",
    "num_matching_prompts",
)  # fmt: skip


def vllm_cell(
    run: VllmRun, plain: VllmRun | None, settings: Settings, categories: Sequence[str] | None = None
) -> dict[str, object]:
    """The cell of a run with a draft; `plain`: the same requests without one; `categories`: one for each request.

    Where vLLM counts only all requests together, there is no interval: `low` and `high` are the mean,
    `interval_known` is false and `by_category` empty. Raises `DraftkitError` for a run that drafted nothing.
    """
    drafts = run.drafts
    if drafts is None or not drafts.num_drafts:
        raise DraftkitError("vLLM has drafted nothing", hint="are the prompts and --max-new-tokens too short?")
    own = run.counted_by_request
    mean = drafts.acceptance_length
    length = Interval(mean, mean, mean) if own is None else length_interval(own)
    by_category = {} if own is None or categories is None else _by_category(own, categories)
    return {
        "engine": "vllm",
        "engine_version": run.version,
        **asked_for(settings),
        "num_speculative_tokens": len(drafts.num_accepted_tokens_per_pos),
        "num_prompts": len(run.answers),
        "output_tokens": run.output_tokens,
        "num_drafts": drafts.num_drafts,
        "num_draft_tokens": drafts.num_draft_tokens,
        "num_accepted_tokens": drafts.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(drafts.num_accepted_tokens_per_pos),
        "acceptance_per_pos": [n / drafts.num_drafts for n in drafts.num_accepted_tokens_per_pos],
        "conditional_acceptance_per_pos": conditional_rates(drafts.num_accepted_tokens_per_pos, drafts.num_drafts),
        "acceptance_length": length.to_dict(),
        "interval_known": own is not None,
        "expected_acceptance_length": None,
        "acceptance_length_by_convention": _by_convention(run, drafts, by_category),
        "by_category": {category: interval.to_dict() for category, interval in by_category.items()},
        "runtime_s": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "repetition": fmean(repetition(answer.tokens) for answer in run.answers),
        "warnings": [{"name": "other-traffic", "message": concern} for concern in run.concerns],
    } | _times(run) | _against(run, plain, settings)  # fmt: skip


def length_interval(counts: Sequence[DraftCounts]) -> Interval:
    """Mean acceptance length with its interval, a `DraftCounts` for each prompt."""
    return bootstrap_length([(c.num_accepted_tokens, c.num_drafts) for c in counts if c.num_drafts])


def _by_category(own: Sequence[DraftCounts], categories: Sequence[str]) -> dict[str, Interval]:
    return {
        name: length_interval([c for c, category in zip(own, categories, strict=True) if category == name])
        for name in sorted(set(categories))
    }


def _by_convention(run: VllmRun, drafts: DraftCounts, by_category: dict[str, Interval]) -> dict[str, float]:
    """Those conventions that can be had without the record of each round."""
    lengths = {"vllm": drafts.acceptance_length, "sglang": run.output_tokens / drafts.num_drafts}
    own = [counts.acceptance_length for counts in run.counted_by_request or () if counts.num_drafts]
    if own:
        lengths["macro by prompt"] = fmean(own)
    if by_category:
        lengths["macro by category"] = fmean(i.mean for i in by_category.values() if not isnan(i.mean))
    return lengths


def _times(run: VllmRun) -> dict[str, object]:
    """TTFT, TPOT and ITL: summaries, and 101 quantiles each; None where vLLM does not say."""
    seconds = {
        "ttft": [a.ttft for a in run.answers if a.ttft is not None],
        "tpot": [a.tpot for a in run.answers if a.tpot is not None],
        "itl": [gap for a in run.answers for gap in a.gaps or ()],
    }
    summaries: dict[str, object] = {f"{name}_ms": percentiles(values) for name, values in seconds.items()}
    return summaries | {f"{name}_quantiles_ms": quantiles(values) for name, values in seconds.items()}


def _against(run: VllmRun, plain: VllmRun | None, settings: Settings) -> dict[str, object]:
    """Speed and output beside those of plain decoding, where that was run."""
    if plain is None:
        return dict.fromkeys(BESIDE_PLAIN)
    matching = sum(a.tokens == b.tokens for a, b in zip(run.answers, plain.answers, strict=True))
    values = (
        plain.tokens_per_second,
        percentiles([a.ttft for a in plain.answers if a.ttft is not None]),
        plain.output_tokens,
        run.tokens_per_second / plain.tokens_per_second,
        matching == len(run.answers) if settings.sampling.temperature == 0 else None,
        matching if settings.exact else None,
    )
    return dict(zip(BESIDE_PLAIN, values, strict=True))
