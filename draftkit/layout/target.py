"""The facts of a target that conversions need, read from its `config.json` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import TargetError
from draftkit.io.jsonfile import read_object


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Sizes of a target and where it came from; `revision` is the Hub commit, None for a local folder.

    `tied`: its head is its embedding table. `architectures`: the class names of its config.
    """

    name: str
    revision: str | None
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int | None
    tied: bool
    architectures: tuple[str, ...]

    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """The layers (2, N//2, N−3) in convention S that EAGLE-3's authors capture (SafeAILab/EAGLE, `cnets.py`)."""
        n = self.num_hidden_layers
        return (2, n // 2, n - 3)


def read_target_facts(folder: Path, name: str, revision: str | None) -> TargetFacts:
    """Read a target's sizes. Raises `SourceError`/`FormatError` for a bad file, `TargetError` for missing keys."""
    config = read_object(folder / "config.json")
    text = config.get("text_config", config)  # multi-modal targets nest their language model
    if not isinstance(text, dict):
        raise TargetError("text_config is not an object", where=folder / "config.json")
    sizes = {}
    for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
        value = text.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise TargetError(
                f"the target's config has no usable {key} (found {value!r})",
                where=folder / "config.json",
                hint="pass the folder or Hub id of the target language model itself",
            )
        sizes[key] = value
    architectures, length = config.get("architectures"), text.get("max_position_embeddings")
    return TargetFacts(
        name=name,
        revision=revision,
        max_position_embeddings=length if isinstance(length, int) else None,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        **sizes,
    )
