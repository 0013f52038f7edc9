"""The embedded models: small enough to ship, real enough to convert, serve and measure without a network."""

from __future__ import annotations

import difflib
from pathlib import Path

from draftkit.errors import SourceError

_MODELS = Path(__file__).parent / "models"


def names() -> list[str]:
    """The embedded models, sorted."""
    return sorted(folder.name for folder in _MODELS.glob("*/"))


def path(name: str) -> Path:
    """The folder of the embedded model `name`.

    Raises `SourceError` when there is none of that name.
    """
    available = names()
    if name not in available:
        close = difflib.get_close_matches(name, available, n=1)
        raise SourceError(
            f"the zoo has no model {name!r}" + "".join(f", did you mean zoo:{known}?" for known in close),
            where=f"zoo:{name}",
            expected="one of " + ", ".join(f"zoo:{known}" for known in available),
        )
    return _MODELS / name


def prompts_path() -> Path:
    """The bundled prompts, JSONL in MT-Bench's schema: 8 categories of 10."""
    return Path(__file__).parent / "prompts.jsonl"
