"""What every family of drafts says of itself, so that no other room has to know which families there are."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from draftkit.errors import LayoutError
from draftkit.io.settings import setting
from draftkit.layout.positions import PositionLimit
from draftkit.layout.schema import TensorSchema
from draftkit.layout.target import default_aux_layer_ids

MAX_REPEATS = 1_000  # layers or heads; a draft's schema lists the tensors of every one
MAX_SIZE = 1 << 31
AUTOREGRESSIVE_TOKENS, PARALLEL_TOKENS = 3, 8  # a round, to start from

AnyArchitecture = TypeVar("AnyArchitecture", bound="Architecture")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelDrafting:
    """Drafting all K tokens in one pass: rows after the first hold the mask token."""

    mask_token_id: int = setting("The token in the rows after the first.")
    mask_state: bool = setting("Whether their hidden input is a learned vector, `mask_hidden` of the checkpoint.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, rotate-half layout."""

    base: float = setting("The effective base, with which the weights were trained.")
    declared_base: float | None = setting(
        "The base that the source's config states, which engines believe though several trainers ignore it; "
        "none where it states none."
    )
    scaling: dict[str, object] | None = setting(
        "The other rope parameters under the names of transformers (rope_type, factor, …)."
    )
    max_position_embeddings: int = setting(
        "The longest sequence that the position embedding is made for.", unit="tokens"
    )


class Architecture(ABC):
    """The facts of a draft of one family: a frozen dataclass in `draftkit/layout/families/NAME.py`.

    Files of the family carry the same NAME in every room. A property below is what another room asks; a family
    overrides those whose usual answer is not its own.
    """

    vocab_size: int  # of the target; a draft that is named rather than read fits any

    # Facts that some families have, under one name wherever they do. Those state them as `field()`, without a default:
    # the target's layers that are read, in convention S, None for its last state; and all draft tokens in one pass,
    # None for one by one, or heads of their own.
    aux_layer_ids: tuple[int, ...] | None = None
    parallel: ParallelDrafting | None = None

    SERVED_AS: ClassVar[Mapping[str, Mapping[str, str]]] = {}  # engine → method → the name by which it knows the draft
    NEEDS: ClassVar[tuple[Capability, ...]] = ()  # what drafts of the family may ask of an engine, in order
    own_model: ClassVar[bool] = False  # a language model of its own, with a tokenizer, not a part of its target
    has_checkpoint: ClassVar[bool] = True  # whether there are weights; else users name the draft, as `ngram:2-4`
    closed: ClassVar[tuple[str, ...]] = ()  # fields of which no part can be set: what they say is its target's
    whole_head: ClassVar[str | None] = None  # why its output layer cannot have fewer rows; None where it can

    @classmethod
    def named(cls, source: str) -> Self | None:
        """The draft that a user's words name where it has no checkpoint; None for other words, and where it has one.

        Raises `DraftkitError` for a name of this family that says what it cannot.
        """
        del source
        return None

    @property
    @abstractmethod
    def method(self) -> str:
        """The published name of this combination of facts: eagle, eagle3, p-eagle, draft-model, pard, ..."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the draft is, in one sentence without its end."""

    @abstractmethod
    def tensors(self) -> dict[str, TensorSchema]:
        """Name → schema of every tensor that a draft with these facts has."""

    @abstractmethod
    def engine_config(self) -> dict[str, object]:
        """What engines read in `config.json`. Optional keys are written out: engines disagree about their defaults."""

    @property
    def family(self) -> str:
        """The NAME of the family's files."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def rope(self) -> Rope | None:
        """The rotary positions of the draft, where the layout holds them as facts."""
        return None

    def needs(self, layout: str) -> Iterator[Capability]:
        """What this draft asks of an engine that loads it from a folder in `layout`, as `--to` names it."""
        return (row for row in self.NEEDS if row.layout in (None, layout) and row.needed(self))

    @property
    def engine_settings(self) -> Mapping[str, Mapping[str, object]]:
        """Engine → what it has to be told of the draft besides the folder, the method and the tokens a round."""
        return {}

    @property
    def shares_head(self) -> bool:
        """Whether the output layer is the target's."""
        return getattr(self, "lm_head", None) == "target"

    @property
    def tokens_in_turn(self) -> int:
        """The draft tokens of one turn of its modules: engines draft fewer, or a multiple of them."""
        return 1

    def usual_layers(self, num_target_layers: int) -> tuple[tuple[int, ...], ...]:
        """The captured layers, in convention S, that trainers of such drafts take where nobody chooses others."""
        return (default_aux_layer_ids(num_target_layers),)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None for all tokens; empty where the layout does not hold them as facts."""
        return ()

    @property
    def sink_tokens(self) -> int:
        """The first tokens of a sequence that layers with a window see besides."""
        return 0

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether the draft proposes only some of the target's tokens, through a map of its ids."""
        return False

    @property
    def draft_tokens(self) -> int | None:
        """How many tokens a round its weights are made for; None where any number is as good."""
        return None

    @property
    def usual_tokens(self) -> int:
        """The draft tokens a round to start from, before the best number is measured."""
        return self.draft_tokens or (AUTOREGRESSIVE_TOKENS if self.parallel is None else PARALLEL_TOKENS)

    @property
    def most_draft_tokens(self) -> int | None:
        """How many tokens a round it can draft at most; None for any number."""
        return self.draft_tokens

    @property
    def not_run(self) -> str | None:
        """What draftkit's own runtime does not run, though it runs others of the family; None where it does."""
        return None

    @property
    def fixed_length(self) -> bool:
        """Whether drafting fewer than `draft_tokens` changes each: rows of one pass that see the later ones."""
        return False

    def passes(self, k: int) -> float:
        """How often a round of `k` drafts reads the draft's weights: once for each, or for all in one pass."""
        return 1 if self.parallel is not None else k

    @property
    def states_read(self) -> int:
        """How many of the target's hidden states it reads at a position."""
        return 1

    @property
    def max_positions(self) -> PositionLimit | None:
        """Where vLLM drafts no more, and in which of its model runners; None for heads without positions, or with
        those of their target."""
        return None

    @property
    def side_files(self) -> Mapping[str, Mapping[str, str]]:
        """Files beside the weights in which engines expect a copy of some: file → its key → the tensor's name."""
        return {}

    def card_facts(self) -> dict[str, str]:
        """Rows of a model card that only this family has."""
        return {}

    def limitations(self) -> list[str]:
        """Sentences about this draft that its model card has to carry as warnings."""
        return []

    def stored_in(self, dtype: str) -> Self:
        """These facts for weights in `dtype`, by transformers' name, as `bfloat16`."""
        del dtype
        return self

    def without_paths(self) -> Self:
        """These facts without what says where the draft lies: the same draft lies elsewhere once it is published."""
        return self

    def expect(self, kind: type[AnyArchitecture]) -> AnyArchitecture:
        """These facts as those of one family. Raises `LayoutError` for a draft of another."""
        if not isinstance(self, kind):
            raise LayoutError(f"this is a {self.method} draft", expected=f"one of the family {kind.__name__}")
        return self


def check_range(record: object, most: int, *names: str) -> None:
    """Raise `LayoutError` unless the fields named are from 1 to `most`."""
    for name in names:
        value = getattr(record, name)
        if not 1 <= value <= most:
            raise LayoutError(f"{name} is {value}", expected=f"1 to {most:,}")


def check_window(window: int | None, sink_tokens: int) -> None:
    """Raise `LayoutError` for a window of no tokens, and for tokens seen besides a window where there is none."""
    if window is not None and window < 1:
        raise LayoutError(f"sliding_window is {window}", expected="at least 1 token, a row's own, or none for all")
    if sink_tokens < 0 or (sink_tokens and window is None):
        raise LayoutError(
            f"sink_tokens is {sink_tokens} with sliding_window {'none' if window is None else window}",
            expected="0 or more, with a window besides which they are seen",
        )


@dataclass(frozen=True)
class Capability:
    """One row of a family's `NEEDS`.

    - `name`: by which the tables of releases (`engines/NAME/releases.py`) say whether an engine has it. What takes two
      facts at once is a capability of its own.
    - `what`: the thing that the draft has, in words after "runs".
    - `without`: what an engine without the capability does instead, beginning with the verb: the engine puts its own
      name before it. `{draft.FACT}` stands for a fact of the draft.
    - `needed`: whether a draft of the family needs it.
    - `layout`: the only layout, as `--to` names it, whose folders ask for it; None for all.
    """

    name: str
    what: str
    without: str
    needed: Callable[[Any], bool]
    layout: str | None = None


def narrowing_window() -> Any:
    """The fact of a draft whose layers are a transformers model's that they are given a window."""
    return setting(
        "The tokens that its layers attend to, a row's own among them, where they know no narrower window; none for "
        "what they know.", None, later=True, unit="tokens",
    )  # fmt: skip


def narrowing_sinks() -> Any:
    """The fact which goes with `narrowing_window`: the first tokens are seen besides."""
    said = "The first tokens of a sequence to which such layers attend besides."
    return setting(said, 0, later=True, unit="tokens")


SINK_TOKENS = Capability(
    "sink-tokens", "first tokens besides a window", "shows its draft layers no first tokens besides a window",
    lambda draft: draft.sink_tokens > 0,
)  # fmt: skip
ACTIVATION = Capability(
    "draft-activation", "another activation than silu", "has silu in its draft layers, not {draft.decoder.hidden_act}",
    lambda draft: draft.decoder.hidden_act != "silu",
)  # fmt: skip
