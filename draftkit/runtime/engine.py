"""The draft–verify loop over a fixed set of sequence slots.

State of a sequence with n tokens: the target's keys and values are valid for positions 0 … n−2; the token at n−1, the
*anchor*, has not been through the target. One round: the drafter proposes K tokens, the target scores anchor and
proposal in one forward of K+1 rows at n−1 … n−1+K, the verdict accepts a ≤ K of them and adds one token, n grows by
a+1. Without a drafter K is 0 and the same loop is plain decoding. Shapes: S slots, B active ones, F feature width.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.errors import DraftkitError
from draftkit.models.target import Target
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, Proposal
from draftkit.runtime.records import FinishReason, Generation, Request, Round
from draftkit.runtime.sampling.drafting import draw as draw_token
from draftkit.runtime.sampling.parameters import DraftSampling, SamplingTensors
from draftkit.runtime.sampling.synthetic import SyntheticAcceptance
from draftkit.runtime.sampling.verdict import Drafted, Verdict
from draftkit.runtime.verify import RoundDraw, Verification, draw_greedy, verification

MAX_SPECULATIVE_TOKENS = 16
PREFILL_CHUNK = 2048  # rows of one prefill forward, which bounds its activations


class Detokenizer(Protocol):
    """What the engine needs of a tokenizer to give text."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass
class SlotState:
    """What the device knows of each slot between rounds: `position` [S] of its anchor, and its committed tokens.

    `tokens` [S, K+1], `counts` [S] and `features` [S, K+1, F] are those of `Committed`; the anchor is the last token.
    """

    position: Tensor
    tokens: Tensor
    counts: Tensor
    features: Tensor

    @classmethod
    def empty(cls, num_slots: int, k: int, feature_size: int, device: torch.device, dtype: torch.dtype) -> SlotState:
        zeros = torch.zeros(num_slots, dtype=torch.int64, device=device)
        return cls(
            position=zeros,
            tokens=zeros[:, None].repeat(1, k + 1),
            counts=zeros + 1,
            features=torch.zeros(num_slots, k + 1, feature_size, device=device, dtype=dtype),
        )


@dataclass(frozen=True)
class BatchSampling:
    """How the tokens of a batch are drawn, by the target and by the draft. The flags are known on the host."""

    requests: list[Request]
    target: SamplingTensors
    draft: SamplingTensors
    all_greedy: bool
    drafts_sampled: bool

    @classmethod
    def of(cls, requests: list[Request], draft_sampling: DraftSampling, device: torch.device) -> BatchSampling:
        own = [request.sampling for request in requests]
        drafts = [draft_sampling.parameters(sampling) for sampling in own]
        return cls(
            requests=requests,
            target=SamplingTensors.of(own, device),
            draft=SamplingTensors.of(drafts, device),
            all_greedy=not any(sampling.temperature for sampling in own),
            drafts_sampled=any(draft.temperature for draft in drafts),
        )


class Engine:
    """Generates for many requests at once, with a drafter or without.

    `num_slots` sequences run together; a finished one makes room for the next request. The tokens of a request depend
    on its own prompt, sampling parameters and seed, not on the others, up to the numerics of batched matrix products.

    - `verification`: `rejection` and `block` keep the target's distribution; `coupled` gives the very tokens of plain
      decoding at any temperature; `synthetic` accepts at given rates, for performance work.
    - `draft_sampling`: how drafts are drawn; `synthetic`: the rates of that mode.
    - `k_by_batch`: largest batch → K, for batches that should draft less; beyond the largest nothing is drafted.
    - `tokenizer`: gives generations their text.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        num_speculative_tokens: int,
        num_slots: int,
        verification: Verification = "rejection",
        draft_sampling: DraftSampling | None = None,
        synthetic: SyntheticAcceptance | None = None,
        k_by_batch: Mapping[int, int] | None = None,
        tokenizer: Detokenizer | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ):
        if drafter is None and num_speculative_tokens != 0:
            raise DraftkitError("drafting needs a draft", hint="set num_speculative_tokens to 0 for plain decoding")
        own = drafter.max_tokens if drafter is not None else None
        most = MAX_SPECULATIVE_TOKENS if own is None else min(own, MAX_SPECULATIVE_TOKENS)
        if drafter is not None and not 1 <= num_speculative_tokens <= most:
            raise DraftkitError(f"K = {num_speculative_tokens} draft tokens a round", expected=f"1 to {most}")
        if (verification == "synthetic") != (synthetic is not None):
            raise DraftkitError("acceptance rates go with synthetic verification, and it with them")
        if synthetic is not None and len(synthetic.rates) != num_speculative_tokens:
            raise DraftkitError(
                f"{len(synthetic.rates)} acceptance rates", expected=f"one for each of K = {num_speculative_tokens}"
            )
        if k_by_batch and not all(0 <= k <= num_speculative_tokens for k in k_by_batch.values()):
            raise DraftkitError(f"K by batch {dict(k_by_batch)}", expected=f"values from 0 to {num_speculative_tokens}")
        self.target = target
        self.drafter = drafter
        self.k = num_speculative_tokens
        self.num_slots = num_slots
        self.verification: Verification = verification
        self.draft_sampling = draft_sampling or DraftSampling()
        self.synthetic = synthetic
        self.k_by_batch = dict(sorted((k_by_batch or {}).items()))
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self._sampling: BatchSampling | None = None

    @torch.inference_mode()
    def generate(
        self, requests: Iterable[Request], on_round: Callable[[list[Generation]], None] | None = None
    ) -> list[Generation]:
        """Run all requests; generations come back in their order. `on_round` sees the generations that a round touched.

        Raises `DraftkitError` for an empty prompt.
        """
        generations = [Generation(request) for request in requests]
        self._allocate(generations)
        queue = deque(generations)
        active: dict[int, Generation] = {}
        free = list(range(self.num_slots))
        while queue or active:
            while queue and free:
                generation = queue.popleft()
                self._admit(generation, free[0])
                if generation.finished is None:
                    active[free.pop(0)] = generation
                elif on_round:
                    on_round([generation])
            if not active:
                continue
            touched = dict(sorted(active.items()))
            self._round(touched)
            if on_round:
                on_round(list(touched.values()))
            for slot, generation in touched.items():
                if generation.finished is not None:
                    del active[slot]
                    free.append(slot)
        return generations

    def _allocate(self, generations: list[Generation]) -> None:
        """Caches large enough for the longest request, and for the rows of a round that overshoots its end."""
        for generation in generations:
            if not generation.request.prompt:
                raise DraftkitError(f"request {generation.request.id} has an empty prompt")
        longest = max((len(g.request.prompt) + g.request.max_new_tokens for g in generations), default=0)
        capacity = longest + self.k + 1
        self._cache = SlotCache(self.num_slots, capacity)
        if self.drafter is not None:
            self.drafter.allocate(self.num_slots, capacity)
        self._state = SlotState.empty(
            self.num_slots, self.k, self.target.feature_size, self.target.device, self.target.dtype
        )

    def _admit(self, generation: Generation, slot: int) -> None:
        """Prefill target and drafter with a prompt; the target's first token starts the generation."""
        generation.started = time.perf_counter()
        prompt = torch.tensor(generation.request.prompt, device=self.target.device)
        logits, features = self._prefill(prompt, slot)
        if self.drafter is not None:
            self.drafter.prefill(slot, prompt, features)
            if features is not None:
                self._state.features[slot, 0] = features[-1]
        first = self._first_token(generation.request, logits, len(prompt))
        self._state.position[slot] = len(prompt)
        self._state.tokens[slot, 0] = first
        self._state.counts[slot] = 1
        self._extend(generation, [int(first)])

    def _prefill(self, prompt: Tensor, slot: int) -> tuple[Tensor, Tensor | None]:
        """The logits [V] after a prompt [T], and the features [T, F] of its positions."""
        slots = torch.tensor([slot], device=prompt.device)
        features = []
        for begin in range(0, len(prompt), self.prefill_chunk):
            end = min(begin + self.prefill_chunk, len(prompt))
            positions = torch.arange(begin, end, device=prompt.device)[None]
            rows = self._cache.rows(slots, positions, end)
            output = self.target.forward(prompt[None, begin:end], positions, rows, last_only=True)
            features.append(output.features)
        known = [chunk[0] for chunk in features if chunk is not None]
        return output.logits[0, -1], torch.cat(known) if known else None

    def _first_token(self, request: Request, logits: Tensor, position: int) -> Tensor:
        if request.sampling.temperature == 0:
            return logits.argmax()
        parameters = SamplingTensors.of([request.sampling], logits.device)
        at = torch.tensor([position], device=logits.device)
        return draw_token(logits[None], parameters, at, at, coupled=True)[0]  # with the target's own noise

    def _round(self, active: dict[int, Generation]) -> None:
        """One round for the active slots, ascending; one transfer to the host at its end."""
        slots = torch.tensor(list(active), device=self.target.device)
        longest = max(len(g.request.prompt) + len(g.tokens) for g in active.values())
        k = self._k_for(len(active))
        verdict, lengths = self._decide(slots, k, longest + self.k, [g.request for g in active.values()])
        self._commit(slots, verdict, k)
        self._record(active, verdict, lengths)

    def _k_for(self, batch: int) -> int:
        """How many tokens a batch of this size drafts."""
        if not self.k_by_batch:
            return self.k
        return next((k for largest, k in self.k_by_batch.items() if batch <= largest), 0)

    def _decide(self, slots: Tensor, k: int, length: int, requests: list[Request]) -> tuple[Verdict, Tensor]:
        """Propose, score and verify: the verdict and the number of tokens drafted [B]."""
        state, device = self._state, self.target.device
        sampling = self._batch_sampling(requests)
        position = state.position[slots]
        start = position + 1  # of the first draft
        draw: Draw = draw_greedy
        if sampling.drafts_sampled and k:
            coupled = self.verification == "coupled"
            draw = RoundDraw(sampling.draft, start, k, self.target.vocab_size, coupled=coupled)
        proposed = self._propose(slots, length, k, draw)
        anchor = state.tokens[slots].gather(1, state.counts[slots, None] - 1)
        rows = torch.cat((anchor, proposed.tokens), dim=1)
        positions = position[:, None] + torch.arange(k + 1, device=device)
        output = self.target.forward(rows, positions, self._cache.rows(slots, positions, length))
        if output.features is not None:
            state.features[slots, : k + 1] = output.features
        lengths = torch.full_like(slots, k) if proposed.lengths is None else proposed.lengths
        probs = draw.probs if isinstance(draw, RoundDraw) else None
        active = torch.ones_like(slots, dtype=torch.bool)
        drafted = Drafted(proposed.tokens, lengths, active, sampling.draft.greedy, probs)
        verify = verification(
            self.verification, all_greedy=sampling.all_greedy, k=k, synthetic=self.synthetic, device=device
        )
        return verify(drafted, output.logits, sampling.target, start), lengths

    def _batch_sampling(self, requests: list[Request]) -> BatchSampling:
        """The sampling parameters of a batch; made anew only when the batch has changed."""
        if self._sampling is None or self._sampling.requests != requests:
            self._sampling = BatchSampling.of(requests, self.draft_sampling, self.target.device)
        return self._sampling

    def _propose(self, slots: Tensor, length: int, k: int, draw: Draw) -> Proposal:
        """The draft tokens of this round. A drafter takes in the committed tokens even where k is 0."""
        state = self._state
        if self.drafter is None:
            return Proposal(state.tokens.new_empty(len(slots), 0))
        counts = state.counts[slots]
        committed = Committed(
            slots=slots,
            tokens=state.tokens[slots],
            counts=counts,
            start=state.position[slots] - counts + 1,
            features=state.features[slots] if self.drafter.taps is not None else None,
            length=length,
        )
        tokens, lengths = self.drafter.propose(committed, max(k, 1), draw)
        return Proposal(tokens[:, :k], None if lengths is None else lengths.clamp(max=k))

    def _commit(self, slots: Tensor, verdict: Verdict, k: int) -> None:
        state = self._state
        state.tokens[slots] = pad(verdict.tokens, (0, self.k - k))
        state.counts[slots] = verdict.counts
        state.position[slots] += verdict.counts

    def _record(self, active: dict[int, Generation], verdict: Verdict, lengths: Tensor) -> None:
        columns = (verdict.counts[:, None], lengths[:, None], verdict.tokens, verdict.expected)
        packed = torch.cat([column.double() for column in columns], dim=1).tolist()  # ids are exact in a double
        k = verdict.expected.shape[1]
        for generation, (count, drafted, *rest) in zip(active.values(), packed, strict=True):
            position = len(generation.request.prompt) + len(generation.tokens)
            emitted = self._extend(generation, [int(token) for token in rest[: int(count)]])
            expected = tuple(rest[k + 1 : k + 1 + int(drafted)])
            generation.rounds.append(Round(position, int(drafted), int(count) - 1, emitted, expected))

    def _extend(self, generation: Generation, tokens: list[int]) -> int:
        """Append tokens up to one that ends the generation or the length limit; return how many were appended."""
        generation.times.append(time.perf_counter())
        appended = 0
        for token in tokens:
            generation.tokens.append(token)
            appended += 1
            generation.finished = self._end(generation, token)
            if generation.finished is not None:
                break
        if generation.finished is not None and self.tokenizer is not None:
            generation.text = self.tokenizer.decode(generation.tokens, skip_special_tokens=True)
        return appended

    def _end(self, generation: Generation, token: int) -> FinishReason | None:
        request = generation.request
        if token in self.target.eos_token_ids and not request.ignore_eos:
            return "eos"
        if token in request.stop_token_ids:
            return "stop"
        return "length" if len(generation.tokens) >= request.max_new_tokens else None
