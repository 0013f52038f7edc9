"""What the engine asks of a drafter.

B sequences, T prompt tokens, J ≥ 1 committed tokens, K draft tokens, F feature width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from draftkit.runtime.cache import SlotCache
from draftkit.runtime.growth import Frontier
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.targets.states import AuxLayers


class Committed(NamedTuple):
    """Tokens that the target has emitted since the drafter last proposed, for each of B sequences.

    `slots` int64 [B], ascending, then −1 in rows without a sequence. `tokens` int64 [B, J], of which the first `counts`
    int64 [B] ≥ 1 are real; the rest is padding that a drafter may compute on and must not depend on. `start` int64 [B]:
    the position of `tokens[:, 0]`. `features` [B, J, F]: `features[:, j]` are the target's hidden states at position
    start − 1 + j, from which it emitted `tokens[:, j]`; None when the drafter captures nothing. `length`: a bound above
    every position that drafting K tokens can reach, that of the last draft token included. `cache`: the target's, for
    drafters that attend to its keys and values; they hold those of every position before the newest token's.
    """

    slots: Tensor
    tokens: Tensor
    counts: Tensor
    start: Tensor
    features: Tensor | None
    length: int
    cache: SlotCache | None = None


class NewSequence(NamedTuple):
    """A prompt that the target has taken in, or a piece of one, to be continued in `slot`: `tokens` int64 [T] from
    position `begin` on, and the target's `features` [T, F] at the same positions, None when the drafter captures
    nothing. `length`: that of the whole prompt, None where it ends with these tokens.

    Pieces of a prompt come in order, and each has again the `overlap` positions of the drafter that lie before it.
    """

    slot: int
    tokens: Tensor
    features: Tensor | None
    begin: int = 0
    length: int | None = None


class Proposal(NamedTuple):
    """`tokens` int64 [B, K] in the target's vocabulary, of which the first `lengths` int64 [B] are drafts.

    The rest is padding: any token of the vocabulary. `lengths` None: all K are drafts, in every row. `confidences`
    float [B, K]: the chances of acceptance as the draft estimates them; None where it does not. That of a token must
    not depend on the token itself: leaving out what was drawn because of what it is would bias the output.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    confidences: Tensor | None = None


class Draw(Protocol):
    """Draws the draft tokens of a round, and keeps what they were drawn from."""

    def __call__(self, step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """The token int64 [B] of draft position `step` (0 … K−1), in the target's vocabulary.

        `logits` [B, V]; or [B, Vd] over a draft vocabulary whose target ids are `ids` int64 [Vd].
        """


class Grow(Protocol):
    """Takes a draft's logits of one level of a tree, and says which nodes are expanded next (`growth.Growth`)."""

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> Frontier:
        """`logits` [B, W, V] for the W nodes of the frontier, first the root alone; [B, 1, V] where they are the same
        for all. `ids` as in `Draw`."""

    def children(self, values: Tensor, tokens: Tensor) -> Frontier:
        """The same of a draft that knows its tokens int64 [B, W, c] and their log-probabilities [B, W, c], most likely
        first; −∞ for none."""


class Drafter(Protocol):
    """Proposes K tokens a round for every active slot.

    `slot_bytes`: what it keeps of a slot, as `slot_bytes` of its family's file tells it; None where it was not made
    from a draft. `overlap`: how many positions before a piece of a prompt it needs again.
    """

    slot_bytes: SlotBytes | None

    @property
    def overlap(self) -> int:
        """How many positions before a piece of a prompt it is given again."""

    @property
    def aux_layers(self) -> AuxLayers | None:
        """The target's hidden states that it reads, None for none."""

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that it can draft in a round, None for no limit."""

    @property
    def max_positions(self) -> int | None:
        """The tokens of a sequence, drafts included, that its positions are made for; None for any number."""

    @property
    def positions_end(self) -> bool:
        """Whether it has no positions beyond those, as where they are a learned table."""

    @property
    def module(self) -> nn.Module | None:
        """The module that computes the drafter's logits; None where nothing is learned."""

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        """Make that room in every slot; everything known about earlier sequences is gone."""

    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        """Take in new sequences, or further pieces of them, at least one. A drafter that captures nothing is given
        whole prompts."""

    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        """Take in the committed tokens and draft up to `k` ≥ 1 more, each by `draw`."""


@runtime_checkable
class Expands(Protocol):
    """A drafter that can draft a tree."""

    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        """Take in the committed tokens, as `propose` does, and have a tree of `depth` ≥ 1 levels grown: `grow` is told
        the logits of each level, and answers with the nodes that the next is for."""


def expand_marginals(drafter: Drafter, committed: Committed, depth: int, grow: Grow) -> None:
    """`Expands.expand` of a drafter whose logits are the same whatever was drawn before: those of a proposal."""

    def draw(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        grow(logits[:, None], ids)
        return committed.counts * 0  # which nothing reads

    drafter.propose(committed, depth, draw)
