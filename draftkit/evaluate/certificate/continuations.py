"""D, end to end: what the engine draws after a text, against the target's exact law of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from draftkit.evaluate.certificate.goodness import NOTHING, ChiSquare, chi_square
from draftkit.evaluate.certificate.pair import Pair
from draftkit.evaluate.certificate.replay import teacher_forced
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.modes import Verification

LENGTH = 3  # the first token is the prefill's, the others come from rounds
FEWEST = 20  # continuations of a text, below which their next token is not looked at
MOST_SLOTS = 64


def continuation_p_value(
    pair: Pair,
    text: tuple[int, ...],
    sampling: SamplingParameters,
    samples: int,
    *,
    k: int,
    verification: Verification,
    shift: float,
) -> float:
    """The p-value that `samples` continuations of a text have the target's law, token for token.

    Each token is held against the law after the text and the tokens before it, wherever enough continuations share
    those. `shift`: how far logits move with the shape of a forward, root mean square; it moves the law too, and what
    that may add to the statistic is taken off.
    """
    requests = [Request(str(i), text, LENGTH, sampling.numbered(i), ignore_eos=True) for i in range(samples)]
    outputs = pair.speculative(requests, k=k, num_slots=MOST_SLOTS, verification=verification)
    drawn = [tuple(output.tokens) for output in outputs]
    fit = NOTHING
    for beginning in _shared_beginnings(drawn):
        logits = teacher_forced(pair.model, text, (*beginning, 0))[-1]
        law = (logits.double() / sampling.temperature).softmax(-1)
        following = [tokens[len(beginning)] for tokens in drawn if tokens[: len(beginning)] == beginning]
        found = chi_square(torch.bincount(torch.tensor(following), minlength=len(law)), law)
        allowed = len(following) * (shift / sampling.temperature) ** 2
        fit += ChiSquare(max(found.statistic - allowed, 0.0), found.degrees)
    return fit.p_value


def _shared_beginnings(drawn: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first tokens, of any number, that enough of the continuations begin with and go on from."""
    counts = Counter(tokens[:length] for tokens in drawn for length in range(LENGTH))
    return [beginning for beginning, count in counts.items() if count >= FEWEST]
