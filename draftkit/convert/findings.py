"""Known defects of published drafts, as data: how each is recognised, what fixes it, and who reported it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from draftkit.layout.folder import Draft

if TYPE_CHECKING:
    from draftkit.convert.api import Reading


@dataclass(frozen=True)
class Finding:
    """A defect in a checkpoint. `fix`: the override or command that repairs it. `source`: where it is documented."""

    name: str
    severity: Literal["error", "warning", "note"]
    message: str
    fix: str
    source: str


def findings_of_reading(reading: Reading) -> list[Finding]:
    """The defects of a foreign checkpoint."""
    return []


def findings_of_draft(draft: Draft) -> list[Finding]:
    """The defects of a unified draft."""
    return []
