"""Random cases of every kind of input that draftkit reads, and what must hold of each.

`mutate` changes sound inputs, `judge` says what is a failure, and each other module has some `KINDS`: name → a class
that makes its sound inputs in a folder once, and runs one case from random numbers. `scripts/fuzz.py` runs many.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzzing import checkpoints, texts, transfers
from fuzzing.judge import Kind

KINDS: dict[str, Callable[[Path], Kind]] = checkpoints.KINDS | texts.KINDS | transfers.KINDS
