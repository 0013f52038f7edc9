"""Every loss between the distributions of draft and target, with its derivative.

n rows, V draft vocabulary; p is the target's distribution restricted to V and renormalized, q the draft's. A loss
gives, beside its value, its `slope` c_v = ∂ loss / ∂ log q_v with the q_v taken as free; the gradient by the draft's
logits is then c − q·Σ_v c_v for each of them, and the slope of a weighted sum is the weighted sum of the slopes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, log
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from draftkit.errors import DraftkitError

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
        """The slope of α, ∂ α / ∂ log q_v: [n, V]."""
        return torch.where(self.log_q <= self.log_p, self.q, 0)


class Contribution(NamedTuple):
    """What a loss gives: its `value` [n] and its `slope` [n, V]."""

    value: Tensor
    slope: Tensor


def ce(rows: LossRows) -> Contribution:
    """Cross-entropy with the label: −log q[label]."""
    label = rows.labels[:, None]
    slope = torch.zeros_like(rows.log_q).scatter_(-1, label, -1)
    return Contribution(-rows.log_q.gather(-1, label)[:, 0], slope)


def soft_ce(rows: LossRows) -> Contribution:
    """Cross-entropy with the target's distribution, −Σ p log q, as EAGLE-1 and EAGLE-3 publish it."""
    return Contribution(-(rows.p * rows.log_q).sum(-1), -rows.p)


def kl(rows: LossRows) -> Contribution:
    """Kullback-Leibler divergence from the target: Σ p log(p/q)."""
    return Contribution((rows.p * (rows.log_p - rows.log_q)).sum(-1), -rows.p)


def reverse_kl(rows: LossRows) -> Contribution:
    """Reverse Kullback-Leibler divergence: Σ q log(q/p)."""
    terms = rows.q * (rows.log_q - rows.log_p)
    return Contribution(terms.sum(-1), terms)  # a constant times q may be left out of a slope


def jsd(rows: LossRows) -> Contribution:
    """Jensen-Shannon divergence: ½ KL(p‖m) + ½ KL(q‖m) with m = ½(p + q)."""
    log_m = torch.logaddexp(rows.log_p, rows.log_q) - log(2)
    slope = rows.q * (rows.log_q - log_m) / 2
    return Contribution((rows.p * (rows.log_p - log_m)).sum(-1) / 2 + slope.sum(-1), slope)


def tv(rows: LossRows) -> Contribution:
    """Total variation, which is the chance of a rejection: 1 − α = ½ ‖p − q‖₁."""
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


_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_TERM = re.compile(rf"\s*(?:({_NUMBER})\s*\*\s*)?([a-z_]+)\s*(?:\(\s*({_NUMBER})\s*\))?\s*")
_EXPECTED = f"a sum of losses, as kl or 0.1*ce + 0.9*lk(3), of {', '.join([*LOSSES, 'lk(η)', 'top_k(k)'])}"


@dataclass(frozen=True)
class Term:
    """One loss of the table, times `weight`; `number` is η of `lk` and k of `top_k`."""

    weight: float
    name: str
    number: float | None = None

    def __call__(self, rows: LossRows) -> Contribution:
        contribution = LOSSES[self.name](rows) if self.number is None else FAMILIES[self.name](rows, self.number)
        if self.weight == 1:
            return contribution
        return Contribution(contribution.value * self.weight, contribution.slope * self.weight)

    def __str__(self) -> str:
        number = "" if self.number is None else f"({self.number!r})"
        return f"{self.weight!r}*{self.name}{number}"


@dataclass(frozen=True)
class Loss:
    """A weighted sum of different losses; as text it is what `parse_loss` reads."""

    terms: tuple[Term, ...]

    @property
    def needs_target(self) -> bool:
        """Whether a loss of the sum needs the target's distribution, and not labels alone."""
        return self.names != {"ce"}

    @property
    def names(self) -> set[str]:
        return {term.name for term in self.terms}

    def term(self, name: str) -> Term:
        """The term of that name, with weight 0 where there is none."""
        return next((term for term in self.terms if term.name == name), Term(0.0, name, 0.0))

    def __call__(self, rows: LossRows) -> Contribution:
        value, slope = self.terms[0](rows)
        for term in self.terms[1:]:
            more = term(rows)
            value, slope = value + more.value, slope + more.slope
        return Contribution(value, slope)

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


def parse_loss(text: str) -> Loss:
    """Read a weighted sum of the table's losses, each at most once. Raises `DraftkitError`."""
    terms: list[Term] = []
    end = -1  # where the last term ends; a plus follows it
    while end < len(text):
        found = _TERM.match(text, end + 1)
        if not found or text[found.end() : found.end() + 1] not in ("", "+"):
            raise DraftkitError(f"loss {text!r}", expected=_EXPECTED)
        terms.append(_term(text, *found.groups()))
        end = found.end()
    if len({term.name for term in terms}) < len(terms):
        raise DraftkitError(f"loss {text!r} names one of its losses twice", hint="add their weights")
    return Loss(tuple(terms))


LossText = Annotated[str, parse_loss]  # a setting that a record checks


def _term(text: str, weight: str | None, name: str, number: str | None) -> Term:
    term = Term(float(weight or 1), name, None if number is None else float(number))
    value = term.number or 0.0
    known = name in (LOSSES if number is None else FAMILIES)
    usable = isfinite(value) and (name != "top_k" or (value >= 1 and value.is_integer()))
    if not known or not usable or not 0 < term.weight < float("inf"):
        raise DraftkitError(f"loss {text!r}", where=name, expected=_EXPECTED)
    return term
