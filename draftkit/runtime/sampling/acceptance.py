"""The probabilities of draft tokens, and how many of them should stand.

B requests, K draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.kernels.residual_mass import residual_mass
from draftkit.runtime.sampling.probabilities import Distribution, probability_of
from draftkit.runtime.sampling.verdict import Drafted


def target_probs(drafted: Drafted, law: Distribution) -> Tensor:
    """The target's probability of each draft token, 0 in padding: float32 [B, K]."""
    valid = drafted.valid
    tokens = torch.where(valid, drafted.tokens, 0)
    ahead = Distribution(law.logits[:, :-1], law.scale, *(column[:, :-1] for column in law.statistics))
    return torch.where(valid, probability_of(ahead, tokens), 0)


def draft_probs(drafted: Drafted) -> Tensor:
    """The probability with which each draft token was drawn, 1 where it was chosen: float32 [B, K]."""
    drawn = drafted.valid & ~drafted.one_hot[:, None]
    ones = torch.ones_like(drafted.tokens, dtype=torch.float32)
    if drafted.probs is None:
        return ones
    tokens = torch.where(drawn, drafted.tokens, 0)
    return torch.where(drawn, drafted.probs.gather(-1, tokens[..., None])[..., 0], ones)


def expected_acceptance(drafted: Drafted, law: Distribution, target: Tensor) -> Tensor:
    """The probability that each draft stands under rejection, given those before it: float32 [B, K], 0 in padding.

    Σ_v min(p, q), and `target`, the target's probability of the draft token, in one-hot rows.
    """
    if drafted.probs is None:
        return target
    drawn = drafted.valid & ~drafted.one_hot[:, None]
    residual = residual_mass(drafted.probs, law, torch.ones_like(target), drawn)
    return torch.where(drawn, 1 - residual, target)
