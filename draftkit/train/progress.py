"""The log of a run, as lines on stderr; on a terminal the trainer's own bar stays above them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from math import isfinite
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from draftkit.train.gap import Gap

LENGTH = "eval_acceptance_length"
ALPHA = "eval_alpha"
LOSS = "eval_loss"
QUIET = ("epoch", "total_flos", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second",
         "grad_norm", "learning_rate", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second",
         LENGTH)  # fmt: skip
DETAIL = ("loss_", "agree_", "alpha_", "accepted_", "acceptance_length")  # the trackers have them all, a line the first
MEANING = {
    "loss_1": "that of the draft's first token",
    "accepted_1": "the share of rounds in which the draft's first token is accepted",
    "agree_1": "how often the draft's first token is the target's own choice",
    "alpha_1": "the chance that the target accepts the draft's first token",
    "alpha": "the chance that it accepts a draft token, on held-out answers",
    "oov": "what the target expects outside the draft vocabulary",
}


class LogLines(ProgressCallback):
    """One short line for each entry of the log, under a bar where stderr is a terminal.

    `tokens`: those of a step, on all processes together. What a name means is said where it comes up first.
    """

    def __init__(self, tokens: float):
        super().__init__()
        self._tokens = tokens
        self._explained: set[str] = set()
        self._began = (0.0, 0)  # when, and at which step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        super().on_train_begin(args, state, control, **rest)
        self._began = time.monotonic(), state.global_step
        if self.training_bar is not None:
            self.training_bar.disable = not sys.stderr.isatty()

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
        elif "loss" in logs:
            shown += self._speed(state)
        if not shown:
            return
        tqdm.write(f"step {state.global_step}/{state.max_steps}: {', '.join(shown)}", file=sys.stderr)
        logged = {name.removeprefix("eval_") for name in logs} - self._explained
        self._explained |= logged
        for name in MEANING:
            if name in logged:
                tqdm.write(f"  {name}: {MEANING[name]}", file=sys.stderr)
        sys.stderr.flush()

    def _speed(self, state: TrainerState) -> list[str]:
        """Tokens a second, and how long the rest takes at that pace; nothing before the first step."""
        seconds, steps = time.monotonic() - self._began[0], state.global_step - self._began[1]
        if steps <= 0 or seconds <= 0:
            return []
        left = timedelta(seconds=round((state.max_steps - state.global_step) * seconds / steps))
        return [f"{self._tokens * steps / seconds:,.0f} tokens/s", f"{left} left"]


def validated(found: Mapping[str, Any]) -> str:
    """The acceptance length of a validation, its interval, and on how many documents."""
    low, high = found.get(f"{LENGTH}_low"), found.get(f"{LENGTH}_high")
    bounds = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    documents = found.get(f"{LENGTH}_documents")
    mean = found[LENGTH]
    text = f"{mean:.3f}{bounds}" if isfinite(mean) else "–"
    return text if documents is None else f"{text} on {documents:.0f} document" + ("" if documents == 1 else "s")


def show_gap(gap: Gap) -> None:
    """Say what explains that serving accepts otherwise than training says."""
    for cause in gap.causes:
        print(f"gap between training and serving, {cause.name}: {cause.message}; {cause.fix}", file=sys.stderr)
    if not gap.closed and not gap.causes:
        lengths = f"{gap.walked.mean:.3f} and {gap.decoded.mean:.3f}"
        print(f"gap between training and serving: acceptance lengths {lengths}, of no known cause", file=sys.stderr)


def _is_shown(name: str) -> bool:
    is_detail = name.removeprefix("eval_").startswith(DETAIL) and not name.endswith("_1")
    return not is_detail and name not in QUIET


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
