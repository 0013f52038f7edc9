"""A training by draftkit whose steps are timed; run by scripts/bench/train.py in a process of its own.

Reads a JSON job from standard input: `settings` of the run, as a configuration file has them; `threads`; `result`, the
file that gets the loss and the time of every step, and the peak memory.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # the setting above must be in the environment first
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftkit.train.config import read_config
from draftkit.train.run import train_draft
from scripts.bench._peak import peak_bytes


class Steps(TrainerCallback):
    """Keeps the loss of every step, and the time since the step before."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []
        self._ended = (0.0, 0.0)
        self._took = (0.0, 0.0)

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._ended = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        (wall, cpu), self._ended = self._ended, (time.perf_counter(), time.process_time())
        self._took = self._ended[0] - wall, self._ended[1] - cpu

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        if "loss" in logs:
            seconds, cpu_seconds = self._took
            self.found.append({"loss": logs["loss"], "seconds": seconds, "cpu_seconds": cpu_seconds})


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    steps = Steps()
    trained = train_draft(read_config(None, [], job["settings"]), callbacks=(steps,))
    if trained.draft is None:
        sys.exit("stopped before its end")
    Path(job["result"]).write_text(json.dumps({"steps": steps.found, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
