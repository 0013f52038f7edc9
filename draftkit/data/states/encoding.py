"""How hidden states are stored: as they are, or in 8 bits with a scale for each vector.

Shapes: [..., H] states, [...] scales.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Encoding = Literal["bf16", "float32", "fp8", "int8"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
DTYPES: dict[Encoding, torch.dtype] = {
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST: dict[Encoding, float] = {"fp8": 448.0, "int8": 127.0}  # what the largest number of a vector is stored as


class Encoded(NamedTuple):
    """`values` [..., H] in the encoding's dtype; `scales` float32 [...], None where the encoding has none."""

    values: Tensor
    scales: Tensor | None


def encode(states: Tensor, encoding: Encoding) -> Encoded:
    """Round finite states [..., H].

    A number x of a vector with largest magnitude m is off by at most |x|/256 in bf16, m/253 in int8, and |x|/16 or
    m/400,000, whichever is more, in fp8 (e4m3).
    """
    dtype = DTYPES[encoding]
    if encoding not in LARGEST:
        return Encoded(states.to(dtype), None)
    states = states.float()
    largest = LARGEST[encoding]
    scales = (states.abs().amax(-1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (states / scales[..., None]).clamp(-largest, largest)
    return Encoded((scaled.round() if encoding == "int8" else scaled).to(dtype), scales)


def decode(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """The states [..., H] in `dtype`."""
    values, scales = encoded
    return values.to(dtype) if scales is None else (values.float() * scales[..., None]).to(dtype)


def vector_bytes(size: int, encoding: Encoding) -> int:
    """What a vector of `size` numbers takes with its scale."""
    scale = torch.float32.itemsize if encoding in LARGEST else 0
    return size * DTYPES[encoding].itemsize + scale
