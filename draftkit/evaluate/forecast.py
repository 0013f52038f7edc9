"""Acceptance at other temperatures and K, told from the probabilities of one run at each temperature.

In every round of the run target and draft say what they expect at each of the K positions after the round's anchor,
whether the drafts before it stood or not. At temperature T a draft drawn from q_T stands with probability
Σ_v min(p_T, q_T), a greedy one with p_T(argmax q); the product over the positions up to k is the chance that k drafts
stand. The text is drawn at T: greedy text is easier to draft, whether it goes round in circles or not. What follows is
predicted, not measured: rounds begin elsewhere. B sequences, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.runtime_lane import engine_of, runtime_lane
from draftkit.results.cell import Predicted
from draftkit.results.statistics import extended_rates
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, Proposal
from draftkit.targets.target import Target, TargetOutput

TEMPERATURES = (0.3, 0.7, 1.0)
FURTHER = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # K that are predicted


class Listener:
    """Hears the logits of a drafter and of its target in each round; runs in eager mode only."""

    def __init__(self, target: Target, drafter: Drafter, temperature: float):
        self.temperature = temperature
        self.target = _HeardTarget(target, self)
        self.drafter = _HeardDrafter(drafter, self)
        self.drafted: Proposal | None = None
        self.draft_logits: list[Tensor] = []  # of each position of the round, [B, V]
        self.rates: dict[str, list[Tensor]] = {}  # the chance that k drafts stand, [B, K] a round

    def hear(self, logits: Tensor) -> None:
        """The target's logits [B, K+1, V] for what was drafted last."""
        if self.drafted is None:
            return
        tokens, lengths = self.drafted.tokens, self.drafted.lengths
        k = tokens.shape[1]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        if lengths is not None:
            valid = torch.arange(k, device=tokens.device) < lengths[:, None]
        target = logits[:, :k].float()
        p = (target / self.temperature).softmax(-1)
        self._note("greedy", p.gather(-1, tokens[..., None])[..., 0], valid)
        if self.draft_logits and self.drafter.module is not None:  # a look-up is certain of its tokens
            draft = torch.stack(self.draft_logits, dim=1).float()
            both = torch.minimum(p, (draft / self.temperature).softmax(-1))
            self._note("probabilistic", both.sum(-1), valid)
        self.drafted, self.draft_logits = None, []

    def _note(self, mode: str, stands: Tensor, valid: Tensor) -> None:
        chances = (stands * valid).cumprod(1)  # 0 where nothing was drafted
        self.rates.setdefault(mode, []).append(chances.double().cpu())


class _HeardTarget(Target):
    def __init__(self, target: Target, listener: Listener):
        super().__init__(target.model, target.aux_layers)
        self._listener = listener

    def forward(self, *args: Any, last_only: bool = False, **others: Any) -> TargetOutput:
        output = super().forward(*args, last_only=last_only, **others)
        if not last_only:  # as the prefill is
            self._listener.hear(output.logits)
        return output


class _HeardDrafter:
    """The drafter itself, but for `propose`."""

    def __init__(self, drafter: Drafter, listener: Listener):
        self._drafter = drafter
        self._listener = listener

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        vocab_size = self._listener.target.vocab_size

        def heard(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
            if ids is None:
                full = logits
            else:
                full = logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, ids, logits)
            self._listener.draft_logits.append(full.clone())
            return draw(step, logits, ids)

        self._listener.draft_logits = []
        self._listener.drafted = self._drafter.propose(committed, k, heard)
        return self._listener.drafted


def forecast(target: Target, drafter: Drafter, conversations: Conversations) -> tuple[Predicted, ...]:
    """Acceptance lengths predicted for ways of drafting and K at the conversations' temperature, above 0."""
    settings = conversations.settings
    temperature = settings.sampling.temperature
    listener = Listener(target, drafter, temperature)
    engine = engine_of(
        listener.target, listener.drafter, settings, num_slots=min(settings.concurrency, len(conversations.prompts))
    )
    engine.eager = True
    conversations.hold(runtime_lane(engine))
    predicted = []
    for mode, rounds in sorted(listener.rates.items()):
        rates = torch.cat(rounds).mean(0).tolist()
        predicted += [
            Predicted(temperature, mode, k, 1 + sum(extended_rates(rates, k)), extrapolated=k > len(rates))
            for k in FURTHER
        ]
    return tuple(predicted)
