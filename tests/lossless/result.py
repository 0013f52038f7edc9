"""What the steps of the protocol come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lossless.equality import Divergence, Equality
from lossless.goodness import detectable_rate
from lossless.noise import NoiseFloor
from lossless.replay import ReplaySummary
from lossless.self_draft import SelfDraft
from lossless.settings import CertificateSettings

POWER = 0.95  # of what is stated as the smallest defect that would have been seen


@dataclass(frozen=True)
class SampleTest:
    """A test that what was drawn has the distribution that it should have.

    `samples` were compared; `adjusted`: the p-value, given how many tests there are; `detectable`: the total variation
    between the distributions from which on the test fails with 95 %.
    """

    name: str
    samples: int
    p_value: float
    adjusted: float
    detectable: float


@dataclass(frozen=True)
class Detectable:
    """The smallest defects that would have been seen with 95 %. Nothing is certified about smaller ones.

    `wrong_tokens`: the share of greedy tokens that are wrong, by more than the noise floor; `wrong_drawn_tokens` the
    same where draft and target share their noise. `verifier` and `continuations`: the total variation between the
    distribution of drawn tokens and the target's, of the worst test, for the verifier alone and end to end. None where
    nothing was drawn.
    """

    wrong_tokens: float
    wrong_drawn_tokens: float | None = None
    verifier: float | None = None
    continuations: float | None = None


@dataclass(frozen=True)
class Certificate:
    """Whether speculative decoding is lossless on a pair, and all that was measured to say so.

    `exact`: the target runs in float32, where every difference is a bug. `divergence_p_value`: that ties explain as
    many divergences as there were.
    """

    settings: CertificateSettings
    exact: bool
    noise: NoiseFloor
    replay: ReplaySummary
    greedy: tuple[Equality, ...]
    coupled: tuple[Equality, ...]
    divergence_p_value: float
    fits: tuple[SampleTest, ...]
    self_draft: SelfDraft

    @property
    def equalities(self) -> tuple[Equality, ...]:
        return (*self.greedy, *self.coupled)

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """From plain decoding, over all runs; at most one for each request of a run."""
        return tuple(divergence for equality in self.equalities for divergence in equality.divergences)

    @property
    def verdict(self) -> Literal["no difference seen", "numerics only", "bug"]:
        if self.failures:
            return "bug"
        return "numerics only" if self.divergences else "no difference seen"

    @property
    def detectable(self) -> Detectable:
        greedy, drawn = (sum(e.tokens for e in runs) for runs in (self.greedy, self.coupled))
        if not drawn:
            return Detectable(detectable_rate(greedy, POWER))
        return Detectable(
            detectable_rate(greedy, POWER),
            detectable_rate(drawn, POWER),
            max(fit.detectable for fit in self.fits if fit.name.startswith("verifier")),
            max(fit.detectable for fit in self.fits if fit.name.startswith("continuations")),
        )

    @property
    def first_bug(self) -> Divergence | None:
        """The first place where the output is wrong: a token too far from the best one, or another than plain
        decoding's where there may be none."""
        for equality in self.equalities:
            wrong = [d for d in equality.divergences if self.exact or d.margin > self.noise.floor]
            if equality.worst.margin > self.noise.floor:
                wrong.append(equality.worst)
            if wrong:
                return wrong[0]
        return None

    @property
    def failures(self) -> tuple[str, ...]:
        """What no lossless engine does, step by step."""
        found = []
        rate = self.settings.false_alarm_rate
        if not self.noise.explicable:
            found.append(f"logits move by {self.noise.measured:.2g}, which is more than rounding explains")
        bug = self.first_bug
        if bug is not None:
            found.append(f"request {bug.request}, position {bug.position}: margin {bug.margin:.3g}")
        if self.divergence_p_value < rate:
            found.append(f"{len(self.divergences)} divergences, more than ties explain")
        found += [f"{fit.name}: p = {fit.adjusted:.2g}" for fit in self.fits if fit.adjusted < rate]
        if not self.self_draft.passes(rate):
            found.append(f"the target as its own draft: acceptance length {self.self_draft.acceptance_length:.2f}")
        return tuple(found)
