"""Progress in a notebook: one bar over all measurements, with what runs and its acceptance length so far."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isnan

from draftkit.evaluate.measure import PromptProgress


def notebook_progress() -> PromptProgress:
    """Bars where a notebook's kernel runs this process; elsewhere nothing is shown."""
    return _bars() if "ipykernel" in sys.modules else lambda *_: None


def notebook_trials() -> Callable[[str, int, int], None]:
    """One bar that says what is measured now, where a notebook's kernel runs this process."""
    if "ipykernel" not in sys.modules:
        return lambda *_: None
    from tqdm.auto import tqdm

    bar = tqdm()

    def on_progress(name: str, done: int, total: int) -> None:
        bar.total, bar.n = total, done
        bar.set_postfix_str(name)

    return on_progress


def _bars() -> PromptProgress:
    from tqdm.auto import tqdm

    bar = tqdm()

    def on_progress(name: str, done: int, total: int, length: float) -> None:
        bar.total, bar.n = total, done
        bar.set_description(name, refresh=False)
        bar.set_postfix_str("" if isnan(length) else f"acceptance length {length:.2f}")

    return on_progress
