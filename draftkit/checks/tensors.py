"""The tensors of a draft, one by one: whether they are finite, look trained, or are still their initialization."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from draftkit.checks.registry import check
from draftkit.finding import Finding, Severity
from draftkit.io.dtypes import FLOATS, tensor_bytes
from draftkit.io.finite import find_non_finite
from draftkit.io.handles import TensorHandle

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64
CHUNK_BYTES = 4 << 20
MAX_SPREAD = 2.0


def looks_random(handle: TensorHandle) -> bool:
    """Whether the rows of a matrix [rows, H] are independent draws from one distribution.

    For such rows, with kurtosis κ of the entries, the coefficient of variation of the row norms is √((κ−1)/4H): about
    1 % for H = 4096. A trained embedding table spreads by ten times as much. Up to 64 rows are read, from beyond the
    first 4 MiB where the table is larger, since the first tokens are often control characters that no text has.
    """
    if len(handle.shape) != 2 or handle.dtype not in ("F32", "F16", "BF16"):
        return False
    rows = list(islice(_rows(handle), ROWS))
    if len(rows) < ROWS or any(not any(row) for row in rows):
        return False
    width = handle.shape[1]
    squares = [sum(x * x for x in row) / width for row in rows]
    mean = sum(squares) / ROWS
    kurtosis = sum(x**4 for row in rows for x in row) / (ROWS * width * mean * mean)
    variance = sum((square - mean) ** 2 for square in squares) / (ROWS - 1) / (mean * mean)
    return variance < MAX_SPREAD * (kurtosis - 1) / width


def _rows(handle: TensorHandle) -> Iterator[list[float]]:
    """Rows spread over the second chunk of the table, or over the first where there is no other."""
    width, row_bytes = handle.shape[1], tensor_bytes(handle.dtype, handle.shape[1:])
    whole_rows = max(CHUNK_BYTES // row_bytes, 1) * row_bytes
    chunks = [bytes(chunk) for chunk in islice(handle.chunks(whole_rows), 2)]
    data = chunks[-1] if chunks and len(chunks[-1]) >= ROWS * row_bytes else b"".join(chunks)
    count = len(data) // row_bytes
    for index in range(0, count, max(count // ROWS, 1)):
        yield _floats(data[index * row_bytes : (index + 1) * row_bytes], handle.dtype, width)


def _floats(data: bytes, dtype: str, count: int) -> list[float]:
    if dtype == "BF16":
        halves = struct.unpack(f"<{count}H", data)
        return list(memoryview(array("I", (half << 16 for half in halves)).tobytes()).cast("f"))
    return list(struct.unpack(f"<{count}{'e' if dtype == 'F16' else 'f'}", data))


SMALL_NORM, LARGE_NORM = 1e-3, 1e3  # mean size of a norm's weights, beyond which it switches its input off or swamps it
UNREAD = 0.02  # the share of the largest captured layer's weights in fc below which a layer is not read


@check
def finite(tensors: Mapping[str, TensorHandle]) -> Iterator[Finding]:
    for found in find_non_finite(tensors):
        yield _finding("not-finite", "error", found.name, str(found))


@check
def trained(tensors: Mapping[str, TensorHandle], facts: Mapping[str, object]) -> Iterator[Finding]:
    """Tensors that do not look as training leaves them. Vocabulary maps are left out, as these may be zero."""
    for name, handle in tensors.items():
        if handle.dtype in FLOATS:
            tensor = handle.load().float()
            if tensor.isfinite().all():
                yield from _untrained(name, handle, tensor, facts)


def _untrained(name: str, handle: TensorHandle, tensor: Tensor, facts: Mapping[str, object]) -> Iterator[Finding]:
    if not tensor.any() and not name.endswith("bias"):
        yield _finding(f"zero-{_kind(name)}", "error", name, "all zero, as if it had never been set")
    elif tensor.ndim == 1 and "norm" in name and not name.endswith("bias"):
        size = float(tensor.abs().mean())
        if not SMALL_NORM < size < LARGE_NORM:
            yield _finding("norm-weights", "warning", name, f"the weights of this norm are {size:.1e} on average")
    elif name == "lm_head.weight" and looks_random(handle):
        yield _finding("random-head", "warning", name, "looks like an initialization, not like a trained head")
    elif name == "fc.weight" and facts.get("token_entry") == "attention" and isinstance(facts["aux_layer_ids"], list):
        ids = facts["aux_layer_ids"]
        sizes = [float(block.norm()) for block in tensor.chunk(len(ids), dim=1)]
        unread = [layer for layer, size in zip(ids, sizes, strict=True) if size < UNREAD * max(sizes)]
        if unread:
            yield _finding("unread-layers", "warning", name, f"hardly reads the states of layers {unread}")


def _finding(name: str, severity: Severity, tensor: str, seen: str) -> Finding:
    return Finding(
        name,
        severity,
        f"{tensor}: {seen}",
        where=tensor,
        fix="fetch the checkpoint again",
        source="tensor audit",
    )


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1].replace("_", "-")
