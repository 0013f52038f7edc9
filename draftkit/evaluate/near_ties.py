"""Near-ties: where two tokens are so close that rounding decides which of them greedy decoding takes.

Decoding runs one row per sequence, verification K+1, a batch B times as many: other shapes, other orders of summation,
other roundings. `near_ties` holds float32 output against the most that rounding can do; `measure_rounding` measures
what it does in any dtype. N emitted tokens, B sequences, V vocabulary.
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
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.records import Generation
from draftkit.targets.media import Media, arguments, explained_media, of_length
from draftkit.targets.pretrained import of_language_model
from draftkit.targets.target import Target

FORCED_TOGETHER = 16  # texts of one forward
CANDIDATES = 16  # the most likely tokens of a context, among which its winner will be
QUANTILE, SAFETY = 0.999, 2.0  # floors are twice what nearly all stay below: the sample has not seen the largest shift
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


@dataclass(frozen=True)
class Rounding:
    """What rounding does to the margin between two likely tokens, in logits.

    `near_tie`: the margin up to which either may win, twice what nearly always separates two batch sizes, and never
    more than `most`, which is all that rounding can do: a bug that moves logits may not raise it. `moved`: twice what
    nearly always separates either of them from a forward of transformers' own; a bug where it is more than `most`.
    """

    near_tie: float
    moved: float
    most: float


def measure_rounding(target: Target, texts: Sequence[Generation], *, rows: int, together: int) -> Rounding:
    """Compare forwards over the contexts of some texts: of one row of one text, as plain decoding makes them, and of
    `rows` rows of `together` texts, as verification does."""
    whole = [teacher_forced(target.model, text.request.prompt, text.tokens, text.request.media) for text in texts]
    best = [logits.topk(min(CANDIDATES, logits.shape[1])) for logits in whole]
    forced = torch.cat([b.values for b in best])

    def computed(sequences: int, rows: int) -> Tensor:
        parts = [
            logits_in_rounds(target, texts[at : at + sequences], rows, [b.indices for b in best[at : at + sequences]])
            for at in range(0, len(texts), sequences)
        ]
        return torch.cat([logits for part in parts for logits in part])

    def apart(one: Tensor, other: Tensor) -> float:
        shift = (one - other).double()
        return SAFETY * float((shift.amax(-1) - shift.amin(-1)).quantile(QUANTILE))

    alone, batched = computed(1, 1), computed(min(together, len(texts)), rows)
    resolution = float(forced.abs().max()) * torch.finfo(target.dtype).eps
    most = most_of_rounding(target.dtype, resolution)
    moved = max(apart(alone, forced), apart(batched, forced))
    return Rounding(min(max(apart(alone, batched), resolution), most), moved, most)


@torch.inference_mode()
def logits_in_rounds(
    target: Target, texts: Sequence[Generation], rows: int, candidates: Sequence[Tensor]
) -> list[Tensor]:
    """The logits float32 [N, C] of each text's candidates int64 [N, C], from forwards of `rows` rows of every text."""
    emitted = [len(text.tokens) for text in texts]
    cache = SlotCache(len(texts), max(text.length for text in texts) + max(emitted) + rows)
    slots = torch.arange(len(texts), device=target.device)
    shifts = torch.cat([_prefill(target, cache, slot, text.request) for slot, text in enumerate(texts)])
    starts = torch.tensor([len(text.request.prompt) - 1 for text in texts], device=target.device)
    parts: list[list[Tensor]] = [[] for _ in texts]
    for begin in range(0, max(emitted), rows):
        positions = starts[:, None] + begin + torch.arange(rows, device=target.device)
        window = [_window(text, begin, rows) for text in texts]
        tokens = torch.tensor(window, device=target.device)
        places = positions + shifts[:, None] if target.shifts else positions
        logits = target.forward(tokens, places, cache.rows(slots, positions, cache.capacity)).logits
        for part, row, wanted in zip(parts, logits, candidates, strict=True):
            wanted = wanted[begin : begin + rows]
            part.append(row[: len(wanted)].gather(1, wanted).float())
    return [torch.cat(part) for part in parts]


def _prefill(target: Target, cache: SlotCache, slot: int, request: Request) -> Tensor:
    """Take in a prompt but for its last token; the `shift` of `TargetOutput`, 0 where there is none."""
    prompt, shift = request.prompt[:-1], None
    if prompt:
        media = None if request.media is None else of_length(request.media, len(prompt))
        tokens = torch.tensor([prompt], device=target.device)
        positions = torch.arange(len(prompt), device=target.device)[None]
        rows = cache.rows(torch.tensor([slot], device=target.device), positions, len(prompt), prompt=True)
        shift = target.forward(tokens, positions, rows, last_only=True, media=media).shift
    return torch.zeros(1, dtype=torch.int64, device=target.device) if shift is None else shift


def _window(text: Generation, begin: int, rows: int) -> list[int]:
    """The tokens that predict emitted tokens `begin` … `begin` + `rows` − 1; any token beyond the end."""
    inputs = [text.request.prompt[-1], *text.tokens[:-1]][begin : begin + rows]
    return inputs + [0] * (rows - len(inputs))


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
    resolution = float(logits.masked_fill(logits.isinf(), 0).abs().max()) * torch.finfo(torch.float32).eps
    return Parting(
        request=drafted.request.id,
        position=position,
        token=token,
        plain_token=plain_token,
        logprob=own,
        plain_logprob=theirs,
        margin=float(logprobs.max()) - min(own, theirs),
        tie=most_of_rounding(torch.float32, resolution),
    )
