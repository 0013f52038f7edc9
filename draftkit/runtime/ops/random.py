"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., SC 2011) in torch integer arithmetic.

A number is a function of a request's seed, the position it decides, what it is for and, for the noise of a vocabulary,
the token; nothing else, in particular no state, enters. The Triton functions at the end compute the same numbers as
those of torch, bit for bit: all floating-point steps are single additions and multiplications in a fixed order. Kernels
that draw noise are launched with `enable_fp_fusion=False`, since a fused multiply-add would round differently.

Two kinds of stream. The target's noise is keyed by the position alone: each position is decided once, and the same
noise decides it whatever was drafted. What a round uses up on drafts that may be thrown away (draft noise, acceptance)
is keyed by the round's first position too: a rule that looks at every draft token, as block verification does, learns
about noise beyond the token where it stops, and the next round must not meet that noise again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, tl, uses_triton

_WORD = 0xFFFFFFFF
_BLOCK = 128  # rows of a program
# Numbers that a CPU makes at a time: some dozen steps follow each other on them, which are to find them in its cache.
CACHED = 1 << 18
# What `exponential` lies between: the least and the most that 32 bits give.
_LEAST, _MOST = 2.0**-33, 23.0
_ROUNDING = 1.001  # far above what float32 can err by in comparing two scores of a race
_SHORT = 1 << 13  # tokens of a race that is over before it is known who need not run

# Tokens of a race [..., V]: their indices in each dimension, or all of them.
Entrants = tuple[Tensor, ...] | EllipsisType


class Purpose(IntEnum):
    """The last word of the counter."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


class Stream(NamedTuple):
    """The random numbers of some rows. `seeds`, `positions` and `origins` int64, all of one shape [...].

    An origin is the first position of a round, 0 for the target's noise.
    """

    seeds: Tensor
    positions: Tensor
    origins: Tensor
    purpose: Purpose


def target_stream(seeds: Tensor, positions: Tensor) -> Stream:
    """The noise with which the target decides `positions` [B, ...] of the requests with `seeds` [B]."""
    seeds = _beside(seeds, positions)
    return Stream(seeds, positions, torch.zeros_like(positions), Purpose.TARGET)


def draft_stream(seeds: Tensor, positions: Tensor, start: Tensor) -> Stream:
    """The noise of drafts for `positions` [B, ...] in the round whose first position is `start` [B]."""
    return Stream(_beside(seeds, positions), positions, _beside(start, positions), Purpose.DRAFT)


def acceptance_stream(seeds: Tensor, start: Tensor, k: int) -> Stream:
    """The uniform numbers [B, k] that decide on the drafts for positions start … start + k − 1."""
    positions = start[:, None] + torch.arange(k, device=start.device)
    return Stream(_beside(seeds, positions), positions, _beside(start, positions), Purpose.ACCEPT)


def _beside(column: Tensor, like: Tensor) -> Tensor:
    return column.reshape(-1, *[1] * (like.dim() - 1)).expand(like.shape)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words for each counter and key; every word is an int64 tensor of values below 2³²."""
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(_round_keys(key[0], 0x9E3779B9), _round_keys(key[1], 0xBB67AE85), strict=True):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps around, which keeps all 64 bits
        # Only what is multiplied has to be a word: c1 and c3 go on with the high half of their products.
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0) & _WORD, product1
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _WORD, product0
    return c0, c1 & _WORD, c2, c3 & _WORD


def _round_keys(key: Tensor, step: int) -> tuple[Tensor, ...]:
    """The word of the key in each of the ten rounds."""
    rounds = torch.arange(10, device=key.device).view(-1, *[1] * key.dim())
    return ((key + rounds * step) & _WORD).unbind()


def uniform(stream: Stream) -> Tensor:
    """One number in [0, 1) per row, float32 [...], a multiple of 2⁻²⁴."""
    if uses_triton(stream.positions):
        return _uniform_by_triton(stream)
    return uniform_by_torch(stream)


def uniform_by_torch(stream: Stream) -> Tensor:
    """The reference of `uniform`."""
    (word, *_) = _words(stream, torch.zeros_like(stream.positions))
    return (word >> 8).float() * 2.0**-24


def exponential(stream: Stream, size: int) -> Tensor:
    """Independent draws from Exp(1), float32 [..., size], between 2⁻³³ and 23.

    The small ones, which win races, have full relative precision.
    """
    shape, purpose = stream.positions.shape, stream.purpose
    flat = Stream(stream.seeds.flatten(), stream.positions.flatten(), stream.origins.flatten(), purpose)
    if flat.positions.device.type != "cpu" or torch.compiler.is_exporting():  # to be compiled into one step
        return _exponential_rows(flat, size).reshape(*shape, size)
    seeds, positions, origins = (column.split(max(CACHED // size, 1)) for column in flat[:3])
    pieces = (Stream(*columns, purpose) for columns in zip(seeds, positions, origins, strict=True))
    return torch.cat([_exponential_rows(piece, size) for piece in pieces]).reshape(*shape, size)


def _exponential_rows(stream: Stream, size: int) -> Tensor:
    """`exponential` of a stream [N]: [N, size]."""
    words = torch.stack(_words_of_rows(stream, size), dim=-1)
    return _exponential(words.flatten(-2)[..., :size])


def _words_of_rows(stream: Stream, size: int) -> tuple[Tensor, ...]:
    """Four words [..., (size + 3) / 4] of each row: token v takes word v mod 4 of counter v div 4."""
    counters = torch.arange((size + 3) // 4, device=stream.positions.device)
    seeds, positions, origins, purpose = stream
    return _words(Stream(seeds[..., None], positions[..., None], origins[..., None], purpose), counters)


def race(weights: Tensor, stream: Stream, score: Callable[[Entrants, Tensor], Tensor]) -> Tensor:
    """The scores of a race of exponential clocks, in which weight over noise is largest: float32 [..., V].

    `weights` float32 [..., V], not negative, NaN for 0. `score(tokens, noise)` gives the scores of some tokens with
    their noise; it orders a row as weight over noise does, up to rounding. Tokens that no score of theirs can let win
    have −∞, and on a CPU the costly part of their noise is not made; the others have, bit for bit, what
    `score(..., exponential(stream, V))` gives.
    """
    whole = weights.device.type != "cpu" or torch.compiler.is_exporting()
    if whole or weights.numel() <= _SHORT:
        return score(..., exponential(stream, weights.shape[-1]))
    tokens, noise = _entrants(weights.nan_to_num(0.0), stream)
    scores = torch.full_like(weights, -torch.inf)
    scores[tokens] = score(tokens, noise)
    return scores


def _entrants(weights: Tensor, stream: Stream) -> tuple[tuple[Tensor, ...], Tensor]:
    """The tokens that may have the largest weight over noise of their rows, and the noise of each, as `exponential`."""
    possible = weights >= weights.amax(-1, keepdim=True) * (_LEAST / _MOST)
    if 16 * int(possible.count_nonzero()) > weights.numel():  # a counter for each costs more than those of all tokens
        return _first(weights, _words_of_rows(stream, weights.shape[-1]))
    *rows, tokens = possible.nonzero(as_tuple=True)
    seeds, positions, origins = (column[tuple(rows)] for column in stream[:3])
    words = _words(Stream(seeds, positions, origins, stream.purpose), tokens >> 2)
    return (*rows, tokens), _noise_at(tokens, words)


def _first(weights: Tensor, words: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    """`_entrants` where many tokens are possible, by their words: the noise −log(1 − x) is within x and x / (1 − x)."""
    uniforms = torch.stack([word.float() for word in words], dim=-1).flatten(-2)[..., : weights.shape[-1]]
    at_most = weights / uniforms.add_(0.5).mul_(2.0**-32)
    reached = (at_most - weights).amax(-1, keepdim=True)
    *rows, tokens = (at_most * _ROUNDING >= reached).nonzero(as_tuple=True)
    return (*rows, tokens), _noise_at(tokens, tuple(word[(*rows, tokens >> 2)] for word in words))


def _noise_at(tokens: Tensor, words: tuple[Tensor, ...]) -> Tensor:
    """The noise of `tokens` [N] from the four words [N] of their counters: float32 [N]."""
    return _exponential(torch.stack(words, dim=-1).gather(-1, (tokens & 3)[:, None])[:, 0])


def _words(stream: Stream, index: Tensor) -> tuple[Tensor, ...]:
    seeds, positions, origins, purpose = stream
    counter = (index, positions & _WORD, origins & _WORD, torch.full_like(positions, int(purpose)))
    return philox(counter, (seeds & _WORD, (seeds >> 32) & _WORD))


def _exponential(words: Tensor) -> Tensor:
    """−log(1 − x) for x = (word + ½)·2⁻³²; below ¼ from x itself, above from the exact complement."""
    x = (words.float() + 0.5) * 2.0**-32
    exponent, fraction = _decompose(((words ^ _WORD).float() + 0.5) * 2.0**-32)
    small = x < 0.25
    return -_log1p(torch.where(small, 0.0, exponent), torch.where(small, -x, fraction))


def natural_log(x: Tensor) -> Tensor:
    """The natural logarithm of normal positive float32, to 1.3 ulp."""
    if x.device.type != "cpu" or x.numel() <= CACHED:
        return _log1p(*_decompose(x))
    return torch.cat([_log1p(*_decompose(piece)) for piece in x.flatten().split(CACHED)]).reshape(x.shape)


def _decompose(x: Tensor) -> tuple[Tensor, Tensor]:
    """e and f with x = 2ᵉ·(1 + f), √½ ≤ 1 + f < √2, both float32."""
    bits = x.view(torch.int32) + (0x3F800000 - 0x3F3504F3)
    exponent = (bits >> 23) - 127
    mantissa = (bits & 0x007FFFFF) + 0x3F3504F3
    return exponent.float(), mantissa.view(torch.float32) - 1.0


def _log1p(exponent: Tensor, f: Tensor) -> Tensor:
    """e·log 2 + log(1 + f); the polynomial was fitted to (log(1 + f) − f + f²/2) / f³ with error below 6e-9."""
    p = f * -0.07634492963552475 + 0.12761574983596802
    for coefficient in (
        -0.13160182535648346,
        0.14201758801937103,
        -0.16623356938362122,
        0.20001226663589478,
        -0.2500081956386566,
        0.3333333134651184,
    ):
        p = p * f + coefficient
    square = f * f
    tail = f * square * p + exponent * -2.12194440e-4
    tail = tail - square * 0.5
    return f + tail + exponent * 0.693359375


def stream_arguments(stream: Stream) -> tuple[Tensor | int, ...]:
    """The arguments `seeds, positions, origins, purpose` of a kernel's signature."""
    seeds, positions, origins, purpose = stream
    return seeds.contiguous(), positions.contiguous(), origins.contiguous(), int(purpose)


def _uniform_by_triton(stream: Stream) -> Tensor:
    out = torch.empty(stream.positions.shape, dtype=torch.float32, device=stream.positions.device)
    if out.numel():
        grid = ((out.numel() + _BLOCK - 1) // _BLOCK,)
        _uniform_kernel[grid](*stream_arguments(stream), out, out.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


@jit(varying=("size",))
def _uniform_kernel(
    seeds: tl.tensor,
    positions: tl.tensor,
    origins: tl.tensor,
    purpose: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < size
    seed = tl.load(seeds + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0)
    origin = tl.load(origins + row, mask=inside, other=0)
    tl.store(out + row, kernel_uniform(seed, position, origin, purpose), mask=inside)


@jit
def kernel_uniform(seed: tl.tensor, position: tl.tensor, origin: tl.tensor, purpose: tl.tensor) -> Any:
    """`uniform` inside a kernel, of one stream row or a block of them."""
    word, _, _, _ = _kernel_words(seed, position.to(tl.int32) * 0, position, origin, purpose)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@jit
def kernel_exponential(
    seed: tl.tensor, position: tl.tensor, origin: tl.tensor, purpose: tl.tensor, counters: tl.tensor
) -> Any:
    """`exponential` inside a kernel, of one stream row at tokens 4·c … 4·c+3, for int32 `counters` c [N]: [N, 4]."""
    w0, w1, w2, w3 = _kernel_words(seed, counters, position, origin, purpose)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [counters.shape[0], 4])
    x = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent, fraction = _kernel_decompose(((~words).to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    small = x < 0.25
    return -_kernel_log1p(tl.where(small, 0.0, exponent), tl.where(small, -x, fraction))


@jit
def kernel_log(x: tl.tensor) -> Any:
    """`natural_log` inside a kernel."""
    exponent, fraction = _kernel_decompose(x)
    return _kernel_log1p(exponent, fraction)


@jit
def _kernel_words(seed: tl.tensor, index: tl.tensor, position: tl.tensor, origin: tl.tensor, purpose: tl.tensor) -> Any:
    """Four uint32 words for each entry of `index` int32; the other arguments broadcast to it."""
    zero = index * 0
    return tl.philox(seed, index, zero + position.to(tl.int32), zero + origin.to(tl.int32), zero + purpose)


@jit
def _kernel_decompose(x: tl.tensor) -> Any:
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    exponent = (bits >> 23) - 127
    mantissa = (bits & 0x007FFFFF) + 0x3F3504F3
    return exponent.to(tl.float32), mantissa.to(tl.float32, bitcast=True) - 1.0


@jit
def _kernel_log1p(exponent: tl.tensor, f: tl.tensor) -> Any:
    p = f * -0.07634492963552475 + 0.12761574983596802
    p = p * f + -0.13160182535648346
    p = p * f + 0.14201758801937103
    p = p * f + -0.16623356938362122
    p = p * f + 0.20001226663589478
    p = p * f + -0.2500081956386566
    p = p * f + 0.3333333134651184
    square = f * f
    tail = f * square * p + exponent * -2.12194440e-4
    tail = tail - square * 0.5
    return f + tail + exponent * 0.693359375
