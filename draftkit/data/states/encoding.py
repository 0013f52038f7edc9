"""How hidden states are stored, as they are or in 8 bits with scales, and what they take.

Shapes: [T, ..., H] states of the T tokens of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.data.states import Encoding

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


def states_bytes(samples: int, tokens: int, *, states: int, size: int, encoding: Encoding) -> int:
    """What `states` vectors of `size` numbers a token take on a disk, for all tokens of the samples."""
    values = tokens * vector_bytes(size, encoding) + samples * channel_bytes(size, encoding)
    return states * values + samples * torch.int64.itemsize
