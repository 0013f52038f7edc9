"""What models have in common that draft token by token from hidden states: EAGLE's, and a target's own head.

Shapes: B sequences, T rows, F width of the target features of one row, H draft width, Vd draft vocabulary. Row j pairs
the feature of position p with the token at p + 1, and predicts the token at p + 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor, nn


class ChainOutput(NamedTuple):
    """`head_input` [B, T, H] goes into `logits`; `feedback` [B, T, H] is the hidden input of the next draft step."""

    head_input: Tensor
    feedback: Tensor


class ChainModel(nn.Module, ABC):
    """A draft that feeds on its own hidden states once the target's are used up."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] → the hidden input [B, T, H] of rows that follow target tokens."""

    @abstractmethod
    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, **attention: Any) -> ChainOutput:
        """One draft pass.

        `tokens` int64 [B, T]: the token after each row's feature. `hidden` [B, T, H]: `fuse(features)` or the last
        step's feedback. `positions` int64 [B, T]: of the feature, for rope. `attention` goes to the attention function.
        """

    @abstractmethod
    def logits(self, head_input: Tensor) -> Tensor:
        """[..., H] → [..., Vd]."""

    @property
    @abstractmethod
    def target_ids(self) -> Tensor | None:
        """int64 [Vd]: the target's id of each draft id; None when they are the same."""

    @property
    @abstractmethod
    def logit_scale(self) -> float:
        """What the output layer's product is multiplied by."""

    @property
    @abstractmethod
    def window(self) -> int | None:
        """The narrowest sliding window of its layers, None where all see everything."""
