"""What a conversion can do to tensors: one named operation for each, computed as a stream.

An operation takes the handles of its sources and yields the bytes of its result, so that the result is itself a
handle that has not been read: operations chain, and a checkpoint of any size passes through a few megabytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from draftkit.errors import FormatError, LayoutError
from draftkit.io.dtypes import tensor_bytes
from draftkit.io.handles import CHUNK_BYTES, Chunk, TensorHandle, raw_memory

if TYPE_CHECKING:
    import torch

Operation = Literal[
    "copy", "drop", "reshape", "first_rows", "offset_to_index", "index_to_offset", "offset_to_mask", "fill",
    "mask_to_offset", "widen", "from_target", "merge_copies", "select_rows", "add_lora", "add_lora_transposed",
    "add_dora", "add_dora_transposed", "fold_bias", "interleave", "part_halves", "cast", "add", "stack", "unstack",
    "part_rows", "part_rows_transposed", "join_rows",
]  # fmt: skip
MAX_FOLD_ERROR = 0.03  # of what fc makes of the embedding and its bias
FOLD_SAMPLE = 1024  # embedding rows on which that error is measured
FOLD_RIDGES = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)  # of the largest singular value, squared


@dataclass(frozen=True)
class Move:
    """How one tensor of the result comes about, or why a source tensor is dropped (`destination` is None).

    `dtype` and `shape` are those of the result, of the source where it is dropped. `number` is the scale of
    `add_lora`, `add_dora` and their transposed kinds, the value of `fill`, the heads of `interleave` and
    `part_halves`, what `add` adds, which matrix `unstack` takes, and the row with which `part_rows` begins. `reason` is
    told to the user.
    """

    operation: Operation
    sources: tuple[str, ...]
    destination: str | None
    dtype: str
    shape: tuple[int, ...]
    reason: str = ""
    number: float | None = None


def copy(handle: TensorHandle, destination: str | None = None) -> Move:
    """The tensor as it is, under another name."""
    return Move("copy", (handle.name,), destination or handle.name, handle.dtype, handle.shape)


def drop(handle: TensorHandle, reason: str) -> Move:
    return Move("drop", (handle.name,), None, handle.dtype, handle.shape, reason)


def carry_out(moves: Sequence[Move], sources: Mapping[str, TensorHandle]) -> dict[str, TensorHandle]:
    """The results of moves by name, in their order. Nothing is read until a result is."""
    return {
        move.destination: _result(move, [sources[name] for name in move.sources])
        for move in moves
        if move.destination is not None
    }


def _result(move: Move, sources: list[TensorHandle]) -> TensorHandle:
    assert move.destination is not None
    if move.operation in ("copy", "from_target", "reshape"):
        return replace(sources[0], name=move.destination, shape=move.shape)
    stream = STREAMS[move.operation]
    origin = sources[0].origin if sources else Path()
    return TensorHandle(move.destination, move.dtype, move.shape, origin, partial(stream, move, sources))


def _first_rows(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """The leading rows of a matrix: the first bytes of it."""
    left = tensor_bytes(move.dtype, move.shape)
    for chunk in sources[0].chunks(size):
        piece = memoryview(chunk)[:left]
        left -= len(piece)
        yield piece
        if not left:
            return


def _offset_to_index(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    yield _bytes(i + offset for i, offset in enumerate(integers(sources[0])))


def _index_to_offset(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    yield _bytes(index - i for i, index in enumerate(integers(sources[0])))


def _offset_to_mask(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """d2t → t2d: true at each target token that the draft has."""
    mask = bytearray(move.shape[0])
    for i, offset in enumerate(integers(sources[0])):
        if not 0 <= i + offset < len(mask):
            raise FormatError(
                f"d2t[{i}] maps to token {i + offset}, outside 0…{len(mask) - 1}",
                where=sources[0].origin,
                hint="convert the source again, or ask its author for the map that the draft was trained with",
            )
        mask[i + offset] = 1
    yield mask


def _mask_to_offset(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """t2d → d2t: the tokens that it marks, in ascending order, as every trainer numbers them."""
    yield _bytes(token - i for i, token in enumerate(marked(sources[0])))


def _widen(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    yield _bytes(iter(integers(sources[0])))


def _fill(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """Zeros of any dtype, or ones of BOOL: the two constants that formats ask for."""
    left = tensor_bytes(move.dtype, move.shape)
    byte = b"\1" if move.number else b"\0"
    while left:
        yield byte * min(left, size)
        left -= min(left, size)


def _merge_copies(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """The first source. Raises `FormatError` unless the others hold the same bytes."""
    first, *copies = sources
    streams = (handle.chunks(max(size // len(sources), 1)) for handle in sources)
    for chunks in zip(*streams, strict=True):
        piece, *others = map(bytes, chunks)
        for copy, other in zip(copies, others, strict=True):
            if other != piece:
                raise FormatError(
                    f"tensor {copy.name} differs from {first.name}, which the config says it repeats",
                    where=copy.origin,
                    hint="fetch the checkpoint again; if it stays so, its weights are not tied",
                )
        yield piece


def _select_rows(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """The rows of a matrix that the second source numbers, in its order."""
    matrix, rows = (handle.load() for handle in sources)
    yield from _tensor_chunks(matrix[rows], move.dtype, size)


def _add_lora(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """W + scale · B·A by blocks of rows; `add_lora_transposed` adds scale · (B·A)ᵀ.

    In fp32 (fp64 for an fp64 weight) and rounded once to the weight's dtype, as `peft` merges into a model whose
    adapter is in fp32. A [r, in], B [out, r], W [out, in], for the transposed kind [in, out].
    """
    import torch

    from draftkit.io.dtypes import torch_dtype

    weight, a, b = sources
    assert move.number is not None
    precise = torch.promote_types(torch_dtype(move.dtype), torch.float32)
    left, right = b.load().to(precise), a.load().to(precise)
    if move.operation == "add_lora_transposed":
        left, right = right.T, left.T
    first = 0
    for rows in _row_blocks(weight, size):
        update = (left[first : first + len(rows)] @ right) * move.number
        first += len(rows)
        yield from _tensor_chunks(rows + update, move.dtype, size)


def _add_dora(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """m · (W + scale · B·A) / ‖W + scale · B·A‖, the norm that of each output over all inputs, m [out].

    Otherwise as `_add_lora`; the transposed kind has the outputs of W in its columns.
    """
    import torch

    from draftkit.io.dtypes import torch_dtype

    assert move.number is not None
    precise = torch.promote_types(torch_dtype(move.dtype), torch.float32)
    weight, a, b, magnitude = (handle.load().to(precise) for handle in sources)
    outputs = (1, -1) if move.operation == "add_dora_transposed" else (-1, 1)
    update = b @ a
    merged = weight + (update if outputs == (-1, 1) else update.T) * move.number
    norms = torch.linalg.norm(merged if outputs == (-1, 1) else merged.T, dim=1)
    yield from _tensor_chunks((magnitude.flatten() / norms).view(outputs) * merged, move.dtype, size)


def _fold_bias(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """Embedding rows E + d with W_e·d = b, where W_e is the half of `fc` that reads the embedding.

    Then fc(e + d, h) without its bias is what fc(e, h) was with it. Raises `LayoutError` when W_e cannot reach b.
    """
    import torch

    from draftkit.io.dtypes import torch_dtype

    table, fusion, bias = sources
    width, dtype = table.shape[1], torch_dtype(table.dtype)
    row_bytes = tensor_bytes(table.dtype, (width,))
    shift: torch.Tensor | None = None
    for chunk in table.chunks(max(size // row_bytes, 1) * row_bytes):
        rows = torch.frombuffer(bytearray(chunk), dtype=dtype).view(-1, width).double()
        if shift is None:
            shift, error = _bias_shift(
                rows[:FOLD_SAMPLE], fusion.load()[:, :width].double(), bias.load().double(), dtype
            )
            if not error <= MAX_FOLD_ERROR:
                raise LayoutError(
                    f"{bias.name} cannot be folded into the embedding: fc would be {error:.1%} off",
                    where=bias.origin,
                    hint="serve the draft with an engine that has the bias, as SGLang: --to sglang",
                )
        yield from _tensor_chunks(rows + shift, move.dtype, size)


def _bias_shift(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, float]:
    """The shift d [H] that serves best once embedding `rows` [n, H] + d are rounded to `dtype`, and the error left.

    Solving W_e·d = b exactly makes d long where W_e is nearly singular, and rounding then costs more than a small
    remainder of b would. Among ridge solutions, the one is taken whose result is nearest to the truth.
    """
    import torch

    left, singular, right = torch.linalg.svd(weight)
    wanted = rows @ weight.T + bias
    best, least = bias, float("inf")
    for ridge in FOLD_RIDGES:
        damped = singular / (singular.square() + ridge * singular[0].square()).clamp_min(torch.finfo().tiny)
        shift = right.T @ (damped * (left.T @ bias))
        error = float(((rows + shift).to(dtype).double() @ weight.T - wanted).norm() / wanted.norm())
        if error < least:
            best, least = shift, error
    return best, least


def _interleave(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """Queries or keys that rotate pairs of rows half a head apart → pairs of neighbors; `part_halves` the way back.

    In the dtype of the result.
    """
    import numpy

    assert move.number is not None
    source = sources[0]
    row = tensor_bytes(source.dtype, move.shape[1:])
    rows = move.shape[0] // int(move.number)
    order = numpy.arange(rows).reshape(2, -1).T.ravel()  # of the rows of a head, as they are to stand
    order = order if move.operation == "interleave" else order.argsort()
    for heads in source.blocks(rows * row):
        ordered = numpy.frombuffer(heads, numpy.uint8).reshape(-1, rows, row)[:, order]
        yield from _in_dtype(ordered.tobytes(), source.dtype, move.dtype)


def _cast(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """The same numbers in another dtype, rounded to nearest."""
    for numbers in sources[0].blocks(tensor_bytes(sources[0].dtype, (1,))):
        yield from _in_dtype(numbers, sources[0].dtype, move.dtype)


def _add(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """Every number and the same other one, computed in float32."""
    assert move.number is not None
    yield from _tensor_chunks(sources[0].load().float() + move.number, move.dtype, size)


def _stack(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """Tensors of one shape and dtype, one after the other."""
    for source in sources:
        yield from source.chunks(size)


def _unstack(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """One matrix of a stack, by its `number`."""
    assert move.number is not None
    yield from _cast(move, [sources[0].part(int(move.number))], size)


def _part_rows(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """Take, of n matrices one above the other, rows of each, from row `number` on; of the transposed kind, each as its
    transpose. [n, rows, columns], or [n, columns, rows]."""
    assert move.number is not None
    transposed, begin = move.operation.endswith("transposed"), int(move.number)
    count, rows, columns = move.shape
    if transposed:
        rows, columns = columns, rows
    part = sources[0].load().reshape(count, -1, columns)[:, begin : begin + rows]
    yield from _tensor_chunks(part.transpose(1, 2) if transposed else part, move.dtype, size)


def _join_rows(move: Move, sources: Sequence[TensorHandle], size: int) -> Iterator[Chunk]:
    """The way back from a transposed part and the other one."""
    import torch

    first, second = (source.load() for source in sources)
    yield from _tensor_chunks(torch.cat((first.transpose(1, 2), second), dim=1), move.dtype, size)


def _in_dtype(numbers: bytes, before: str, after: str) -> Iterator[Chunk]:
    import torch

    from draftkit.io.dtypes import torch_dtype

    if before == after:
        yield numbers
    else:
        yield raw_memory(torch.frombuffer(bytearray(numbers), dtype=torch_dtype(before)).to(torch_dtype(after)))


STREAMS: dict[str, Callable[[Move, Sequence[TensorHandle], int], Iterator[Chunk]]] = {
    "first_rows": _first_rows,
    "offset_to_index": _offset_to_index,
    "index_to_offset": _index_to_offset,
    "offset_to_mask": _offset_to_mask,
    "mask_to_offset": _mask_to_offset,
    "widen": _widen,
    "fill": _fill,
    "merge_copies": _merge_copies,
    "select_rows": _select_rows,
    "add_lora": _add_lora,
    "add_lora_transposed": _add_lora,
    "add_dora": _add_dora,
    "add_dora_transposed": _add_dora,
    "fold_bias": _fold_bias,
    "interleave": _interleave,
    "part_halves": _interleave,
    "cast": _cast,
    "add": _add,
    "stack": _stack,
    "unstack": _unstack,
    "part_rows": _part_rows,
    "part_rows_transposed": _part_rows,
    "join_rows": _join_rows,
}


def integers(handle: TensorHandle) -> array[int]:
    """The values of an I64 or I32 tensor."""
    values: array[int] = array("i" if handle.dtype == "I32" else "q")
    for chunk in handle.chunks(CHUNK_BYTES):
        values.frombytes(bytes(chunk))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def marked(mask: TensorHandle) -> list[int]:
    """The positions of the true values of a BOOL tensor."""
    flags = b"".join(bytes(chunk) for chunk in mask.chunks(CHUNK_BYTES))
    return list(compress(range(len(flags)), flags))


def _bytes(values: Iterator[int]) -> bytes:
    result = array("q", values)
    if sys.byteorder == "big":
        result.byteswap()
    return result.tobytes()


def _row_blocks(matrix: TensorHandle, size: int) -> Iterator[torch.Tensor]:
    """A matrix as blocks of whole rows, of about `size` bytes."""
    import torch

    from draftkit.io.dtypes import torch_dtype

    width = matrix.shape[1]
    row_bytes = tensor_bytes(matrix.dtype, (width,))
    for chunk in matrix.chunks(max(size // row_bytes, 1) * row_bytes):
        yield torch.frombuffer(bytearray(chunk), dtype=torch_dtype(matrix.dtype)).view(-1, width)


def _tensor_chunks(tensor: torch.Tensor, dtype: str, size: int) -> Iterator[Chunk]:
    from draftkit.io.dtypes import torch_dtype

    memory = raw_memory(tensor.to(torch_dtype(dtype)).contiguous())
    for start in range(0, len(memory), size):
        yield memory[start : start + size]
