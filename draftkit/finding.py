"""What is wrong or doubtful, wherever it is found: with a checkpoint, a pair, data, a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note", "ok")  # the worst first


@dataclass(frozen=True)
class Finding:
    """One thing that was found; `ok` says what was looked at and is as it should be.

    `where`: the file, tensor or sample that shows it. `cost`: what happens to whoever ignores it. `fix`: the option
    or command that mends it. `source`: where it is documented. `extent`: how far it goes, more is worse, where that can
    be said: of several of a kind the worst is shown.
    """

    name: str
    severity: Severity
    message: str
    where: str = ""
    cost: str = ""
    fix: str = ""
    source: str = ""
    extent: float | None = None
