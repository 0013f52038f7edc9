"""Contexts of the target's own texts, with its logits and the draft's. V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftkit.evaluate.near_ties import teacher_forced
from draftkit.requests import Request
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, NewSequence, Proposal
from draftkit.targets.states import AuxLayers
from lossless.goodness import MIN_EXPECTED
from lossless.pair import Pair


@dataclass(frozen=True)
class Context:
    """Token ids, and the logits float32 [V] of what follows them: the target's, and the draft's, −∞ for tokens that
    it does not have."""

    tokens: tuple[int, ...]
    target: Tensor
    draft: Tensor

    def openness(self, draws: int) -> tuple[int, float]:
        """How many tokens are expected often enough to be counted among so many draws at temperature 1, then the
        entropy in nats. A text that thousands of tokens may follow shows nothing in a hundred draws.
        """
        likely = self.target.double().softmax(-1)
        return int((likely * draws >= MIN_EXPECTED).sum()), float(torch.special.entr(likely).sum())


def open_contexts(pair: Pair, count: int, k: int, draws: int) -> list[Context]:
    """For each of the first `count` requests, of the contexts where rounds began the one after which `draws` tokens
    show most.

    The draft's logits are those of the first draft there.
    """
    contexts = [_most_open(pair, request, k, draws) for request in pair.requests[:count]]
    return sorted(contexts, key=lambda context: context.openness(draws), reverse=True)


def _most_open(pair: Pair, request: Request, k: int, draws: int) -> Context:
    recorder = _Recorder(pair.drafter, pair.model.config.get_text_config().vocab_size)
    (output,) = pair.speculative([request], k=k, num_slots=1, drafter=recorder, eager=True)
    logits = teacher_forced(pair.model, request.prompt, output.tokens)
    begin, ids = len(request.prompt), (*request.prompt, *output.tokens)
    contexts = [
        Context(ids[:position], logits[position - begin], draft)
        for position, draft in recorder.logits.items()
        if position < len(ids)
    ]
    return max(contexts, key=lambda context: context.openness(draws))


class _Recorder:
    """A drafter for one sequence that keeps the `logits` [V] of each round's first draft, by its position."""

    def __init__(self, drafter: Drafter, vocab_size: int):
        self._drafter = drafter
        self.slot_bytes = drafter.slot_bytes
        self._vocab_size = vocab_size
        self.logits: dict[int, Tensor] = {}

    @property
    def aux_layers(self) -> AuxLayers | None:
        return self._drafter.aux_layers

    @property
    def max_tokens(self) -> int | None:
        return self._drafter.max_tokens

    @property
    def overlap(self) -> int:
        return self._drafter.overlap

    @property
    def max_positions(self) -> int | None:
        return self._drafter.max_positions

    @property
    def positions_end(self) -> bool:
        return self._drafter.positions_end

    @property
    def module(self) -> nn.Module | None:
        return self._drafter.module

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self._drafter.allocate(num_slots, capacity, k)

    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        self._drafter.prefill(prompts)

    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        position = int(committed.start[0] + committed.counts[0])

        def recording(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
            if step == 0:
                full = logits.new_full((self._vocab_size,), -torch.inf, dtype=torch.float32)
                self.logits[position] = full.index_copy(0, _all(logits) if ids is None else ids, logits[0].float())
            return draw(step, logits, ids)

        return self._drafter.propose(committed, k, recording)


def _all(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device)
