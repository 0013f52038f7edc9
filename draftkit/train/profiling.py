"""Where the time of training steps goes: a table by their parts, and a trace that Perfetto opens."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

TRACE_FILE = "trace.json.gz"
PARTS = {
    "data": "until the next rows are there",
    "target": "its states, computed or read",
    "draft": "the forward pass of the draft",
    "loss": "logits, losses and their gradients",
    "backward": "the backward pass of the draft",
    "optimizer": "the step of the optimizer",
    "rest": "all else, as clipping and the log",
}
_running: list[StepProfile] = []  # the profile that is being taken, if one is


@contextmanager
def part(name: str) -> Iterator[None]:
    """While the body runs, time counts for this of `PARTS`, and not for the part within which it lies."""
    profile = _running[0] if _running else None
    if profile is None:
        yield
        return
    profile.enter(name)
    try:
        with record_function(name):
            yield
    finally:
        profile.leave()


class StepProfile(TrainerCallback):
    """Profiles `steps` steps of a run after the first one; then prints where their time went, and writes `TRACE_FILE`
    into `out`. A GPU is waited for where a part begins and ends."""

    def __init__(self, steps: int, out: Path):
        self._steps, self._out = steps, out
        self._done = 0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._within: list[str] = []
        self._since = 0.0
        self._trace: torch.profiler.profile | None = None

    def enter(self, name: str) -> None:
        """A part begins."""
        self._count()
        self._within.append(name)

    def leave(self) -> None:
        """The part that began last ends."""
        self._count()
        self._within.pop()

    def _count(self) -> None:
        """Add the time since this was last called to the part that it was spent in."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._seconds[self._within[-1] if self._within else "rest"] += now - self._since
        self._since = now

    def on_step_end(self, *_: object, **__: object) -> None:
        if self._trace is None:
            self._begin()
        elif _running:
            self._done += 1
            if self._done == self._steps:
                self._end()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        if _running:
            self.enter("optimizer")

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        if _running:
            self.leave()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if _running:
            self._end()
        elif not self._done:
            print(f"nothing was profiled: the run ended after step {state.global_step}", file=sys.stderr)

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()
        self._since = time.perf_counter()
        _running.append(self)

    def _end(self) -> None:
        self._count()
        _running.remove(self)
        assert self._trace is not None
        self._trace.stop()
        if not self._done:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        self._trace.export_chrome_trace(str(self._out / TRACE_FILE))
        print("\n".join(self._lines()), file=sys.stderr)

    def _lines(self) -> Iterator[str]:
        """The table: milliseconds a step of each part, and its share."""
        total = sum(self._seconds.values())
        yield f"where {self._done} steps went, {1e3 * total / self._done:,.1f} ms each:"
        for name, meaning in PARTS.items():
            seconds = self._seconds[name]
            yield f"  {name:9} {1e3 * seconds / self._done:10,.1f} ms  {seconds / total:4.0%}  {meaning}"
        yield f"trace: {self._out / TRACE_FILE}, which https://ui.perfetto.dev opens"
