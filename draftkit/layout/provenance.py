"""Where a converted draft came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from draftkit.io.shown import Rows

OriginName = Literal["stated", "from tensors", "from target", "format default", "overridden"]
DEFINITION = "what the format is"  # the remark on a format's default that no file of the format can change
ORIGINS: tuple[OriginName, ...] = ("format default", "from target", "from tensors", "overridden", "stated")
# Facts that trainers have differently, that published files often leave out, and that no engine can miss by a crash:
# a wrong one costs acceptance alone. The most doubtful first: trainers that ignore `rope_theta`, speculators' norm
# before the residual, EAGLE-3.1's feedback, layer ids counted from 0 or from 1; then what block and other drafters
# leave open.
DOUBTED = (
    "rope_theta", "norm_before_residual", "feedback", "aux_layer_ids", "last_state", "slots", "mask_token_id",
    "mask_state", "causal_layers", "window_rule", "concatenation", "scale_input", "vocabulary",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FactOrigin:
    """One fact of the spec as a conversion found it: its value as text, where it was taken from, and a remark.

    `key`: the config key that states it, one inside an object by its path, `outer.key`, where several may.
    """

    name: str
    value: str
    origin: OriginName
    note: str
    key: str = ""

    @property
    def assumed(self) -> bool:
        """Whether another file of the format could have said otherwise, and this one says nothing."""
        return self.origin == "format default" and self.note != DEFINITION

    @property
    def doubtful(self) -> bool:
        """Whether it was assumed, and a wrong value would cost acceptance without a word from anybody."""
        return self.name in DOUBTED and (self.assumed or self.origin == "from target")

    @property
    def certainty(self) -> tuple[int, int]:
        """The key by which facts are sorted: the most doubtful first, those that hold by the format's definition
        last."""
        if self.doubtful:
            return 0, DOUBTED.index(self.name)
        if self.assumed:
            return 1, 0
        return (len(ORIGINS) + 1 if self.note == DEFINITION else ORIGINS.index(self.origin) + 1), 0


def facts_shown(facts: Sequence[FactOrigin]) -> Rows:
    """Facts as a table, the most doubtful first."""
    ordered = sorted(facts, key=lambda fact: fact.certainty)
    return Rows(("fact", "value", "origin", "note"), [(f.name, f.value, f.origin, f.note) for f in ordered])


TRAINED_FACT = "trained_tokens"  # of the longest sample that a draft was trained on


def trained_tokens(facts: Iterable[FactOrigin]) -> int | None:
    """The tokens of the longest sample that a draft was trained on, None where nobody has said."""
    return next((int(fact.value) for fact in facts if fact.name == TRAINED_FACT), None)


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file that was read: name in its folder, bytes, and the SHA-256 of its content where it was taken.

    `hub_sha256` is what the Hub says of the file, where it does. Where both are there, they are the same; alone it is
    the Hub's word, and the bytes that were read may have been others.
    """

    name: str
    size: int
    sha256: str | None
    hub_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Source and target of a conversion; revisions are Hub commits, None for local folders.

    `dropped_config`: the keys of the source's config that have no place in the spec, with their values; a key inside an
    object by its path, `outer.key`.
    `losses`: what the source had and this draft has not.
    """

    source: str
    source_revision: str | None
    format: str
    files: tuple[InputFile, ...]
    target: str | None
    target_revision: str | None
    facts: tuple[FactOrigin, ...]
    dropped_config: dict[str, object]
    losses: tuple[str, ...]
    draftkit_version: str
