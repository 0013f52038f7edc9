"""The draft–verify loop over a fixed set of sequence slots.

State of a sequence with n tokens: the target's keys and values are valid for positions 0 … n−2; the token at n−1, the
*anchor*, has not been through the target. One round: the drafter proposes K tokens, the target scores anchor and
proposal in one forward of K+1 rows at n−1 … n−1+K, the verdict accepts a ≤ K of them and adds one token, n grows by
a+1. Without a drafter K is 0 and the same loop is plain decoding. Shapes: S slots, B active ones, F feature width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.models.target import Target
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter
from draftkit.runtime.records import Generation, Request, Round
from draftkit.runtime.verify import Verdict, draw_greedy, verify_greedy

MAX_SPECULATIVE_TOKENS = 16


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


class Engine:
    """Generates greedily for many requests at once, with a drafter or without.

    `num_slots` sequences run together; a finished one makes room for the next request. The output of a request does
    not depend on the others, up to the numerics of batched matrix products.
    """

    def __init__(self, target: Target, drafter: Drafter | None, *, num_speculative_tokens: int, num_slots: int):
        if drafter is None and num_speculative_tokens != 0:
            raise DraftkitError("drafting needs a draft", hint="set num_speculative_tokens to 0 for plain decoding")
        if drafter is not None and not 1 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise DraftkitError(
                f"K = {num_speculative_tokens} draft tokens a round", expected=f"1 to {MAX_SPECULATIVE_TOKENS}"
            )
        self.target = target
        self.drafter = drafter
        self.k = num_speculative_tokens
        self.num_slots = num_slots

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
        prompt = torch.tensor(generation.request.prompt, device=self.target.device)
        positions = torch.arange(len(prompt), device=prompt.device)[None]
        slots = torch.tensor([slot], device=prompt.device)
        output = self.target.forward(
            prompt[None], positions, self._cache.rows(slots, positions, len(prompt)), last_only=True
        )
        first = output.logits[0, -1].argmax()
        if self.drafter is not None:
            features = None if output.features is None else output.features[0]
            self.drafter.prefill(slot, prompt, features)
            if features is not None:
                self._state.features[slot, 0] = features[-1]
        self._state.position[slot] = len(prompt)
        self._state.tokens[slot, 0] = first
        self._state.counts[slot] = 1
        self._extend(generation, [int(first)])

    def _round(self, active: dict[int, Generation]) -> None:
        """One round for the active slots, ascending; one transfer to the host at its end."""
        state = self._state
        slots = torch.tensor(list(active), device=self.target.device)
        longest = max(len(g.request.prompt) + len(g.tokens) for g in active.values())
        proposed = self._propose(slots, longest + self.k)
        position = state.position[slots]
        anchor = state.tokens[slots].gather(1, state.counts[slots, None] - 1)
        rows = torch.cat((anchor, proposed), dim=1)
        positions = position[:, None] + torch.arange(self.k + 1, device=rows.device)
        output = self.target.forward(rows, positions, self._cache.rows(slots, positions, longest + self.k))
        verdict = verify_greedy(proposed, output.logits)
        state.tokens[slots] = verdict.tokens
        state.counts[slots] = verdict.counts
        state.position[slots] = position + verdict.counts
        if output.features is not None:
            state.features[slots] = output.features
        self._record(active, verdict)

    def _propose(self, slots: Tensor, length: int) -> Tensor:
        """The draft tokens [B, K] of this round."""
        state = self._state
        if self.drafter is None:
            return state.tokens.new_empty(len(slots), 0)
        counts = state.counts[slots]
        committed = Committed(
            slots=slots,
            tokens=state.tokens[slots],
            counts=counts,
            start=state.position[slots] - counts + 1,
            features=state.features[slots] if self.drafter.taps is not None else None,
            length=length,
        )
        return self.drafter.propose(committed, self.k, draw_greedy)

    def _record(self, active: dict[int, Generation], verdict: Verdict) -> None:
        tokens, counts = verdict.tokens.tolist(), verdict.counts.tolist()
        for generation, row, count in zip(active.values(), tokens, counts, strict=True):
            position = len(generation.request.prompt) + len(generation.tokens)
            emitted = self._extend(generation, row[:count])
            generation.rounds.append(Round(position, self.k, count - 1, emitted))

    def _extend(self, generation: Generation, tokens: list[int]) -> int:
        """Append tokens up to an end of sequence or the length limit; return how many were appended."""
        for number, token in enumerate(tokens, start=1):
            generation.tokens.append(token)
            if token in self.target.eos_token_ids:
                generation.finished = "eos"
            elif len(generation.tokens) >= generation.request.max_new_tokens:
                generation.finished = "length"
            if generation.finished is not None:
                return number
        return len(tokens)
