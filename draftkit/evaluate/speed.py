"""What would be faster: round times of this pair on this machine, and the speed-up they predict for every K and batch.

A round of B sequences takes t(B, K), plain decoding t(B, 0); rounds emit A(K) tokens. The first token of a prompt
takes p with a draft and p₀ without, as measured at the smallest batch; that prompts which are admitted together share
a forward is left out. Answers have n tokens, so

    speed-up(B, K) = (p₀ + (n − 1) · t(B, 0) / B) / (p + (n − 1) · t(B, K) / (A(K) · B)),

which is A(K) · t(B, 0) / t(B, K) for long answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median

from draftkit.evaluate.runtime_lane import engine_of
from draftkit.requests import Request
from draftkit.results.cell import Cell
from draftkit.results.record import SpeedModel, Speedup
from draftkit.results.round_times import RoundTimes
from draftkit.results.settings import Settings
from draftkit.results.statistics import extended_rates
from draftkit.results.verdict import well_known
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import MAX_SPECULATIVE_TOKENS
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target

ROUNDS = 16  # of which the median counts
PASSES = 2  # over all batch sizes and K, of which the faster counts: other work only ever makes a round slower
MISSED = 0.05  # how far beyond the interval of a measured speed-up a prediction may be
SHARP = 1.5  # how wide an interval may be that a prediction is held against: its end, as a multiple of its begin
WORTHWHILE = 1.02  # the speed-up from which drafting is recommended


def measure_round_times(
    plain: Target,
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    settings: Settings,
    batches: Sequence[int],
) -> RoundTimes:
    """Time rounds at each batch size and a few K; `plain` is the target without aux_layers."""
    limit = min(drafter.max_tokens or MAX_SPECULATIVE_TOKENS, max(settings.num_speculative_tokens, 8))
    ks = sorted({k for k in (1, 2, 4, 8, 16) if k < limit} | {limit})
    times: dict[tuple[int, int], float] = {}
    for batch in [*batches] * PASSES:
        asked = [
            replace(requests[i % len(requests)], id=str(i), max_new_tokens=(ROUNDS + 1) * (limit + 1), ignore_eos=True)
            for i in range(batch)
        ]
        found = {(batch, 0): round_time(plain, None, asked, settings)}
        for k in ks:
            drafting = replace(_plainly(settings), num_speculative_tokens=k)
            found[batch, k] = round_time(target, drafter, asked, drafting)
        times |= {at: min(ms, times.get(at, ms)) for at, ms in found.items()}
    return RoundTimes(times)


def _plainly(settings: Settings) -> Settings:
    """The settings with all drafts of a round verified."""
    sampling = replace(settings.draft_sampling, min_confidence=0.0)
    return replace(
        settings,
        draft_sampling=sampling,
        k_by_batch=None,
        disable_above_batch=None,
    )


class _Enough(Exception):
    """Ends a run whose remaining rounds nobody needs."""


def round_time(target: Target, drafter: Drafter | None, requests: Sequence[Request], settings: Settings) -> float:
    """Milliseconds of the median round in which all requests take part: none of them ends within `ROUNDS`."""
    engine = engine_of(target, drafter, settings, num_slots=len(requests))
    engine.reserve(max(request.max_length for request in requests))
    engine.generate([replace(request, max_new_tokens=3) for request in requests])
    gaps: list[float] = []

    def on_round(touched: list[Generation]) -> None:
        gaps.append(touched[-1].itl[-1])  # the one admitted last: its first gap is a round as all others
        if len(gaps) == ROUNDS:
            raise _Enough

    with suppress(_Enough):
        engine.generate(requests, on_round=on_round)
    return 1000 * median(gaps)


def batches_up_to(largest: int) -> list[int]:
    """The batch sizes 1, 2, 4 … below `largest`, and `largest` itself."""
    return sorted({1 << power for power in range(largest.bit_length())} | {largest})


def speed_model(draft: str, cells: Sequence[Cell], times: RoundTimes) -> SpeedModel:
    """Predictions for a draft from its cells at one temperature, and how far off they are where it was measured."""
    widest = max(cells, key=lambda cell: cell.num_speculative_tokens)
    costs = _Costs.of(widest, times)
    drafted = min(widest.num_speculative_tokens, times.largest_k)  # beyond, acceptance is extrapolated
    best = {batch: _best(costs, batch, drafted) for batch in times.batches}
    withheld = _withheld(cells, costs)
    schedule = None if withheld else _ranges(best)
    measured = tuple(
        Speedup(at, k, cell.speedup, predicted=costs.speedup(at, k))
        for cell in cells
        for at, k in [(cell.concurrency, cell.num_speculative_tokens)]
        if at in times.batches and cell.speedup is not None
    )
    errors = [abs(costs.speedup(m.concurrency, m.num_speculative_tokens) / m.speedup - 1) for m in measured]
    return SpeedModel(
        draft=draft,
        temperature=widest.temperature,
        rounds_ms=times.to_records(),
        predicted=tuple(
            Speedup(batch, k, costs.speedup(batch, k)) for batch in times.batches for k in range(1, times.largest_k + 1)
        ),
        measured=measured,
        mean_error=fmean(errors) if errors else None,
        best_k=None if withheld else best[times.batches[0]],
        schedule=schedule,
        stop_above=schedule[-1][0] - 1 if schedule and schedule[-1][2] == 0 else None,
        largest_batch=times.batches[-1],
        withheld=withheld,
    )


def _withheld(cells: Sequence[Cell], costs: _Costs) -> str | None:
    """Why the predictions are not to be relied on, and what to measure instead; None where they are."""
    known = [cell for cell in cells if cell.concurrency in costs.times.batches and cell.speedup_interval is not None]
    ks = ",".join(map(str, sorted({cell.num_speculative_tokens for cell in cells} | {1, costs.times.largest_k})))
    instead = f"measure the K in question themselves (--k {ks}), on more prompts and an idle machine"
    blunt = sorted({cell.concurrency for cell in known} - {cell.concurrency for cell in known if _is_sharp(cell)})
    if blunt or not known:
        where = f" at batch {' and '.join(map(str, blunt))}" if blunt else ""
        return f"no measured speed-up{where} is known well enough to hold the predictions against: {instead}"
    missed = []
    for cell in known:
        predicted = costs.speedup(cell.concurrency, cell.num_speculative_tokens)
        low, high = cell.speedup_interval.bounds if cell.speedup_interval and cell.speedup_interval.bounds else (0, inf)
        if not low * (1 - MISSED) <= predicted <= high * (1 + MISSED):
            where = f"batch {cell.concurrency} K={cell.num_speculative_tokens}"
            missed.append(f"{where}: {predicted:.2f} predicted, {low:.2f} to {high:.2f} measured")
    return f"the predictions miss what was measured ({'; '.join(missed)}): {instead}" if missed else None


def _is_sharp(cell: Cell) -> bool:
    bounds = None if cell.speedup_interval is None else cell.speedup_interval.bounds
    return bounds is not None and bounds[1] <= SHARP * bounds[0] and well_known(cell)


@dataclass(frozen=True)
class _Costs:
    times: RoundTimes
    rates: Sequence[float]  # unconditional acceptance by position
    prefill_ms: float
    plain_prefill_ms: float
    tokens: float  # of an answer

    @classmethod
    def of(cls, cell: Cell, times: RoundTimes) -> _Costs:
        """The costs that a cell of draftkit's own engine shows, with the times of its rounds."""
        assert cell.ttft_ms is not None
        assert cell.baseline_ttft_ms is not None
        return cls(
            times,
            cell.accepted_at,
            cell.ttft_ms.p50,
            cell.baseline_ttft_ms.p50,
            (cell.output_tokens or 0) / (cell.num_prompts or 1),
        )

    def length(self, k: int) -> float:
        """The acceptance length at K, in the notation of the model A(K)."""
        return 1 + sum(extended_rates(self.rates, k))

    def speedup(self, batch: int, k: int) -> float:
        plain = self.plain_prefill_ms + (self.tokens - 1) * self.times.of(batch, 0) / batch
        drafted = self.prefill_ms + (self.tokens - 1) * self.times.of(batch, k) / (self.length(k) * batch)
        return plain / drafted


def _best(costs: _Costs, batch: int, largest_k: int) -> int:
    k = max(range(1, largest_k + 1), key=lambda k: costs.speedup(batch, k))
    return k if costs.speedup(batch, k) >= WORTHWHILE else 0


def _ranges(best: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """(first batch, last batch, K), as vLLM's `num_speculative_tokens_per_batch_size` has them.

    A batch between two that were measured takes the K of the larger one.
    """
    ranges: list[tuple[int, int, int]] = []
    for batch, k in sorted(best.items()):
        first = ranges[-1][1] + 1 if ranges else 1
        if ranges and ranges[-1][2] == k:
            first = ranges.pop()[0]
        ranges.append((first, batch, k))
    return tuple(ranges)
