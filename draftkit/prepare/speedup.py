"""What a draft gains at best, from its acceptance and its cost (Leviathan et al., arXiv 2211.17192, theorem 3.8)."""

from __future__ import annotations

from typing import NamedTuple

MAX_K = 16


class SpeedUp(NamedTuple):
    """`factor`: tokens per second over those without a draft, at `k` draft tokens a round."""

    k: int
    acceptance_length: float
    factor: float


def best_speed_up(acceptance: float, cost: float) -> SpeedUp:
    """The K of 1 to 16 with the largest S = AL / (1 + cK), where AL = (1 − α^(K+1)) / (1 − α).

    α `acceptance`: the chance that a draft token is accepted after accepted ones. c `cost`: one draft step over one
    target step. The target verifies K + 1 tokens in the time of one, which holds while its weights are what takes time
    (small batches), and the host costs nothing: a bound, not a forecast.
    """
    options = (_speed_up(k, acceptance, cost) for k in range(1, MAX_K + 1))
    return max(options, key=lambda option: option.factor)


def _speed_up(k: int, acceptance: float, cost: float) -> SpeedUp:
    length = sum(acceptance**place for place in range(k + 1))
    return SpeedUp(k, length, length / (1 + cost * k))
