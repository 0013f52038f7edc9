"""D, end to end: what the engine draws after a text, against the target's exact distribution of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from draftkit.evaluate.near_ties import teacher_forced
from draftkit.requests import Request, SamplingParameters, Verification
from lossless.exact_distribution import exact_distribution, fit
from lossless.goodness import NOTHING, ChiSquare
from lossless.noise import NoiseFloor
from lossless.pair import Pair

LENGTH = 3  # the first token is the prefill's, the others come from rounds
FEWEST = 20  # continuations of a text, below which their next token is not looked at
MOST_SLOTS = 64


def continuation_fit(
    pair: Pair,
    text: tuple[int, ...],
    sampling: SamplingParameters,
    samples: int,
    *,
    k: int,
    verification: Verification,
    noise: NoiseFloor,
) -> ChiSquare:
    """The test that `samples` continuations of a text have the target's distribution, token for token.

    Each token is held against the distribution after the text and the tokens before it, wherever enough continuations
    share those. Logits move with the shape of a forward, by `noise`: cuts leave open what lies as close as its floor,
    and what its typical size may add to the statistic is taken off.
    """
    requests = [Request(str(i), text, LENGTH, sampling.numbered(i), ignore_eos=True) for i in range(samples)]
    outputs = pair.speculative(requests, k=k, num_slots=MOST_SLOTS, verification=verification)
    drawn = [tuple(output.tokens) for output in outputs]
    whole = NOTHING
    for beginning in _shared_beginnings(drawn):
        logits = teacher_forced(pair.model, text, (*beginning, 0))[-1]
        distribution = exact_distribution(logits, sampling, noise.floor)
        following = [tokens[len(beginning)] for tokens in drawn if tokens[: len(beginning)] == beginning]
        found = fit(torch.bincount(torch.tensor(following), minlength=len(logits)), distribution)
        allowed = found.draws * (noise.typical / sampling.temperature) ** 2
        whole += replace(found, statistic=max(found.statistic - allowed, 0.0), allowed=allowed)
    return whole


def _shared_beginnings(drawn: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first tokens, of any number, that enough of the continuations begin with and go on from."""
    counts = Counter(tokens[:length] for tokens in drawn for length in range(LENGTH))
    return [beginning for beginning, count in counts.items() if count >= FEWEST]
