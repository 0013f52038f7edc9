"""How a run went by its validations: the acceptance length, the loss, and where the two part.

A draft is served for its acceptance length; the loss can go on falling while that no longer grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import FormatError, SourceError
from draftkit.io.jsonfile import read_object
from draftkit.results.record import Interval
from draftkit.train.progress import LENGTH
from draftkit.train.resume import STATE_FILE, newest_checkpoint
from draftkit.train.trainer import LOSS


@dataclass(frozen=True)
class ValidatedStep:
    """A validation. `loss`: of the held-out answers, None in runs of earlier releases."""

    step: int
    length: Interval
    loss: float | None


@dataclass(frozen=True)
class TrainingCurve:
    """The validations of a run in the order of their steps; at least one."""

    run: Path
    steps: tuple[ValidatedStep, ...]

    @property
    def longest(self) -> ValidatedStep:
        """The first with the longest acceptance length, which is the one kept."""
        return max(self.steps, key=lambda found: found.length.mean)

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
        if lowest.length.mean == longest.length.mean:
            return f"{best}, where the loss is lowest too: the two do not part."
        known = lowest.length.bounds and longest.length.bounds
        sure = ("; the intervals overlap" if lowest.length.overlaps(longest.length) else "") if known else ""
        return (
            f"{best}; the loss is lowest at step {lowest.step:,}, where the length is {_interval(lowest.length)}: "
            f"they part, and the lowest loss would have cost {longest.length.mean - lowest.length.mean:.3f}{sure}."
        )


def read_curve(run: Path) -> TrainingCurve:
    """The validations that the newest checkpoint of a run knows of. Raises `SourceError` and `FormatError`."""
    newest = newest_checkpoint(run)
    if newest is None:
        raise SourceError("the folder holds no checkpoint of a training run", where=run, expected="the OUT of a run")
    history = read_object(newest / STATE_FILE).get("log_history")
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    found = {}
    for entry in entries:
        names = (LENGTH, f"{LENGTH}_low", f"{LENGTH}_high", f"{LENGTH}_documents", LOSS)
        mean, low, high, documents, loss = (_finite(entry.get(name)) for name in names)
        if mean is not None:
            length = Interval(mean, low, high, None if documents is None else int(documents))
            found[int(entry["step"])] = ValidatedStep(int(entry["step"]), length, loss)
    if not found:
        raise FormatError(
            "the run was not validated while it trained", where=newest, hint="train with --set validation.every=N"
        )
    return TrainingCurve(run, tuple(found[step] for step in sorted(found)))


def _finite(value: object) -> float | None:
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def _interval(interval: Interval) -> str:
    """The length, its interval, and on how many held-out documents."""
    bounds = "" if interval.bounds is None else " [{:.3f}, {:.3f}]".format(*interval.bounds)
    documents = (
        "" if interval.prompts is None else f" on {interval.prompts} document" + ("" if interval.prompts == 1 else "s")
    )
    return f"{interval.mean:.3f}{bounds}{documents}"
