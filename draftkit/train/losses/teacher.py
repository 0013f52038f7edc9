"""Output layers, from states to logits in float32, and the target's as the teacher of a draft.

The target's distribution is computed anew from its final states wherever it is needed. M positions, W the target's
width, V its vocabulary, Vd the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.errors import DraftkitError, TargetError
from draftkit.train.kernels.row_loss import RowDistribution, row_distribution


class OutputHead(NamedTuple):
    """An output layer: `weight` [V, H], `bias` [V] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> OutputHead:
        return OutputHead(self.weight.to(dtype), None if self.bias is None else self.bias.to(widened(dtype)))

    def logits(self, states: Tensor) -> Tensor:
        """float32 [n, V] of `states` [n, H] in the weight's type."""
        logits = product(states, self.weight.T)
        return logits if self.bias is None else logits.add_(self.bias)


def compute_dtype(*factors: Tensor) -> torch.dtype:
    """The type to multiply in: bfloat16 where a GPU has one factor in it, else float32, or float64 if they are."""
    if any(factor.is_cuda and factor.dtype == torch.bfloat16 for factor in factors):
        return torch.bfloat16
    dtype = torch.float32
    for factor in factors:
        dtype = torch.promote_types(dtype, factor.dtype)
    return dtype


def widened(dtype: torch.dtype) -> torch.dtype:
    """The type in which a product's sums are kept."""
    return torch.promote_types(dtype, torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices in one `compute_dtype`, whose sums are never rounded to bfloat16."""
    if left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `product` to `sums`, in one pass where torch has that."""
    if left.dtype == torch.bfloat16:
        sums += product(left, right)
    else:
        sums.addmm_(left, right)


def rows_at_once(size: int, device: torch.device) -> int:
    """How many rows of `size` logits to hold at a time: enough to keep a GPU busy, few enough for a CPU's cache."""
    budget = 1 << (26 if device.type == "cuda" else 18)
    return max(budget // size, 128)  # fewer would wait for the head's weights


@dataclass(frozen=True)
class TargetHead:
    """The target's output layer and what the draft sees of it; made once per training.

    `d2t_ids` int64 [Vd]: the target's ids of the draft vocabulary, None where that is the whole vocabulary.
    `temperature` divides the logits of target and draft alike, as in serving.
    """

    head: OutputHead
    d2t_ids: Tensor | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise DraftkitError(
                f"temperature {self.temperature}", expected="above 0", hint="loss ce for greedy serving"
            )

    @cached_property
    @torch.no_grad()
    def restricted(self) -> OutputHead:
        """The rows of the draft vocabulary, in the type they are multiplied in."""
        weight, bias = self.head
        if self.d2t_ids is not None:
            weight, bias = weight[self.d2t_ids], None if bias is None else bias[self.d2t_ids]
        return OutputHead(weight, bias).to(compute_dtype(weight))

    @cached_property
    def _t2d_ids(self) -> Tensor:
        """int64 [V]: the place in the draft vocabulary, −1 outside."""
        ids = torch.arange(len(self.head.weight), device=self.head.weight.device)
        return ids if self.d2t_ids is None else torch.full_like(ids, -1).scatter_(0, self.d2t_ids, ids[: len(self)])

    def __len__(self) -> int:
        """The size Vd of the draft vocabulary."""
        return len(self.head.weight if self.d2t_ids is None else self.d2t_ids)

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Target ids to places in the draft vocabulary, −1 outside."""
        return self._t2d_ids[tokens]

    def to_target(self, tokens: Tensor) -> Tensor:
        """Places in the draft vocabulary to target ids."""
        return tokens if self.d2t_ids is None else self.d2t_ids[tokens]

    def scale(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in place."""
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    @torch.no_grad()
    def teacher(self, states: Tensor) -> Teacher:
        """A teacher of the target's final normed `states` [M, W]: what depends on the whole vocabulary, done once."""
        if self.d2t_ids is None:
            return Teacher(self, states)
        head = self.head.to(compute_dtype(self.head.weight))
        chunks = []
        with torch.autocast(states.device.type, enabled=False):
            for chunk in states.split(rows_at_once(len(head.weight), states.device)):
                chunks.append(row_distribution(self.scale(head.logits(chunk.to(head.weight.dtype)))))
        return Teacher(self, states, RowDistribution(*(torch.cat(parts) for parts in zip(*chunks, strict=True))))


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at each row.

    `states` [M, W], `distribution` [M] over the target's whole vocabulary; None where the draft vocabulary is the whole
    one, and the loss finds it by itself. `positions` int64 [N]: the position that teaches each row, None for each its
    own.
    """

    head: TargetHead
    states: Tensor
    distribution: RowDistribution | None = None
    positions: Tensor | None = None

    def at(self, positions: Tensor) -> Teacher:
        """The teacher of rows that are taught by `positions` int64 [N], as the rows of all steps of a training-time
        test."""
        return replace(self, positions=positions)

    def of(self, rows: Tensor) -> Tensor:
        """The positions that teach `rows`, both int64 [n]."""
        return rows if self.positions is None else self.positions[rows]

    def whole_distribution(self, positions: Tensor) -> RowDistribution | None:
        """The target's distribution over its whole vocabulary at positions int64 [n]; None where it is not kept."""
        return (
            None if self.distribution is None else RowDistribution(*(values[positions] for values in self.distribution))
        )

    def logits(self, positions: Tensor) -> Tensor:
        """The logits over the draft vocabulary, divided by the temperature: float32 [n, Vd] at positions int64 [n]."""
        head = self.head.restricted
        return self.head.scale(head.logits(self.states[positions].to(head.weight.dtype)))


# Config keys that change logits after the output layer, and the value that does not.
CHANGES = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "logits_mup_width_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
}


def target_head(target: PreTrainedModel, d2t_ids: Tensor | None, temperature: float = 1.0) -> TargetHead:
    """The target's output layer as a teacher. Raises `TargetError` where its logits are more than a product."""
    require_plain_logits(target, "target")
    layer = target.get_output_embeddings()
    return TargetHead(OutputHead(layer.weight.detach(), getattr(layer, "bias", None)), d2t_ids, temperature)


def require_plain_logits(model: PreTrainedModel, of: str) -> None:
    """Raise `TargetError` for a model, the target or the draft, whose logits are more than its output layer's."""
    config = model.config.get_text_config()
    for key, neutral in CHANGES.items():
        value = getattr(config, key, neutral)
        if value is not None and value != neutral:
            raise TargetError(f"the {of}'s logits are changed by {key} = {value}", expected="a plain output layer")
