"""Progress in a notebook: a bar for each run, with the acceptance length so far, or one over all measurements."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from draftkit.evaluate.measure import PromptProgress


def notebook_progress() -> PromptProgress:
    """Bars where a notebook's kernel runs this process; elsewhere nothing is shown."""
    return _bars() if "ipykernel" in sys.modules else lambda *_: None


def notebook_trials() -> Callable[[str, int, int], None]:
    """One bar that says what is measured now, likewise."""
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

    bars: dict[str, Any] = {}

    def on_progress(name: str, done: int, total: int, length: float) -> None:
        if name not in bars:
            bars[name] = tqdm(total=total, desc=name)
        bar = bars[name]
        bar.n = done
        bar.set_postfix_str(f"acceptance length {length:.2f}")

    return on_progress
