"""How far a whole measurement is: one count over all of its cells, whatever runs in them."""

from __future__ import annotations

from math import nan

from draftkit.evaluate.measure import PromptProgress
from draftkit.results.settings import Settings


class WholeRun:
    """Tells `on_progress` what runs, how many answers there were, how many there will be, and the acceptance length.

    How many answers a cell takes shows while it runs, as its passes are repeated until the ratio of the paces is known:
    until then each is taken to need as many as those before it.
    """

    def __init__(self, on_progress: PromptProgress, cells: int):
        self._on_progress = on_progress
        self._cells = cells
        self._ended = 0
        self._before = 0  # answers of the cells that have ended
        self._answers = 0  # of the cell that runs
        self._expected = 0
        self._name, self._length = "getting ready", nan

    def begin(self, what: str, settings: Settings, answers: int) -> None:
        """A cell, or what is run without a draft before it, of so many answers in a pass."""
        at = f"batch {settings.concurrency}, T={settings.sampling.temperature:g}"
        context = f", context {settings.context}" if settings.context else ""
        self._name = f"cell {self._ended + 1} of {self._cells}: {what}, {at}{context}"
        self._expected = round(self._before / self._ended) if self._ended else answers
        self._length = nan
        self.say(0, nan)

    def say(self, done: int, length: float) -> None:
        """So many answers of the run that goes on, with this acceptance length so far; nan without a draft."""
        self._length = self._length if length != length else length
        now = self._answers + done
        expected = max(self._expected, now)
        total = self._before + expected + (self._cells - self._ended - 1) * expected
        self._on_progress(self._name, self._before + now, total, self._length)

    def add(self, answers: int) -> None:
        """A run of so many answers has ended."""
        self._answers += answers

    def end(self) -> None:
        """The cell has ended."""
        self._before, self._answers, self._ended = self._before + self._answers, 0, self._ended + 1
