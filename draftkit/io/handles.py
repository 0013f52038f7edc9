"""A tensor as a stream of bytes: one that lies in a file, one that is to be written to a file; and opening such files.

Tensors pass chunk by chunk, so that a checkpoint of any size goes through a few megabytes of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, TypeAlias, runtime_checkable

from draftkit.errors import FormatError, SourceError
from draftkit.io.dtypes import dtype_name, tensor_bytes, torch_dtype

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1 << 20  # small enough to be written while it is still in the processor's cache
GIT_LFS_POINTER = b"version https://git-lfs"

Chunk: TypeAlias = bytes | bytearray | memoryview


class TensorToWrite(NamedTuple):
    """A tensor that a writer takes: `chunks` are its little-endian bytes in row-major order, read once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[Chunk]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@runtime_checkable
class Divisible(Protocol):
    """A reader of a tensor that can begin within it."""

    def part(self, index: int, count: int) -> Callable[[int], Iterator[Chunk]]:
        """The reader of one of `count` equal parts."""


@dataclass(frozen=True)
class TensorHandle:
    """A tensor that lies in a file and has not been read.

    `reader` takes a chunk size and yields the tensor's bytes, exactly `nbytes` of them, or raises `FormatError`.
    To rename a tensor, use `dataclasses.replace(handle, name=...)`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: Path  # the file it lies in
    reader: Callable[[int], Iterator[Chunk]] = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            self.name.encode()
        except UnicodeEncodeError:
            raise FormatError(f"tensor name {self.name!r} is not valid Unicode", where=self.origin) from None

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """The tensor's little-endian bytes in row-major order, at most `size` at a time."""
        return self.reader(size)

    def blocks(self, block: int) -> Iterator[bytes]:
        """The tensor's bytes in pieces of whole blocks of `block` bytes: about `CHUNK_BYTES` each, one block at
        least."""
        size, held = max(CHUNK_BYTES // block, 1) * block, bytearray()
        for chunk in self.chunks(size):
            held += chunk
            whole = len(held) // block * block
            if whole:
                yield bytes(held[:whole])
                del held[:whole]

    def part(self, index: int) -> TensorHandle:
        """One of the tensors that this one is a stack of, along its first dimension."""
        assert isinstance(self.reader, Divisible)
        return replace(self, shape=self.shape[1:], reader=self.reader.part(index, self.shape[0]))

    def load(self) -> torch.Tensor:
        """The tensor on the CPU, of `dtype` and `shape`, in memory of its own."""
        import torch

        tensor = torch.empty(self.shape, dtype=torch_dtype(self.dtype))
        memory, filled = raw_memory(tensor), 0
        for chunk in self.chunks():
            memory[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return tensor


def raw_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it: writing to them writes to the tensor."""
    import torch

    # Not reshape(-1): torch calls a tensor of one element contiguous whatever its stride, and then refuses the view.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def memory_handle(name: str, tensor: torch.Tensor, origin: Path) -> TensorHandle:
    """A contiguous CPU tensor in memory as one that can be written."""

    def chunks(size: int) -> Iterator[Chunk]:
        memory = raw_memory(tensor)
        return (memory[begin : begin + size] for begin in range(0, len(memory), size))

    return TensorHandle(name, dtype_name(tensor.dtype), tuple(tensor.shape), origin, chunks)


@contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """Open a weight file for reading, at its start.

    Raises `SourceError` when it cannot be opened or read, `FormatError` when a clone without Git LFS left a pointer.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER:
                raise FormatError(
                    f"{path.name} is a Git LFS pointer, not the weights", where=path, hint="run `git lfs pull` there"
                )
            file.seek(0)
            yield file
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror or error}", where=path) from error


def damaged(path: Path, found: int, expected: str, reason: str | None = None) -> FormatError:
    """The error for a file of `found` bytes that is cut off or damaged."""
    detail = f": {reason}" if reason else ""
    return FormatError(
        f"{path.name} is truncated or damaged ({found:,} bytes found){detail}",
        where=path,
        expected=expected,
        hint="download or copy the file again",
    )


def file_chunks(path: Path, start: int, nbytes: int, size: int) -> Iterator[bytes]:
    """Bytes of a file from `start` on, at most `size` at a time. Raises `FormatError` where it has shrunk since."""
    with open_source(path) as file:
        file.seek(start)
        while nbytes:
            chunk = file.read(min(size, nbytes))
            if not chunk:
                raise damaged(path, file.tell(), f"{nbytes:,} bytes more: the file has shrunk since it was opened")
            nbytes -= len(chunk)
            yield chunk
