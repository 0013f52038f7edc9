"""Finding NaN and infinities in tensors, of a checkpoint or in memory, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit.errors import FormatError
from draftkit.io.dtypes import DTYPES, dtype_name, torch_dtype
from draftkit.io.handles import TensorHandle, raw_memory

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 1 << 20  # stays in the processor's cache between being read and being looked at
LOADED_BLOCK = 1 << 24  # elements of a tensor in memory that are looked at together: few waits for a device
FLOATING = {name for name in DTYPES if name.startswith(("F", "BF"))}


@dataclass(frozen=True)
class NonFinite:
    """A tensor with values that are no numbers: how many are NaN, how many ±inf, and the index of the first one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        counts = f"{self.nan:,} NaN, {self.inf:,} infinite"
        return f"{self.name} ({self.dtype} {list(self.shape)}): {counts}, the first at {list(self.first)}"


def find_non_finite(tensors: Mapping[str, TensorHandle]) -> list[NonFinite]:
    """The tensors, in their order, that hold NaN or an infinity; integers, booleans and complex numbers hold neither.

    Reads every byte of every floating-point tensor, a megabyte at a time. Raises `FormatError`/`SourceError` for a file
    that changes or goes away meanwhile.
    """
    found = (_search(name, h.dtype, h.shape, _blocks(h)) for name, h in tensors.items() if h.dtype in FLOATING)
    return [non_finite for non_finite in found if non_finite is not None]


def check_finite(tensors: Mapping[str, TensorHandle], where: Path) -> None:
    """Read every tensor of a draft. Raises `FormatError` that names those with NaN or inf, and how many."""
    found = find_non_finite(tensors)
    if found:
        listing = "\n    ".join(map(str, found))
        raise FormatError(
            f"{len(found)} of {len(tensors)} tensors hold numbers that are not finite:\n    {listing}",
            where=where,
            hint="fetch the checkpoint again; if its author's copy has them too, the training diverged",
        )


def find_non_finite_loaded(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[NonFinite]:
    """The tensors in memory, on any device, that hold NaN or an infinity; no second copy of one is made."""
    found = (
        _search(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.detach().flatten().split(LOADED_BLOCK))
        for name, tensor in tensors
        if tensor.is_floating_point() and tensor.numel()
    )
    return [non_finite for non_finite in found if non_finite is not None]


def _search(name: str, dtype: str, shape: tuple[int, ...], blocks: Iterable[torch.Tensor]) -> NonFinite | None:
    nan = inf = position = 0
    first: int | None = None
    for block in blocks:
        if not _is_finite(block):
            values = block.float() if block.itemsize == 1 else block  # torch has no isnan for fp8
            is_nan, is_inf = values.isnan(), values.isinf()
            nan += int(is_nan.sum())
            inf += int(is_inf.sum())
            if first is None:
                first = position + int((is_nan | is_inf).nonzero()[0])
        position += block.numel()
    return None if first is None else NonFinite(name, dtype, shape, nan, inf, _index(first, shape))


def _is_finite(block: torch.Tensor) -> bool:
    """Whether all values are finite, at the speed of memory: `isfinite` is twenty times slower on 16-bit values."""
    import torch

    if block.itemsize > 1:
        return all(extreme.isfinite() for extreme in torch.aminmax(block))  # NaN is passed on as either
    codes = torch.arange(256, dtype=torch.uint8, device=block.device)
    present = block.view(torch.uint8).bincount(minlength=256) > 0
    return bool(codes[present].view(block.dtype).float().isfinite().all())


def _blocks(handle: TensorHandle) -> Iterator[torch.Tensor]:
    """The tensor's elements in order, flat, a block at a time; each block overwrites the one before it."""
    import torch

    dtype = torch_dtype(handle.dtype)
    block = torch.empty(min(BLOCK_BYTES, handle.nbytes), dtype=torch.uint8)
    memory, filled = raw_memory(block), 0
    for chunk in handle.chunks(BLOCK_BYTES):
        rest = memoryview(chunk).cast("B")  # a chunk may end in the middle of an element
        while rest:
            taken = min(len(rest), len(memory) - filled)
            memory[filled : filled + taken] = rest[:taken]
            filled, rest = filled + taken, rest[taken:]
            if filled == len(memory):
                yield block.view(dtype)
                filled = 0
    if filled:
        yield block[:filled].view(dtype)


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element at a position in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.insert(0, remainder)
    return tuple(index)
