"""Progress in a notebook: a bar for each run, with the acceptance length so far."""

from __future__ import annotations

import sys
from typing import Any

from draftkit.evaluate.measure import Progress


def notebook_progress() -> Progress:
    """Bars where a notebook's kernel runs this process; elsewhere nothing is shown."""
    return _bars() if "ipykernel" in sys.modules else lambda *_: None


def _bars() -> Progress:
    from tqdm.auto import tqdm

    bars: dict[str, Any] = {}

    def on_progress(name: str, done: int, total: int, length: float) -> None:
        if name not in bars:
            bars[name] = tqdm(total=total, desc=name)
        bar = bars[name]
        bar.n = done
        bar.set_postfix_str(f"acceptance length {length:.2f}")

    return on_progress
