"""Where a converted draft came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["stated", "from tensors", "from target", "format default", "overridden"]


@dataclass(frozen=True, kw_only=True)
class FactOrigin:
    """One fact of the spec as a conversion found it: its value as text, where it was taken from, and a remark."""

    name: str
    value: str
    origin: Origin
    note: str


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file that was read: name in its folder, bytes, SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Source and target of a conversion; revisions are Hub commits, None for local folders."""

    source: str
    source_revision: str | None
    format: str
    files: tuple[InputFile, ...]
    target: str | None
    target_revision: str | None
    facts: tuple[FactOrigin, ...]
    draftkit_version: str
