"""How hidden states are stored, as they are or in 8 bits with scales, and what they cost.

`costs_of_states` compares the ways to have the target's states for a run: compute them online, store, or stream.
Shapes: [T, ..., H] states of the T tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.data.states import ENCODINGS, Encoding

DTYPES: dict[Encoding, torch.dtype] = {
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int8-channel": torch.int8,
}
# What the largest number that shares a scale is stored as.
LARGEST: dict[Encoding, float] = {"fp8": 448.0, "int8": 127.0, "int8-channel": 127.0}
# Whose scales are of a channel of a sample: of large models a few channels are far larger than the others, which would
# have few of a vector's 255 steps. The others' are of each vector.
BY_CHANNEL: tuple[Encoding, ...] = ("int8-channel",)


class Encoded(NamedTuple):
    """`values` [T, ..., H] in the encoding's dtype; `scales` float32 [T, ..., 1] or, by channel, [1, ..., H], None
    where the encoding has none."""

    values: Tensor
    scales: Tensor | None


def encode(states: Tensor, encoding: Encoding) -> Encoded:
    """Round the finite states of a sample.

    A number x that shares its scale with a largest magnitude m is off by at most |x|/256 in bf16, m/253 in int8, and
    |x|/16 or m/400,000, whichever is more, in fp8 (e4m3).
    """
    dtype = DTYPES[encoding]
    if encoding not in LARGEST:
        return Encoded(states.to(dtype), None)
    states = states.float()
    largest = LARGEST[encoding]
    magnitudes = states.abs().amax(0 if encoding in BY_CHANNEL else -1, keepdim=True)
    scales = (magnitudes / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (states / scales).clamp(-largest, largest)
    return Encoded((scaled if dtype.is_floating_point else scaled.round()).to(dtype), scales)


def decode(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """Decode stored states into `dtype`."""
    values, scales = encoded
    return values.to(dtype) if scales is None else (values.float() * scales).to(dtype)


def vector_bytes(size: int, encoding: Encoding) -> int:
    """What a vector of `size` numbers takes, with its scale where it has one of its own."""
    own_scale = encoding in LARGEST and encoding not in BY_CHANNEL
    return size * DTYPES[encoding].itemsize + torch.float32.itemsize * own_scale


def channel_bytes(size: int, encoding: Encoding) -> int:
    """What the scales of the `size` channels of a sample take."""
    return torch.float32.itemsize * size * (encoding in BY_CHANNEL)


@dataclass(frozen=True, kw_only=True)
class SourceCost:
    """What one source of states takes: `bytes` on the disk at most, `seconds` that the target computes, in all and for
    a sample."""

    bytes: int
    seconds: float
    sample_bytes: int
    sample_seconds: float


@dataclass(frozen=True, kw_only=True)
class StatesCosts:
    """What the states of `samples` with `tokens` take, of which a run reads each `passes` times.

    `online`: the target in the run's process, for every pass. `store`: once, for all of them. `stream`: a worker beside
    the run, for every pass; of its bytes no more than those of the rows that wait. `encodings`: what storing takes in
    others. `estimate`: what the seconds are from.
    """

    samples: int
    tokens: int
    passes: float
    encoding: Encoding
    online: SourceCost
    store: SourceCost
    stream: SourceCost
    encodings: dict[str, int]
    estimate: str


def costs_of_states(
    *,
    samples: int,
    tokens: int,
    states: int,
    size: int,
    encoding: Encoding,
    passes: float,
    waiting_tokens: int,
    token_seconds: float,
    estimate: str,
) -> StatesCosts:
    """The costs for `states` vectors of `size` numbers a token. `waiting_tokens`: those of the rows that a stream
    holds; `token_seconds`: what the target takes."""

    def stored(tokens: float, samples: float, encoding: Encoding) -> int:
        offsets = torch.int64.itemsize * samples
        return round(
            states * (tokens * vector_bytes(size, encoding) + samples * channel_bytes(size, encoding)) + offsets
        )

    mean = tokens / samples
    once = tokens * token_seconds
    waiting = min(waiting_tokens, tokens)
    whole, part = stored(tokens, samples, encoding), stored(waiting, waiting / mean, encoding)

    def cost(bytes: int, seconds: float, held: int) -> SourceCost:
        return SourceCost(bytes=bytes, seconds=seconds, sample_bytes=held, sample_seconds=seconds / samples)

    each = stored(mean, 1, encoding)
    return StatesCosts(
        samples=samples,
        tokens=tokens,
        passes=passes,
        encoding=encoding,
        online=cost(0, once * passes, 0),
        store=cost(whole, once, each),
        stream=cost(part, once * passes, each),
        encodings={other: stored(tokens, samples, other) for other in ENCODINGS},
        estimate=estimate,
    )
