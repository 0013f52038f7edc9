"""IBM's MLP speculator: a small recurrence over the target's last hidden state and the tokens drafted so far.

Shapes: B sequences, Ht target width, D inner width, V vocabulary. Source: foundation-model-stack/fms-extras
`fms_extras/models/speculator.py`, whose order of operations and native-dtype norm are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import PreTrainedModel

from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.layout.folder import Draft
from draftkit.models.weights import check_sizes, load_into

EPS = 1e-6


class MlpSpeculatorModel(nn.Module):
    """Built from its spec; parameters carry the names of the unified layout without `speculator.`.

    With tied weights, steps share what the lists below have one of, and steps from 1 on the second projection.
    """

    def __init__(self, spec: MlpSpeculatorSpec):
        super().__init__()
        self.spec = spec
        v, d = spec.vocab_size, spec.inner_size
        steps = range(1 if spec.tied else spec.num_heads)
        projections = range(min(2, spec.num_heads) if spec.tied else spec.num_heads)
        self.emb = nn.ModuleList(nn.Embedding(v, d) for _ in steps)
        self.proj = nn.ModuleList(nn.Linear(d if i else spec.target_hidden_size, d, bias=False) for i in projections)
        self.ln = nn.ModuleList(ScaledNorm(d) for _ in steps)
        self.head = nn.ModuleList(nn.Linear(d, v, bias=False) for _ in steps)
        # Weights that keep the state's variance from step to step.
        state_weight = 0.5 ** (0.5 / spec.num_heads)
        token_weight = math.sqrt((1 - state_weight**2) * d / 2)
        self.token_weight = token_weight / state_weight

    def start(self, features: Tensor) -> Tensor:
        """The first state [B, Ht], from the target's final normed hidden state [B, Ht] of the last position."""
        return normalized(features) / math.sqrt(2) if self.spec.scale_input else features

    def forward(self, step: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, V] and the next state [B, D] of step 0 … num_heads−1, from the last state and token int64 [B]."""
        embedding, projection, norm, head = (
            modules[min(step, len(modules) - 1)] for modules in (self.emb, self.proj, self.ln, self.head)
        )
        state = torch.add(projection(state), embedding(tokens), alpha=self.token_weight)
        state = gelu(norm(state))
        return head(state), state


class ScaledNorm(nn.Module):
    """Division by the root mean square, then scale and shift."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalized(x) + self.bias


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def load_mlp_speculator(draft: Draft, target: PreTrainedModel) -> MlpSpeculatorModel:
    """An MLP speculator in the target's dtype."""
    spec = draft.spec.architecture.expect(MlpSpeculatorSpec)
    check_sizes(draft, spec.target_hidden_size, target)
    with torch.device("meta"):
        model = MlpSpeculatorModel(spec)
    return load_into(model, draft, target, "speculator.")
