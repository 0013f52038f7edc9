"""Every loss between the distributions of draft and target, with its derivative.

n rows, V draft vocabulary; p is the target's distribution restricted to V and renormalized, q the draft's. A loss
gives, beside its value, its `slope` c_v = ∂ loss / ∂ log q_v with the q_v taken as free; the gradient by the draft's
logits is then c − q·Σ_v c_v for each of them, and the slope of a weighted sum is the weighted sum of the slopes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_ALPHA = 1e-5  # below it −log α is flat


@dataclass(frozen=True)
class LossRows:
    """`log_q` [n, V], `log_target` [n, V] or None where there are labels only, `labels` int64 [n]."""

    log_q: Tensor
    log_target: Tensor | None
    labels: Tensor

    @property
    def log_p(self) -> Tensor:
        assert self.log_target is not None
        return self.log_target

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def alpha(self) -> Tensor:
        """Σ_v min(p_v, q_v): the probability that a draft drawn from q is accepted, if the target's are p."""
        return torch.minimum(self.p, self.q).sum(-1)

    @cached_property
    def alpha_slope(self) -> Tensor:
        """∂ α / ∂ log q_v."""
        return torch.where(self.log_q <= self.log_p, self.q, 0)


class Contribution(NamedTuple):
    """`value` [n] and `slope` [n, V] of a loss."""

    value: Tensor
    slope: Tensor


def ce(rows: LossRows) -> Contribution:
    """−log q[label]."""
    label = rows.labels[:, None]
    slope = torch.zeros_like(rows.log_q).scatter_(-1, label, -1)
    return Contribution(-rows.log_q.gather(-1, label)[:, 0], slope)


def soft_ce(rows: LossRows) -> Contribution:
    """−Σ p log q: what EAGLE-1 and EAGLE-3 publish."""
    return Contribution(-(rows.p * rows.log_q).sum(-1), -rows.p)


def kl(rows: LossRows) -> Contribution:
    """Σ p log(p/q)."""
    return Contribution((rows.p * (rows.log_p - rows.log_q)).sum(-1), -rows.p)


def reverse_kl(rows: LossRows) -> Contribution:
    """Σ q log(q/p)."""
    terms = rows.q * (rows.log_q - rows.log_p)
    return Contribution(terms.sum(-1), terms)  # a constant times q may be left out of a slope


def jsd(rows: LossRows) -> Contribution:
    """½ KL(p‖m) + ½ KL(q‖m) with m = ½(p + q)."""
    log_m = torch.logaddexp(rows.log_p, rows.log_q) - log(2)
    slope = rows.q * (rows.log_q - log_m) / 2
    return Contribution((rows.p * (rows.log_p - log_m)).sum(-1) / 2 + slope.sum(-1), slope)


def tv(rows: LossRows) -> Contribution:
    """1 − α = ½ ‖p − q‖₁."""
    return Contribution(1 - rows.alpha, -rows.alpha_slope)


def nla(rows: LossRows) -> Contribution:
    """−log α, flat below `SMALLEST_ALPHA`, and 0 for rows whose α is 0: no direction would help them."""
    alpha = rows.alpha
    value = torch.where(alpha > 0, -alpha.clamp(min=SMALLEST_ALPHA).log(), 0)
    rate = torch.where(alpha >= SMALLEST_ALPHA, -1 / alpha, 0)
    return Contribution(value, rows.alpha_slope * rate[:, None])


def lk(rows: LossRows, eta: float) -> Contribution:
    """λ·kl + (1 − λ)·tv, where λ = exp(−η·α) of each row is taken as a constant (arXiv 2602.23881)."""
    share = (-eta * rows.alpha).exp()
    divergence, distance = kl(rows), tv(rows)
    value = torch.lerp(distance.value, divergence.value, share)
    return Contribution(value, torch.lerp(distance.slope, divergence.slope, share[:, None]))


def top_k(rows: LossRows, k: float) -> Contribution:
    """−Σ p log q over the target's k likeliest tokens (HASS, arXiv 2408.15766)."""
    likeliest = rows.log_p.topk(min(int(k), rows.log_p.shape[-1]), dim=-1).indices
    p = rows.p.gather(-1, likeliest)
    value = -(p * rows.log_q.gather(-1, likeliest)).sum(-1)
    return Contribution(value, torch.zeros_like(rows.log_q).scatter_(-1, likeliest, -p))


LOSSES: dict[str, Callable[[LossRows], Contribution]] = {
    "ce": ce, "soft_ce": soft_ce, "kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "nla": nla,
}  # fmt: skip
FAMILIES: dict[str, Callable[[LossRows, float], Contribution]] = {"lk": lk, "top_k": top_k}  # one number each
