"""The log of a run, as lines on stderr; on a terminal the trainer's own bar stays above them."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from draftkit.train.gap import Gap

QUIET = ("epoch", "train_runtime", "train_samples_per_second", "train_steps_per_second")
DETAIL = ("loss_", "agree_", "alpha_")  # per step: the trackers have them all, a line only the first


class LogLines(ProgressCallback):
    """One short line for each entry of the log, under a bar where stderr is a terminal."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        super().on_train_begin(args, state, control, **rest)
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
        tqdm.write(f"step {state.global_step}/{state.max_steps}: {', '.join(shown)}", file=sys.stderr)
        sys.stderr.flush()


def show_gap(gap: Gap) -> None:
    """Say what explains that serving accepts otherwise than training says."""
    for cause in gap.causes:
        print(f"gap between training and serving, {cause.name}: {cause.message}; {cause.fix}", file=sys.stderr)
    if not gap.closed and not gap.causes:
        lengths = f"{gap.walked.mean:.3f} and {gap.decoded.mean:.3f}"
        print(f"gap between training and serving: acceptance lengths {lengths}, of no known cause", file=sys.stderr)


def _is_shown(name: str) -> bool:
    is_detail = name.startswith(DETAIL) and not name.endswith("_1")
    return not is_detail and name not in QUIET


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
