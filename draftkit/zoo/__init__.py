"""The embedded models: small enough to ship, real enough to convert, serve and measure without a network."""

from __future__ import annotations

import difflib
from pathlib import Path

from draftkit.errors import SourceError

_MODELS = Path(__file__).parent / "models"
_OF_OTHERS = {"smollm2-eagle3"}  # of SmolLM2-135M-Instruct, which is too large to be embedded


def names() -> list[str]:
    """The names of the embedded models, sorted."""
    return sorted(folder.name for folder in _MODELS.glob("*/"))


def drafts() -> list[str]:
    """The names of the drafts of `zoo:target`, sorted."""
    return [name for name in names() if name != "target" and name not in _OF_OTHERS]


def path(name: str) -> Path:
    """The folder of the embedded model `name`.

    Raises `SourceError` when there is none of that name.
    """
    available = names()
    if name not in available:
        raise SourceError(
            f"the zoo has no model {name!r}{did_you_mean(name)}",
            where=f"zoo:{name}",
            expected="one of " + ", ".join(f"zoo:{known}" for known in available),
        )
    return _MODELS / name


def name_of(folder: Path) -> str | None:
    """The embedded model that lies in a folder, `zoo:NAME`; None for any other folder."""
    return f"zoo:{folder.name}" if folder.parent.resolve() == _MODELS.resolve() else None


def did_you_mean(name: str) -> str:
    """The end of a message about what is no model: the embedded one that its name resembles, if any does."""
    return "".join(f", did you mean zoo:{known}?" for known in difflib.get_close_matches(name, names(), n=1))


def prompts_path() -> Path:
    """The bundled prompts, JSONL in MT-Bench's schema: 8 categories of 10."""
    return Path(__file__).parent / "prompts.jsonl"
