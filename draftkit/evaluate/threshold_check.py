"""The best threshold run for real, by turns with the best fixed K: what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from draftkit.errors import DraftkitError
from draftkit.evaluate.calibrate import Calibration
from draftkit.evaluate.cell import cell_of
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.job import Job
from draftkit.evaluate.measure import Conversations, PromptProgress, Run, interleaved, sides
from draftkit.results.cell import Interval
from draftkit.results.settings import Settings, Sweep
from draftkit.results.thresholds import Gain, best_fixed, best_threshold


@dataclass(frozen=True)
class CheckedThreshold:
    """A threshold over the fixed K beside it, at a batch size: `predicted` and `measured`, each the speed as a multiple
    of the fixed K's. `length` and `fixed_length`: the acceptance lengths measured."""

    threshold: float
    fixed_k: int
    concurrency: int
    predicted: Interval
    measured: Interval | None
    predicted_length: float
    length: Interval | None
    fixed_length: Interval | None

    @property
    def sentence(self) -> str:
        """What it comes to."""
        said = f"draft_confidence={self.threshold:g} over the fixed K={self.fixed_k} at batch {self.concurrency}"
        measured = "not known" if self.measured is None else _times(self.measured)
        return f"{said}: {_times(self.predicted)} predicted, {measured} measured"


def _times(interval: Interval) -> str:
    ends = "" if interval.bounds is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.mean:.2f} ×{ends}"


def check_threshold(
    target: str, draft: str, calibration: Calibration, settings: Settings, on_progress: PromptProgress = lambda *_: None
) -> CheckedThreshold:
    """Run the best threshold of a calibration, and the best fixed K, on the prompts of `settings`, at its batch size
    and with the K and the temperature of the calibration. Raises `DraftkitError` where no gain is known there."""
    batch = settings.concurrency
    found = [gain for gain in calibration.gains if gain.concurrency == batch]
    threshold, fixed = best_threshold(found), best_fixed(found)
    if threshold is None or fixed is None or threshold.value is None or fixed.value is None:
        batches = sorted({gain.concurrency for gain in calibration.gains})
        why = calibration.doubt or f"round times are known at the batch sizes {', '.join(map(str, batches)) or 'none'}"
        raise DraftkitError(
            f"no threshold is predicted at batch {batch}: {why}",
            hint="measure rounds there: draftkit eval --advise --concurrency N --out RESULT, and pass --times RESULT",
        )
    asked = settings.at(num_speculative_tokens=calibration.num_speculative_tokens, temperature=calibration.temperature)
    cut = replace(asked, draft_sampling=replace(asked.draft_sampling, min_confidence=threshold.value))
    with ExitStack() as stack:
        return _run(Job(target, [draft], Sweep.of(asked), stack), draft, cut, threshold, fixed, on_progress)


def _run(
    job: Job, draft: str, cut: Settings, threshold: Gain, fixed: Gain, on_progress: PromptProgress
) -> CheckedThreshold:
    engine = OwnEngine()
    engine.check(job)
    engine.open(on_progress)
    assert fixed.value is not None
    assert threshold.value is not None
    k = int(fixed.value)
    whole = replace(cut.at(num_speculative_tokens=k), draft_sampling=job.sweep.first.draft_sampling)
    asked = job.conversations(cut)

    @contextmanager
    def lane(settings: Settings) -> Iterator[Callable[[Conversations], Run]]:
        with engine.lane(draft, job.conversations(settings), lambda *_: None) as ready:
            yield lambda block: block.hold(ready)

    with lane(whole) as usual, lane(cut) as leaving_out:
        runs, error = interleaved(asked.blocks, usual, leaving_out, max(cut.repeats, 1))
    plain, run = (Run.joined(side) for side in sides(runs))
    cell = cell_of(engine.heading(draft, cut), run, plain, cut, pace_error=error, blocks=len(asked.blocks))
    beside = cell_of(engine.heading(draft, whole), plain, None, whole)
    return CheckedThreshold(
        threshold.value, k, cut.concurrency, threshold.over_fixed, cell.speedup_interval, threshold.length,
        cell.acceptance_length, beside.acceptance_length,
    )  # fmt: skip
