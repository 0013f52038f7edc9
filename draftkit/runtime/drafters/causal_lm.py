"""Chain drafting with a standalone causal language model of the target's vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.models.target import Target
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Draw


class CausalLMDrafter:
    """Newly accepted tokens are fed together with the bonus token, which saves a pass a round."""

    taps = None

    def __init__(self, model: Target):
        self.model = model
        self.cache = SlotCache(0, 0)

    def allocate(self, num_slots: int, capacity: int) -> None:
        self.cache = SlotCache(num_slots, capacity)

    def prefill(self, slot: int, prompt: Tensor, features: Tensor | None) -> None:
        positions = torch.arange(len(prompt), device=prompt.device)[None]
        slots = torch.tensor([slot], device=prompt.device)
        self.model.forward(prompt[None], positions, self.cache.rows(slots, positions, len(prompt)), last_only=True)

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Tensor:
        row = torch.arange(committed.tokens.shape[1], device=committed.tokens.device)
        positions = committed.start[:, None] + row
        logits = self._pass(committed, committed.tokens, positions)
        last = committed.counts[:, None] - 1
        position = positions.gather(1, last)  # [B, 1]
        drafted = [draw(0, logits.take_along_dim(last[:, :, None], 1)[:, 0])]
        for step in range(1, k):
            drafted.append(draw(step, self._pass(committed, drafted[-1][:, None], position + step)[:, 0]))
        return torch.stack(drafted, dim=1)

    def _pass(self, committed: Committed, tokens: Tensor, positions: Tensor) -> Tensor:
        rows = self.cache.rows(committed.slots, positions, committed.length)
        return self.model.forward(tokens, positions, rows).logits
