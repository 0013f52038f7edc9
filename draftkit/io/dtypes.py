"""Dtypes under the names of the safetensors format, which need no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from draftkit.errors import FormatError

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    itemsize: int  # bytes per element
    torch_name: str


# In the order of the safetensors library's own enumeration: its writer lays tensors out from last to first.
DTYPES = {
    "BOOL": Dtype(1, "bool"),
    "U8": Dtype(1, "uint8"),
    "I8": Dtype(1, "int8"),
    "F8_E5M2": Dtype(1, "float8_e5m2"),
    "F8_E4M3": Dtype(1, "float8_e4m3fn"),
    "F8_E8M0": Dtype(1, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": Dtype(1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": Dtype(1, "float8_e5m2fnuz"),
    "I16": Dtype(2, "int16"),
    "U16": Dtype(2, "uint16"),
    "F16": Dtype(2, "float16"),
    "BF16": Dtype(2, "bfloat16"),
    "I32": Dtype(4, "int32"),
    "U32": Dtype(4, "uint32"),
    "F32": Dtype(4, "float32"),
    "C64": Dtype(8, "complex64"),
    "F64": Dtype(8, "float64"),
    "I64": Dtype(8, "int64"),
    "U64": Dtype(8, "uint64"),
}
FLOATS = ("F64", "F32", "F16", "BF16")  # what the weights of a draft may be
QUANTIZED = ("F8_E4M3", "F8_E5M2")  # what they may be beside scales
NAME_OF_TORCH_DTYPE = {f"torch.{dtype.torch_name}": name for name, dtype in DTYPES.items()}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size in bytes of a tensor of this dtype and shape. Raises `FormatError` for an unknown dtype."""
    return _lookup(dtype).itemsize * math.prod(shape)


def torch_dtype(name: str) -> torch.dtype:
    """`"BF16"` → `torch.bfloat16`. Raises `FormatError` for an unknown dtype."""
    import torch

    return getattr(torch, _lookup(name).torch_name)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → `"BF16"`. Raises `FormatError` for a dtype that safetensors files cannot hold."""
    name = NAME_OF_TORCH_DTYPE.get(str(dtype))
    if name is None:
        raise FormatError(f"dtype {dtype} has no safetensors name", expected="one of " + ", ".join(NAME_OF_TORCH_DTYPE))
    return name


def _lookup(name: str) -> Dtype:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise FormatError(f"unknown dtype {name!r}", expected="one of " + ", ".join(DTYPES))
    return dtype
