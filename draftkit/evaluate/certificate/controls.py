"""E: bugs planted in the engine that runs this very pair. A certificate is worth what its tests notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from draftkit.errors import NonFiniteError
from draftkit.evaluate.certificate.goodness import holm
from draftkit.evaluate.certificate.pair import Pair
from draftkit.evaluate.certificate.planted import OffByOneTarget, PoisonedOffByOneTarget
from draftkit.evaluate.certificate.replay import Replay
from draftkit.evaluate.certificate.sampler import Distributions, sampler_fits
from draftkit.models.target import Target
from draftkit.requests import SamplingParameters
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.verdict import Drafted, Verdict, Verify

FLATTENING = 0.5  # of the exponent of draft probabilities: as if they had been taken at twice the temperature

Outcome = Literal["detected", "not applicable", "missed"]


@dataclass(frozen=True)
class Control:
    """A planted bug and what became of it. `p_value` of the sampler's fit, or the largest `margin` in logits."""

    name: str
    outcome: Outcome
    p_value: float | None = None
    margin: float | None = None


def sampler_controls(
    distributions: Mapping[str, Distributions],
    verify: Verify,
    sampling: SamplingParameters,
    texts: int,
    false_alarm_rate: float,
) -> list[Control]:
    """Bugs of drawing and verifying, among drafts that are drawn."""
    drawn = {name: pair for name, pair in distributions.items() if pair.drawing.mode == "probabilistic"}

    def mis_scaled(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Verdict:
        assert drafted.probs is not None
        flatter = drafted.probs.pow(FLATTENING)
        wrong = drafted._replace(probs=flatter / flatter.sum(-1, keepdim=True))
        return verify(wrong, logits, parameters, start)

    found = {
        "draft noise shared with the verifier": sampler_fits(drawn, verify, sampling, texts, shared_noise=True),
        "draft probabilities mis-scaled": sampler_fits(drawn, mis_scaled, sampling, texts),
    }
    return [
        _judged(name, min(holm([fit.p_value for fit in fits.values()])), false_alarm_rate)
        for name, fits in found.items()
    ]


def _judged(name: str, p_value: float, false_alarm_rate: float) -> Control:
    return Control(name, "detected" if p_value < false_alarm_rate else "missed", p_value=p_value)


def cache_controls(pair: Pair, floor: float, k: int, batch: int) -> list[Control]:
    """Bugs of the cache: an anchor in the wrong place, and one that lets rows see rejected ones, which hold NaN."""
    planted: dict[str, type[Target]] = {
        "cache off by one": OffByOneTarget,
        "rejected rows in sight, poisoned with NaN": PoisonedOffByOneTarget,
    }
    return [_cache_control(name, pair, target, floor, k, batch) for name, target in planted.items()]


def _cache_control(name: str, pair: Pair, target: type[Target], floor: float, k: int, batch: int) -> Control:
    replay = Replay(pair.model)
    try:
        outputs = pair.speculative(pair.requests, k=k, num_slots=batch, target=target, eager=True)
    except NonFiniteError:  # the engine has read the poison
        return Control(name, "detected")
    margin = max(float(replay.margins(output).max()) for output in outputs)
    if (
        target is PoisonedOffByOneTarget
        and margin <= floor
        and all(r.accepted == r.drafted for output in outputs for r in output.rounds)
    ):
        return Control(name, "not applicable", margin=margin)
    return Control(name, "detected" if margin > floor else "missed", margin=margin)
