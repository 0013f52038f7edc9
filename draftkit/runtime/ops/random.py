"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., SC 2011) in torch integer arithmetic.

A number is a function of a request's seed, the position it decides, what it is for and, for the noise of a vocabulary,
the token; nothing else, in particular no state, enters. `draftkit.runtime.ops.noise` computes the same numbers in
Triton, bit for bit: all floating-point steps are single additions and multiplications in a fixed order.

Two kinds of stream. The target's noise is keyed by the position alone: each position is decided once, and the same
noise decides it whatever was drafted. What a round uses up on drafts that may be thrown away (draft noise, acceptance)
is keyed by the round's first position too: a rule that looks at every draft token, as block verification does, learns
about noise beyond the token where it stops, and the next round must not meet that noise again.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
# Numbers that a CPU makes at a time: some dozen steps follow each other on them, which are to find them in its cache.
CACHED = 1 << 18


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
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product; int64 wraps around, which keeps all 64 bits."""
    product = word * constant
    return (product >> 32) & _WORD, product & _WORD


def uniform(stream: Stream) -> Tensor:
    """One number in [0, 1) per row, float32 [...], a multiple of 2⁻²⁴."""
    (word, *_) = _words(stream, torch.zeros_like(stream.positions))
    return (word >> 8).float() * 2.0**-24


def exponential(stream: Stream, size: int) -> Tensor:
    """Independent draws from Exp(1), float32 [..., size], between 2⁻³³ and 23.

    The small ones, which win races, have full relative precision.
    """
    shape, purpose = stream.positions.shape, stream.purpose
    rows = max(CACHED // size, 1) if stream.positions.device.type == "cpu" else max(stream.positions.numel(), 1)
    seeds, positions, origins = (column.flatten().split(rows) for column in stream[:3])
    pieces = (Stream(*columns, purpose) for columns in zip(seeds, positions, origins, strict=True))
    return torch.cat([_exponential_rows(piece, size) for piece in pieces]).reshape(*shape, size)


def _exponential_rows(stream: Stream, size: int) -> Tensor:
    """`exponential` of a stream [N]: [N, size]."""
    counters = torch.arange((size + 3) // 4, device=stream.positions.device)
    seeds, positions, origins, purpose = stream
    rows = Stream(seeds[..., None], positions[..., None], origins[..., None], purpose)
    words = torch.stack(_words(rows, counters), dim=-1)  # token v takes word v mod 4 of counter v div 4
    return _exponential(words.flatten(-2)[..., :size])


def gumbel(stream: Stream, size: int) -> Tensor:
    """Independent standard Gumbel draws, float32 [..., size]: −log of `exponential`."""
    return -natural_log(exponential(stream, size))


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
