"""Medusa: independent heads on the target's last hidden state, one for each draft position.

Shapes: B sequences, Ht target width, Vd draft vocabulary. Source: FasterDecoding/Medusa `medusa/model/medusa_model.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.folder import Draft
from draftkit.models.weights import check_sizes, load_into


class MedusaModel(nn.Module):
    """Built from its spec; parameters carry the names of the unified layout. A borrowed head is set by `borrow`."""

    def __init__(self, spec: MedusaSpec):
        super().__init__()
        self.spec = spec
        h, rows = spec.target_hidden_size, spec.draft_vocab_size
        self.blocks = nn.ModuleList(ResidualBlocks(h, spec.num_layers, spec.bias) for _ in range(spec.num_heads))
        self.lm_head: nn.Module | None = None
        if spec.lm_head == "draft":
            self.lm_heads = nn.ModuleList(nn.Linear(h, rows, bias=False) for _ in range(spec.num_heads))
        if spec.lm_head == "shared":
            self.lm_head = nn.Linear(h, rows, bias=False)
        self.token_map: Tensor
        if rows != spec.vocab_size:
            self.register_buffer("token_map", torch.zeros(rows, dtype=torch.int64))

    def borrow(self, lm_head: nn.Module) -> None:
        """Use the target's head where the spec says so."""
        if self.spec.lm_head == "target":
            self.lm_head = lm_head

    def forward(self, head: int, features: Tensor) -> Tensor:
        """Logits [B, Vd] of draft position `head`, from the target's final normed state [B, Ht] of the last token."""
        hidden = self.blocks[head](features)
        if self.spec.lm_head == "draft":
            return self.lm_heads[head](hidden)
        assert self.lm_head is not None, "borrow() comes first"
        logits = self.lm_head(hidden)
        # A borrowed head scores the whole vocabulary.
        return logits if logits.shape[-1] == self.spec.draft_vocab_size else logits[..., self.token_map]

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd]: the target's id of each draft id; None when they are the same."""
        return None if self.spec.draft_vocab_size == self.spec.vocab_size else self.token_map


class ResidualBlocks(nn.Module):
    """The blocks of one head, each x + SiLU(W·x + b)."""

    def __init__(self, size: int, num_layers: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + silu(layer(x))
        return x


def load_medusa(draft: Draft, target: PreTrainedModel) -> MedusaModel:
    """The module of a Medusa draft, with its weights."""
    spec = draft.spec.architecture.expect(MedusaSpec)
    check_sizes(draft, spec.target_hidden_size, target)
    with torch.device("meta"):
        model = MedusaModel(spec)
    load_into(model, draft, target)
    model.borrow(target.get_output_embeddings())
    return model
