"""Near-ties: where two tokens are so close that rounding decides which of them greedy decoding takes.

Decoding runs one row per sequence, verification K+1, a batch B times as many: other shapes, other orders of summation,
other roundings. N emitted tokens, B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftkit.engines.records import Answer, Token
from draftkit.errors import DraftkitError
from draftkit.requests import Request
from draftkit.results.cell import NearTie
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.records import Generation
from draftkit.targets.media import Media, arguments, explained_media, of_length
from draftkit.targets.pretrained import of_language_model
from draftkit.targets.target import Target

FORCED_TOGETHER = 16  # texts of one forward
SAFETY = 2.0  # the floor is twice what rounding may add up to
FLOAT32_UNITS, HALF_UNITS = 64, 16  # in the last place of the largest logit, that rounding may add up to


def most_of_rounding(dtype: torch.dtype, resolution: float) -> float:
    """How far rounding can move a margin between two logits; `resolution`: a unit in the last place of the largest."""
    return SAFETY * (FLOAT32_UNITS if dtype == torch.float32 else HALF_UNITS) * resolution


def teacher_forced(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], media: Media | None = None
) -> Tensor:
    """The logits float32 [N, V] that decide each of `tokens` after those before it. `media`: of a prompt with images.

    The pass shares nothing with the engine but the weights: it is transformers' own forward with its own attention and
    without a cache.
    """
    return _forced(model, [[*prompt, *tokens]], len(prompt), media)[0]


@torch.inference_mode()
def _forced(model: PreTrainedModel, texts: Sequence[Sequence[int]], prompt: int, media: Media | None = None) -> Tensor:
    """The logits float32 [B, N, V] that decide what follows the first `prompt` tokens of texts of one length."""
    ids = torch.tensor(texts, device=model.device)
    rows = torch.arange(prompt - 1, ids.shape[1] - 1, device=model.device)
    given = {} if media is None else arguments(model, of_length(media, ids.shape[1]))
    with own_attention(model), explained_media(media):
        return model(input_ids=ids, use_cache=False, logits_to_keep=rows, **given).logits.float()


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give a model transformers' own attention while the body runs."""
    model.set_attn_implementation(of_language_model(model.config, "eager"))
    try:
        yield
    finally:
        model.set_attn_implementation(of_language_model(model.config, ATTENTION))


def with_likelihoods(model: PreTrainedModel, requests: Sequence[Request], answers: Sequence[Answer]) -> list[Answer]:
    """Answers that name ids with the log-probabilities of their tokens, and of the likeliest in their places, as many
    as the requests ask for."""
    together: dict[tuple[int, ...], list[int]] = {}
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        alone = () if request.media is None else (number,)
        together.setdefault((len(request.prompt), len(answer.tokens), *alone), []).append(number)
    found = list(answers)
    for (prompt, *_), numbers in together.items():
        for begin in range(0, len(numbers), FORCED_TOGETHER):
            part = numbers[begin : begin + FORCED_TOGETHER]
            texts = [[*requests[number].prompt, *answers[number].ids] for number in part]
            logits = _forced(model, texts, prompt, requests[part[0]].media)
            for number, rows in zip(part, logits.log_softmax(-1), strict=True):
                found[number] = _with_rows(answers[number], rows, requests[number].alternatives or 1)
    return found


def _with_rows(answer: Answer, logprobs: Tensor, alternatives: int) -> Answer:
    own = logprobs.gather(1, torch.tensor(answer.ids, device=logprobs.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(alternatives)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    rows = tuple(dict[Token, float](zip(ids, values, strict=True)) for ids, values in pairs)
    return replace(answer, logprobs=tuple(own), alternatives=rows)


@torch.inference_mode()
def generated(target: Target, request: Request) -> tuple[int, ...]:
    """The greedy answers of transformers' own `generate`, with its own cache and attention."""
    model = target.model
    stated, model.generation_config = model.generation_config, GenerationConfig()
    eos_ids = None if request.ignore_eos else sorted(target.eos_token_ids) or None
    ids = torch.tensor([request.prompt], device=model.device)
    seen = {} if request.media is None else arguments(model, request.media)
    try:
        with own_attention(model):
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_new_tokens,
                eos_token_id=eos_ids, pad_token_id=0, **seen,
            )  # fmt: skip
    finally:
        model.generation_config = stated
    return tuple(whole[0, ids.shape[1] :].tolist())


def widest_tie(target: Target, texts: Sequence[Generation]) -> float:
    """The margin between two tokens up to which rounding may decide, in any context of these texts."""
    logits = (teacher_forced(target.model, text.request.prompt, text.tokens, text.request.media) for text in texts)
    return max(_tie(rows, target.dtype) for rows in logits)


def _tie(logits: Tensor, dtype: torch.dtype) -> float:
    largest = float(logits.masked_fill(logits.isinf(), 0).abs().max())
    return most_of_rounding(dtype, largest * torch.finfo(dtype).eps)


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
    logits = teacher_forced(model, plain.request.prompt, [*plain.tokens[:position], 0], plain.request.media)[-1]
    logprobs = logits.log_softmax(-1)
    own, theirs = (-math.inf if one is None else float(logprobs[one]) for one in (token, plain_token))
    return Parting(
        request=drafted.request.id,
        position=position,
        token=token,
        plain_token=plain_token,
        logprob=own,
        plain_logprob=theirs,
        margin=float(logprobs.max()) - min(own, theirs),
        tie=_tie(logits, torch.float32),
    )
