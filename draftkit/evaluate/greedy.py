"""Whether greedy output with a draft is the target's own, token for token.

In float32 two outputs may part only where two tokens tie: where both lie closer to the target's best than the rounding
of its logits can move them. That is what `certificate/noise.py` takes for the most that rounding does: `FLOAT32_UNITS`
units in the last place of the largest logit, twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from transformers import PreTrainedModel

from draftkit.errors import DraftkitError
from draftkit.evaluate.certificate.noise import FLOAT32_UNITS, SAFETY
from draftkit.evaluate.certificate.replay import teacher_forced
from draftkit.results.record import NearTie
from draftkit.runtime.records import Generation


@dataclass(frozen=True)
class Parting:
    """Where the output of a request leaves plain decoding's, counted from its first token. None: it has ended there.

    `margin`: how far the less likely of the two tokens lies below the target's best, in log-probabilities, by a forward
    of transformers' own over the text before; `tie`: how far rounding may put it there.
    """

    request: str
    position: int
    token: int | None
    plain_token: int | None
    logprob: float
    plain_logprob: float
    margin: float
    tie: float


def near_ties(
    model: PreTrainedModel, drafted: Sequence[Generation], plain: Sequence[Generation], draft: str
) -> list[NearTie]:
    """Where greedy generations of a float32 `model` part from plain decoding's, all of them ties.

    Raises `DraftkitError`, with position and margin, where one is no tie.
    """
    partings = [
        _parting(model, a, b)
        for a, b in zip(drafted, plain, strict=True)
        # Later turns have other prompts where an earlier answer has parted.
        if a.request.prompt == b.request.prompt and a.tokens != b.tokens
    ]
    for parting in partings:
        if not parting.margin <= parting.tie:  # NaN is no tie
            raise DraftkitError(
                f"with the draft, prompt {parting.request} does not get the target's greedy output: output token "
                f"{parting.position} is {parting.token} (log-probability {parting.logprob:.6g}) and without it "
                f"{parting.plain_token} ({parting.plain_logprob:.6g}); rounding explains a margin of "
                f"{parting.tie:.2g}, and it is {parting.margin:.6g}",
                where=draft,
                expected="equal output: greedy decoding in float32 is lossless",
                hint="this is a bug of draftkit with this target; please report it",
            )
    return [NearTie(parting.request, parting.position, parting.margin) for parting in partings]


def _parting(model: PreTrainedModel, drafted: Generation, plain: Generation) -> Parting:
    both = enumerate(zip_longest(drafted.tokens, plain.tokens))
    position, (token, plain_token) = next((i, pair) for i, pair in both if pair[0] != pair[1])
    logits = teacher_forced(model, plain.request.prompt, [*plain.tokens[:position], 0])[-1]
    logprobs = logits.log_softmax(-1)
    own, theirs = (-math.inf if one is None else float(logprobs[one]) for one in (token, plain_token))
    resolution = float(logits.masked_fill(logits.isinf(), 0).abs().max()) * torch.finfo(torch.float32).eps
    return Parting(
        request=drafted.request.id,
        position=position,
        token=token,
        plain_token=plain_token,
        logprob=own,
        plain_logprob=theirs,
        margin=float(logprobs.max()) - min(own, theirs),
        tie=SAFETY * FLOAT32_UNITS * resolution,
    )
