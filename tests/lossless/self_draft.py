"""F: the target as its own draft. Whatever it does not accept is a fault of alignment or of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftkit.requests import DraftSampling
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.targets.target import Target
from lossless.goodness import poisson_tail
from lossless.noise import NoiseFloor
from lossless.pair import Pair

SHARE = 0.98  # of K+1, as vLLM asks for


@dataclass(frozen=True)
class SelfDraft:
    """`rejections` among `rounds`; `p_value`: that ties between tokens explain as many."""

    num_speculative_tokens: int
    rounds: int
    acceptance_length: float
    rejections: int
    p_value: float

    @property
    def required(self) -> float:
        return SHARE * (self.num_speculative_tokens + 1)

    def passes(self, false_alarm_rate: float) -> bool:
        """Whether the acceptance length is reached, or missed by no more than ties explain."""
        return self.acceptance_length >= self.required or self.p_value >= false_alarm_rate


def measure_self_draft(pair: Pair, noise: NoiseFloor, k: int, batch: int) -> SelfDraft:
    """Greedy decoding of the pair's requests."""
    drafter = CausalLMDrafter(Target(pair.model))
    pair = replace(pair, draft_sampling=DraftSampling("greedy"))
    outputs = pair.speculative(pair.requests, k=k, num_slots=batch, drafter=drafter)
    rounds = [r for output in outputs for r in output.rounds]
    rejections = sum(r.accepted < r.drafted for r in rounds)
    judged = sum(min(r.accepted + 1, r.drafted) for r in rounds)
    return SelfDraft(
        num_speculative_tokens=k,
        rounds=len(rounds),
        acceptance_length=1 + sum(r.accepted for r in rounds) / max(len(rounds), 1),
        rejections=rejections,
        p_value=poisson_tail(rejections, noise.possible(judged)),
    )
