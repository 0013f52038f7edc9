"""The log of a run: its lines on stderr, and its steps and validations, read back as a curve.

On a terminal the trainer's own bar stays above the lines. A draft is served for its acceptance length; the loss can go
on falling while that no longer grows.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from draftkit.errors import DraftkitError, FormatError, SourceError
from draftkit.io.jsonfile import read_object
from draftkit.results.cell import Interval
from draftkit.train.checkpoint import CONFIG_FILE, STATE_FILE, newest_checkpoint
from draftkit.train.config import read_config

LENGTH = "eval_acceptance_length"
ALPHA = "eval_alpha"
LOSS = "eval_loss"
PACE = "tokens_per_second"
TOKENS = "tokens"
PROCESSOR = "processor_seconds"
FEW = 10  # held-out documents by which no draft is told from another
QUIET = ("epoch", "total_flos", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second",
         "grad_norm", "learning_rate", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second",
         PACE, TOKENS, PROCESSOR, LENGTH)  # fmt: skip
DETAIL = ("loss_", "agree_", "alpha_", "accepted_", "acceptance_length")  # the trackers have them all, a line the first
MEANING = {
    "loss_1": "that of the draft's first token",
    "accepted_1": "the share of rounds in which the draft's first token is accepted",
    "agree_1": "how often the draft's first token is the target's own choice",
    "alpha_1": "the chance that the target accepts the draft's first token",
    "alpha": "the chance that it accepts a draft token, on held-out answers",
    "oov": "what the target expects outside the draft vocabulary",
}


class Pace:
    """How far a run has come, and how fast it goes. `tokens`: those of a step, on all processes together; `step`: the
    first of this process; `history`: the log before it."""

    def __init__(self, tokens: float, step: int, history: Sequence[Mapping[str, Any]] = ()):
        self._tokens, self._step = tokens, step
        before = next((entry[PROCESSOR] for entry in reversed(history) if PROCESSOR in entry), 0.0)
        self._began, self._used = time.monotonic(), time.process_time() - before

    def at(self, step: int) -> dict[str, float]:
        """The tokens a second up to a step, for the log; nothing before the first."""
        seconds, steps = time.monotonic() - self._began, step - self._step
        return {PACE: round(self._tokens * steps / seconds, 1)} if steps > 0 and seconds > 0 else {}

    def spent(self, step: int) -> dict[str, float]:
        """The tokens read up to a step, padding left out, and the processor time of steps and validations in seconds:
        that of the first process, in all parts of a resumed run."""
        return {TOKENS: round(self._tokens * step), PROCESSOR: round(time.process_time() - self._used, 2)}


class LogLines(ProgressCallback):
    """One short line for each entry of the log, under a bar where stderr is a terminal.

    `tokens`: those of a step, on all processes together. What a name means is said where it comes up first.
    """

    def __init__(self, tokens: float):
        super().__init__()
        self._tokens = tokens
        self._explained: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        shown = [f"{name.removeprefix('eval_')} {_short(value)}" for name, value in logs.items() if _is_shown(name)]
        if LENGTH in logs:
            shown.insert(0, f"held out: acceptance length {validated(logs)}")
        elif logs.get(PACE):
            left = timedelta(seconds=round((state.max_steps - state.global_step) * self._tokens / logs[PACE]))
            shown += [f"{logs[PACE]:,.0f} tokens/s", f"{left} left"]
        if not shown:
            return
        tqdm.write(f"step {state.global_step}/{state.max_steps}: {', '.join(shown)}", file=sys.stderr)
        logged = {name.removeprefix("eval_") for name in logs} - self._explained
        self._explained |= logged
        for name in MEANING:
            if name in logged:
                tqdm.write(f"  {name}: {MEANING[name]}", file=sys.stderr)
        sys.stderr.flush()


def validated(found: Mapping[str, Any]) -> str:
    """The acceptance length of a validation, its interval, and on how many documents."""
    low, high = found.get(f"{LENGTH}_low"), found.get(f"{LENGTH}_high")
    bounds = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    documents = found.get(f"{LENGTH}_documents")
    mean = found[LENGTH]
    text = f"{mean:.3f}{bounds}" if isfinite(mean) else "–"
    return text if documents is None else f"{text} on {documents:.0f} document" + ("" if documents == 1 else "s")


def _is_shown(name: str) -> bool:
    is_detail = name.removeprefix("eval_").startswith(DETAIL) and not name.endswith("_1")
    return not is_detail and name not in QUIET


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class ValidatedStep:
    """A validation. `loss`: of the held-out answers, None in runs of earlier releases. `alpha`: the chance that a draft
    token is accepted, on the same. `tokens` and `processor_seconds` as of `Pace.spent`."""

    step: int
    length: Interval
    loss: float | None
    alpha: float | None = None
    tokens: float | None = None
    processor_seconds: float | None = None

    @property
    def merit(self) -> tuple[float, float, float]:
        """Larger is better: the acceptance length, and where that is equal, as early on, the other two."""
        loss, alpha = self.loss, self.alpha
        return self.length.mean, -math.inf if alpha is None else alpha, -math.inf if loss is None else -loss


@dataclass(frozen=True)
class LoggedStep:
    """A line of the log. `loss` and `tokens_per_second` are means since the line before and since the beginning."""

    step: int
    loss: float
    learning_rate: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class TrainingCurve:
    """The validations of a run in the order of their steps, at least one, the lines of its log, and its settings."""

    run: Path
    steps: tuple[ValidatedStep, ...]
    logged: tuple[LoggedStep, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def longest(self) -> ValidatedStep:
        """The validation with the longest acceptance length, whose draft is kept."""
        return best_of(self.steps)

    @property
    def lowest(self) -> ValidatedStep | None:
        """The first validation with the lowest loss."""
        known = [found for found in self.steps if found.loss is not None]
        return min(known, key=lambda found: found.loss or 0.0, default=None)

    @property
    def summary(self) -> str:
        """Whether loss and acceptance length agree on the best step, and whether so few documents tell."""
        documents = self.longest.length.prompts
        few = documents is not None and documents < FEW
        return f"{self._agreement} {too_few(documents)}" if few else self._agreement

    @property
    def _agreement(self) -> str:
        longest, lowest = self.longest, self.lowest
        best = f"The acceptance length is longest at step {longest.step:,}, {_interval(longest.length)}"
        if lowest is None:
            return f"{best}; the run did not record the loss on held-out answers."
        if lowest.loss == longest.loss:
            return f"{best}, where the loss is lowest too: the two agree."
        if lowest.length.mean == longest.length.mean:
            return (
                f"{best}; the loss is lowest at step {lowest.step:,}, where the length is the same and the chance that "
                "a draft token is accepted smaller."
            )
        known = lowest.length.bounds and longest.length.bounds
        sure = ("; the intervals overlap" if lowest.length.overlaps(longest.length) else "") if known else ""
        return (
            f"{best}; the loss is lowest at step {lowest.step:,}, where the length is {_interval(lowest.length)}: "
            f"they disagree, and the lowest loss would have cost {longest.length.mean - lowest.length.mean:.3f}{sure}."
        )


def said_of_judges(held_out: int, samples: int) -> str:
    """How many samples judge the draft, as a run begins; and what to do where they are too few."""
    said = f"held out: {held_out:,} of {samples:,} samples, by which the draft is judged"
    if held_out >= FEW:
        return said
    return f"{said}: too few to tell drafts apart; hold out {FEW} or more (validation.share, or a file of your own)"


def too_few(documents: int | None) -> str:
    return f"That is by {documents} held-out document{'' if documents == 1 else 's'}: too few to tell drafts apart."


def best_of(steps: Iterable[ValidatedStep]) -> ValidatedStep:
    """The first of the validations with the most merit."""
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
            spent = _finite(entry.get(TOKENS)), _finite(entry.get(PROCESSOR))
            found[int(step)] = ValidatedStep(int(step), length, loss, alpha, *spent)
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
    return TrainingCurve(run, steps, logged_steps(entries), _settings(newest / CONFIG_FILE))


def logged_steps(history: Iterable[Mapping[str, object]]) -> tuple[LoggedStep, ...]:
    """The lines of a run's log in the order of their steps, without its validations."""
    found = {}
    for entry in history:
        loss, step = _finite(entry.get("loss")), _finite(entry.get("step"))
        if loss is not None and step is not None:
            rate, pace = _finite(entry.get("learning_rate")), _finite(entry.get(PACE))
            found[int(step)] = LoggedStep(int(step), loss, rate, pace)
    return tuple(found[step] for step in sorted(found))


def _settings(file: Path) -> dict[str, object]:
    """A run's settings by their names in `--set`; none where the checkpoint is without them, or of another release."""
    try:
        return read_config(file, [], {}).by_name() if file.is_file() else {}
    except DraftkitError:
        return {}


def _finite(value: object) -> float | None:
    return value if isinstance(value, float | int) and math.isfinite(value) else None


def _interval(interval: Interval) -> str:
    """The length, its interval, and on how many held-out documents."""
    bounds = "" if interval.bounds is None else " [{:.3f}, {:.3f}]".format(*interval.bounds)
    documents = (
        "" if interval.prompts is None else f" on {interval.prompts} document" + ("" if interval.prompts == 1 else "s")
    )
    return f"{interval.mean:.3f}{bounds}{documents}"
