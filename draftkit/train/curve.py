"""How a run went by its validations: the acceptance length, the loss, and where the two part.

A draft is served for its acceptance length; the loss can go on falling while that no longer grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import FormatError, SourceError
from draftkit.io.jsonfile import read_object
from draftkit.results.record import Interval
from draftkit.train.progress import ALPHA, LENGTH, LOSS
from draftkit.train.resume import STATE_FILE, newest_checkpoint


@dataclass(frozen=True)
class ValidatedStep:
    """A validation. `loss`: of the held-out answers, None in runs of earlier releases. `alpha`: the chance that a draft
    token is accepted, on the same."""

    step: int
    length: Interval
    loss: float | None
    alpha: float | None = None

    @property
    def merit(self) -> tuple[float, float, float]:
        """Larger is better: the acceptance length, and where that is equal, as early on, the other two."""
        loss, alpha = self.loss, self.alpha
        return self.length.mean, -math.inf if alpha is None else alpha, -math.inf if loss is None else -loss


@dataclass(frozen=True)
class TrainingCurve:
    """The validations of a run in the order of their steps; at least one."""

    run: Path
    steps: tuple[ValidatedStep, ...]

    @property
    def longest(self) -> ValidatedStep:
        """The one with the longest acceptance length, which is kept."""
        return best_of(self.steps)

    @property
    def lowest(self) -> ValidatedStep | None:
        """The first with the lowest loss."""
        known = [found for found in self.steps if found.loss is not None]
        return min(known, key=lambda found: found.loss or 0.0, default=None)

    @property
    def verdict(self) -> str:
        """Whether loss and acceptance length agree on the best step, in one sentence."""
        longest, lowest = self.longest, self.lowest
        best = f"The acceptance length is longest at step {longest.step:,}, {_interval(longest.length)}"
        if lowest is None:
            return f"{best}; the run did not record the loss on held-out answers."
        if lowest.loss == longest.loss:
            return f"{best}, where the loss is lowest too: the two do not part."
        if lowest.length.mean == longest.length.mean:
            return (
                f"{best}; the loss is lowest at step {lowest.step:,}, where the length is the same and the chance that "
                "a draft token is accepted smaller."
            )
        known = lowest.length.bounds and longest.length.bounds
        sure = ("; the intervals overlap" if lowest.length.overlaps(longest.length) else "") if known else ""
        return (
            f"{best}; the loss is lowest at step {lowest.step:,}, where the length is {_interval(lowest.length)}: "
            f"they part, and the lowest loss would have cost {longest.length.mean - lowest.length.mean:.3f}{sure}."
        )


def best_of(steps: Iterable[ValidatedStep]) -> ValidatedStep:
    """The first of those with the most merit."""
    return max(steps, key=lambda found: found.merit)


def validated_steps(history: Iterable[Mapping[str, object]]) -> tuple[ValidatedStep, ...]:
    """The validations in the log of a run in the order of their steps; without those that found no round."""
    found = {}
    for entry in history:
        mean, low, high, documents, loss, alpha = (
            _finite(entry.get(name))
            for name in (LENGTH, f"{LENGTH}_low", f"{LENGTH}_high", f"{LENGTH}_documents", LOSS, ALPHA)
        )
        step = _finite(entry.get("step"))
        if mean is not None and step is not None:
            length = Interval(mean, low, high, None if documents is None else int(documents))
            found[int(step)] = ValidatedStep(int(step), length, loss, alpha)
    return tuple(found[step] for step in sorted(found))


def read_curve(run: Path) -> TrainingCurve:
    """The validations that the newest checkpoint of a run knows of. Raises `SourceError` and `FormatError`."""
    newest = newest_checkpoint(run)
    if newest is None:
        raise SourceError("the folder holds no checkpoint of a training run", where=run, expected="the OUT of a run")
    history = read_object(newest / STATE_FILE).get("log_history")
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    steps = validated_steps(entries)
    if not steps:
        raise FormatError(
            "the run was not validated while it trained", where=newest, hint="train with --set validation.every=N"
        )
    return TrainingCurve(run, steps)


def _finite(value: object) -> float | None:
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def _interval(interval: Interval) -> str:
    """The length, its interval, and on how many held-out documents."""
    bounds = "" if interval.bounds is None else " [{:.3f}, {:.3f}]".format(*interval.bounds)
    documents = (
        "" if interval.prompts is None else f" on {interval.prompts} document" + ("" if interval.prompts == 1 else "s")
    )
    return f"{interval.mean:.3f}{bounds}{documents}"
