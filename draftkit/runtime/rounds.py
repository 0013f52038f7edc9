"""One round on the device: propose, score, verify, commit.

Nothing here looks at a value on the host, so that a round can be captured in a CUDA graph; what the host needs to know
comes back as one tensor. S slots, B sequences, K draft tokens, F feature width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.errors import DraftkitError
from draftkit.requests import Verification
from draftkit.runtime.batch import Batch
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, Proposal
from draftkit.runtime.drawing import RoundDraw
from draftkit.runtime.emitted import Drafted, Emitted, Verify
from draftkit.runtime.ops.row_peaks import best_token
from draftkit.runtime.verification import verify_block, verify_coupled, verify_greedy, verify_rejection
from draftkit.targets.finite import has_finite_peak
from draftkit.targets.target import Target

Broken = Literal["target", "draft"]  # whose logits hold NaN or infinity
BROKEN: tuple[Broken | None, ...] = (None, "target", "draft")
MODES: dict[str, Verify] = {"rejection": verify_rejection, "coupled": verify_coupled, "block": verify_block}


def verification(mode: Verification, *, all_greedy: bool) -> Verify:
    """The function that decides a round; at temperature 0 all modes come to the same."""
    return verify_greedy if all_greedy else MODES[mode]


@dataclass
class SlotState:
    """`position` int64 [S+1] of each slot's anchor, how far its rotary position is from that, `shift` int64 [S+1], and
    its committed tokens.

    `tokens` int64 [S+1, K+1], `counts` int64 [S+1] and `features` [S+1, K+1, F] are those of `Committed`; the anchor is
    the last token. The row beyond the slots, which index −1 selects, belongs to the rows of a batch without a sequence.
    """

    position: Tensor
    tokens: Tensor
    counts: Tensor
    features: Tensor
    shift: Tensor

    @classmethod
    def empty(cls, num_slots: int, k: int, feature_size: int, device: torch.device, dtype: torch.dtype) -> SlotState:
        zeros = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        return cls(
            position=zeros,
            tokens=zeros[:, None].repeat(1, k + 1),
            counts=zeros + 1,
            features=torch.zeros(num_slots + 1, k + 1, feature_size, device=device, dtype=dtype),
            shift=torch.zeros_like(zeros),
        )

    def admit(self, slot: int, length: int, first: Tensor, feature: Tensor | None, shift: Tensor | None = None) -> None:
        """Start a sequence: a prompt of `length` tokens, the token after it, the feature [F] it was emitted from, and
        the `shift` of `TargetOutput`."""
        self.position[slot] = length
        self.shift[slot] = 0 if shift is None else shift[0]
        self.tokens[slot, 0] = first
        self.counts[slot] = 1
        if feature is not None:
            self.features[slot, 0] = feature

    def commit(self, slots: Tensor, emitted: Emitted) -> None:
        """Advance `slots` int64 [B] by what the target has emitted."""
        unused = self.tokens.shape[1] - emitted.tokens.shape[1]
        self.tokens[slots] = pad(emitted.tokens, (0, unused))
        self.counts[slots] = emitted.counts.clamp(min=1)  # a row without a sequence emits nothing, and is read again
        self.position[slots] += emitted.counts


class Outcome(NamedTuple):
    """What became of a sequence in a round: the draft tokens, what the target emitted, the expected acceptance of each
    draft, and what the draft said of it (`Round`, as are `parents`). Where something is `broken`, the rest means
    nothing."""

    proposal: tuple[int, ...]
    emitted: list[int]
    expected: tuple[float, ...]
    broken: Broken | None
    confidences: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()


class _Watched:
    """A `Draw`, at temperature 0 where it is given none, that notes which rows of a round had usable logits; with
    `estimates`, also how probable they make each token."""

    def __init__(self, draw: Draw | None, *, estimates: bool):
        self._draw = draw
        self._finite: list[Tensor] = []
        self._estimates = estimates
        self.probabilities: list[Tensor] = []  # of each step, float32 [B]

    def __call__(self, step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        if self._draw is None:
            token, finite = best_token(logits, ids)
        else:
            token, finite = self._draw(step, logits, ids), has_finite_peak(logits)
        self._finite.append(finite)
        if self._estimates:
            own = token[:, None] if ids is None else (ids == token[:, None]).long().argmax(1, keepdim=True)
            self.probabilities.append(logits.float().softmax(-1).gather(1, own)[:, 0])
        return token

    def finite(self, slots: Tensor) -> Tensor:
        """bool [B]: the rows `slots` [B] in which all logits so far were usable."""
        return torch.stack(self._finite).all(0) if self._finite else torch.ones_like(slots, dtype=torch.bool)


class Rounds:
    """Rounds over the sequences of a target's `cache` and of a drafter that has made room for as many.

    `min_confidence`: of `DraftSampling`. `estimates`: keep what the draft says of its tokens. `trims`: the target is
    given no more drafts than the longest proposal has, which the host is asked for in the middle of a round.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: SlotCache,
        state: SlotState,
        mode: Verification,
        min_confidence: float = 0.0,
        estimates: bool = False,
        trims: bool = False,
    ):
        self.target = target
        self.drafter = drafter
        self.cache = cache
        self.state = state
        self.mode: Verification = mode
        self.min_confidence = min_confidence
        self.estimates = estimates
        self.trims = trims and bool(min_confidence)

    def rows(self, slots: Sequence[int]) -> list[int]:
        """The slots of a batch's rows for sequences in `slots`, ascending; −1 in a row without a sequence."""
        return list(slots)

    @torch.inference_mode()
    def run(self, batch: Batch, k: int, length: int, *, drafting: bool = True) -> Tensor:
        """A round of up to `k` drafts per sequence; `length` bounds the positions it reaches.

        Without `drafting` the drafter is left alone, and token 0 stands in the place of every draft, as in vLLM.
        Returns what `outcomes` reads: float64 [B, 3K+4], with `estimates` [B, 6K+4]; token ids are exact in a double.
        """
        state, slots = self.state, batch.slots
        start = state.position[slots] + 1  # of the first draft
        draw: RoundDraw | None = None
        if batch.drafts_sampled and k and drafting:
            coupled = self.mode == "coupled"
            draw = RoundDraw(batch.draft, start, k, self.target.vocab_size, coupled=coupled)
        watched = _Watched(draw, estimates=self.estimates)
        if drafting:
            proposed = self._propose(slots, length, k, watched)
        else:
            proposed = Proposal(slots.new_zeros(slots.shape[0], k))
        lengths = torch.full_like(slots, k) if proposed.lengths is None else proposed.lengths
        most = int(lengths.max()) if self.trims else k
        logits = self._score(slots, proposed.tokens[:, :most], length)
        probs = None if draw is None else draw.probs[:, :most]
        one_hot = batch.draft.greedy if drafting else torch.ones_like(batch.draft.greedy)
        drafted = Drafted(proposed.tokens[:, :most], lengths, batch.active, one_hot, probs)
        emitted = verification(self.mode, all_greedy=batch.all_greedy)(drafted, logits, batch.target, start)
        state.commit(slots, emitted)
        emitted = emitted.padded(k)
        packed = _packed(emitted, proposed.tokens, lengths, _broken(drafted, watched.finite(slots), logits))
        return (
            torch.cat((packed, self._estimated(proposed, one_hot, draw, watched)), dim=1) if self.estimates else packed
        )

    def _estimated(self, proposed: Proposal, one_hot: Tensor, draw: RoundDraw | None, watched: _Watched) -> Tensor:
        """float64 [B, 2K]: the confidences of a round's drafts, and their probabilities; NaN where there is none."""
        tokens = proposed.tokens
        k = tokens.shape[1]
        unknown = tokens.new_full(tokens.shape, torch.nan, dtype=torch.float64)
        confidences = unknown if proposed.confidences is None else proposed.confidences[:, :k].double()
        if self.drafter is None or self.drafter.module is None or len(watched.probabilities) < max(k, 1):
            return torch.cat((confidences, unknown), dim=1)
        own = torch.stack(watched.probabilities[:k], dim=1) if k else unknown
        if draw is not None:
            own = torch.where(one_hot[:, None], own, draw.probs.gather(2, tokens[..., None])[..., 0])
        return torch.cat((confidences, own.double()), dim=1)

    def _propose(self, slots: Tensor, length: int, k: int, draw: Draw) -> Proposal:
        """The draft tokens of this round. A drafter takes in the committed tokens even where k is 0."""
        if self.drafter is None:
            return Proposal(self.state.tokens.new_empty(slots.shape[0], 0))
        tokens, lengths, confidences = self.drafter.propose(self.committed(slots, length), max(k, 1), draw)
        if self.min_confidence:
            lengths = self._confident(lengths, confidences)
        return Proposal(tokens[:, :k], None if lengths is None else lengths.clamp(max=k), confidences)

    def committed(self, slots: Tensor, length: int) -> Committed:
        """What the drafter is told of `slots` int64 [B]."""
        state = self.state
        counts = state.counts[slots]
        reads = self.drafter is not None and self.drafter.aux_layers is not None
        return Committed(
            slots=slots,
            tokens=state.tokens[slots],
            counts=counts,
            start=state.position[slots] - counts + 1,
            features=state.features[slots] if reads else None,
            length=length,
            cache=self.cache,
        )

    def anchors(self, slots: Tensor) -> Tensor:
        """The newest tokens of `slots`: int64 [B, 1]."""
        return self.state.tokens[slots].gather(1, self.state.counts[slots, None] - 1)

    def turned(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The rotary positions of `positions` int64 [B, T] of `slots`: after images, they are others."""
        return positions + self.state.shift[slots, None] if self.target.shifts else positions

    def _confident(self, lengths: Tensor | None, confidences: Tensor | None) -> Tensor:
        """How many drafts int64 [B] come before the first that the draft has too little confidence in."""
        if confidences is None:
            raise DraftkitError(
                "the draft does not estimate its chances of acceptance",
                expected="a confidence head, as DSpark drafts may have",
                hint="leave out draft_confidence",
            )
        confident = (confidences >= self.min_confidence).long().cumprod(1).sum(1)
        return confident if lengths is None else torch.minimum(lengths, confident)

    def _score(self, slots: Tensor, drafts: Tensor, length: int) -> Tensor:
        """The target's logits [B, K+1, V] for the anchors and the drafts after them."""
        state, k = self.state, drafts.shape[1]
        positions = state.position[slots, None] + torch.arange(k + 1, device=slots.device)
        rows = self.cache.rows(slots, positions, length)
        tokens = torch.cat((self.anchors(slots), drafts), dim=1)
        # A rejected row leaves no trace.
        output = self.target.forward(tokens, self.turned(slots, positions), rows, lengths=positions + 1)
        if output.features is not None:
            state.features[slots, : k + 1] = output.features
        return output.logits


def _broken(drafted: Drafted, draft: Tensor, logits: Tensor) -> Tensor:
    """int64 [B]: an index of `BROKEN`, from whether the draft's logits are usable, and the target's [B, K+1, V].

    Padding and rows without a sequence may hold anything. What a broken target says of a draft is not asked.
    """
    index = torch.arange(logits.shape[1], device=logits.device)
    target = (has_finite_peak(logits) | (index > drafted.lengths[:, None])).all(1)
    return torch.where(drafted.active, torch.where(target, torch.where(draft, 0, 2), 1), 0)


def _packed(emitted: Emitted, proposal: Tensor, lengths: Tensor, broken: Tensor) -> Tensor:
    columns = broken[:, None], lengths[:, None], emitted.counts[:, None], emitted.tokens, emitted.expected, proposal
    return torch.cat([column.double() for column in columns], dim=1)


def outcomes(packed: Tensor, k: int) -> list[Outcome]:
    """The outcome of each row of a round of `k` drafts: the one transfer to the host."""
    begins = [k + 1 + part * k for part in range(4)]  # of what has a number for each draft
    estimated = packed.shape[1] > 3 + begins[2]
    found = []
    for broken, drafted, count, *rest in packed.tolist():
        expected, proposal, *estimates = (
            tuple(rest[begin : begin + int(drafted)]) for begin in (begins if estimated else begins[:2])
        )
        emitted = [int(token) for token in rest[: int(count)]]
        outcome = Outcome(tuple(map(int, proposal)), emitted, expected, BROKEN[int(broken)])
        if estimated:
            confidences, probabilities = estimates
            outcome = outcome._replace(confidences=_known(confidences), probabilities=_known(probabilities))
        found.append(outcome)
    return found


def _known(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """The numbers; none of them where any is NaN."""
    return () if any(map(math.isnan, numbers)) else numbers
