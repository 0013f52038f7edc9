"""Whether a matrix is still its initialization."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from itertools import islice

from draftkit.io.dtypes import tensor_bytes
from draftkit.io.handles import TensorHandle

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
