"""The loss on hidden states."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import smooth_l1_loss


def smooth_l1(draft: Tensor, target: Tensor) -> Tensor:
    """Huber's loss with β = 1, the mean over the width: float32 [N] of states [N, H] (EAGLE-1, HASS)."""
    return smooth_l1_loss(draft.float(), target.float(), reduction="none").mean(-1)
