"""Drafting with Gemma-4's assistant, over the target's own cache.

It keeps nothing between rounds: a step has one row, which attends to the target's keys and values up to the state that
the newest token was emitted from. All steps of a round stand there, as they add no keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.folder import Draft
from draftkit.models.chain import ChainOutput
from draftkit.models.gemma4_assistant import Gemma4AssistantModel, layers_read, load_gemma4_assistant
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.last_state import LastStateDrafter, last_state
from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, Proposal
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.ops.slot_attention import Scoring, attend
from draftkit.runtime.slot_rows import SlotRows
from draftkit.targets.attention import Latents
from draftkit.targets.states import FINAL, AuxLayers


class Gemma4AssistantDrafter(LastStateDrafter):
    """`layers`: the target's layer that each kind of the assistant's attends to. `num_layers`: those of the target."""

    def __init__(self, model: Gemma4AssistantModel, layers: dict[str, int], num_layers: int):
        super().__init__(None, model)
        self.model = model
        self.layers = layers
        self._num_layers = num_layers

    @property
    def aux_layers(self) -> AuxLayers:
        return AuxLayers((FINAL if self.model.spec.hidden_state == "after_norm" else self._num_layers,))

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        token, state = last_state(committed)
        hidden, step_of = state[:, None], self._step(committed)
        drafted: list[Tensor] = []
        for step in range(k):
            head_input, hidden = step_of(token[:, None], hidden)
            token = draw(step, self.model.logits(head_input[:, 0]))
            drafted.append(token)
        return Proposal(torch.stack(drafted, dim=1))

    @torch.inference_mode()
    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        token, state = last_state(committed)
        tokens, hidden, step_of = token[:, None], state[:, None], self._step(committed)
        for _ in range(depth):
            head_input, hidden = step_of(tokens, hidden)
            frontier = grow(self.model.logits(head_input.flatten(0, 1)).unflatten(0, tokens.shape))
            tokens, hidden = frontier.tokens, hidden.take_along_dim(frontier.parents[:, :, None], 1)

    def _step(self, committed: Committed) -> Callable[[Tensor, Tensor], ChainOutput]:
        """A step of the assistant: of tokens int64 [B, W] and states [B, W, H], which do not see each other."""
        at = (committed.start + committed.counts - 2)[:, None]  # of the state
        shared = {kind: self._stored(committed, layer) for kind, layer in self.layers.items()}

        def step(tokens: Tensor, hidden: Tensor) -> ChainOutput:
            each = at.expand_as(tokens)
            rows = BorrowedRows(SlotRows(committed.slots, each))
            positions = each + (self.model.spec.position == "token")
            output: ChainOutput = self.model(tokens, hidden, positions, shared, kv=rows)
            return output

        return step

    def _stored(self, committed: Committed, layer: int) -> tuple[Tensor, Tensor]:
        assert committed.cache is not None
        keys, values = committed.cache.stored(layer, committed.length)
        device = committed.tokens.device  # that of a layer, where the target is spread
        return keys.to(device), values.to(device)


class BorrowedRows:
    """Rows that attend to what another model has stored, and store nothing. `whole` as of `KeyValues`."""

    whole = False

    def __init__(self, rows: SlotRows):
        self.rows = rows
        self.latents = Latents(lambda _layer, key: key)

    def update(self, layer: int, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """The keys and values [S, G, length, D] that the layer was given."""
        return key, value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """`slot_attention.attend` of the rows, over what `update` has returned."""
        return attend(query, keys, values, self.rows.on(query.device), scoring)


def load_drafter(
    draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> Gemma4AssistantDrafter:
    """The drafter of Gemma-4's assistant."""
    model = load_gemma4_assistant(draft, target, attention=ATTENTION)
    return Gemma4AssistantDrafter(
        model, layers_read(model.spec, target), target.config.get_text_config().num_hidden_layers
    )


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """No bytes: the assistant reads the target's keys and values and keeps none of its own."""
    return lambda capacity, k: 0
