"""Acceptance at given rates, for performance work: the output is no text, the rounds have the given lengths.

A rate of 1 everywhere is the upper bound of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.distribution import distribution
from draftkit.runtime.ops.noise import uniform
from draftkit.runtime.ops.random import acceptance_stream, target_stream
from draftkit.runtime.ops.sample import sample
from draftkit.runtime.verdict import Drafted, Verdict, emit


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """`rates[i]`: the share of rounds in which at least i + 1 drafts stand (vLLM's per-position rates).

    Raises `DraftkitError` where rates leave [0, 1] or rise.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(after <= before for before, after in pairwise((1.0, *self.rates, 0.0))):
            raise DraftkitError(
                f"acceptance rates {list(self.rates)}", expected="between 0 and 1, none above the one before it"
            )

    @classmethod
    def of_length(cls, length: float, k: int) -> SyntheticAcceptance:
        """Rates with a mean acceptance length of `length` tokens a round, the target's own included: as many certain
        drafts as fit, then one at the remaining rate.
        """
        if not 1 <= length <= k + 1:
            raise DraftkitError(
                f"acceptance length {length}", expected=f"between 1 and {k + 1}, for {k} drafts a round"
            )
        return cls(tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(k)))

    def conditional(self, device: torch.device | str) -> Tensor:
        """The rate of each draft among the rounds in which the one before it stands: float32 [K]."""
        pairs = pairwise((1.0, *self.rates))
        return torch.tensor([after / before if before else 0.0 for before, after in pairs], device=device)


def verify_synthetic(
    drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor, *, rates: Tensor
) -> Verdict:
    """`verdict.Verify` once `rates`, conditional ones float32 [K], are bound: a draft stands at its rate.

    The target's own token is drawn from its distribution after the accepted drafts. `expected` are the rates.
    """
    expected = torch.where(drafted.valid, rates, 0)
    stands = uniform(acceptance_stream(parameters.seed, start, len(rates))) < expected
    accepted = stands.long().cumprod(-1).sum(-1)
    row = logits.take_along_dim(accepted[:, None, None], 1)
    token = sample(distribution(row, parameters), target_stream(parameters.seed, (start + accepted)[:, None]))
    return emit(drafted, accepted, token[:, 0], expected)
