"""Reading and writing one safetensors file as a stream, without decoding a tensor and without torch.

The format: eight bytes with the length of the header, little-endian; the header, a JSON object of
`name: {"dtype", "shape", "data_offsets": [begin, end]}` and an optional `__metadata__`; then the tensors' bytes,
which offsets count from. A file is believed only after its header accounts for every byte of it.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from draftkit.errors import FormatError, LayoutError
from draftkit.io.atomic import start_write_back
from draftkit.io.dtypes import DTYPES, tensor_bytes
from draftkit.io.handles import Chunk, TensorHandle, TensorToWrite, damaged, file_chunks, open_source

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_DIMENSIONS = 64  # torch's and numpy's limit
WRITE_BACK_BYTES = 16 << 20  # of a file, before the system is asked to put them on disk
METADATA = "__metadata__"
ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


class Region(NamedTuple):
    """Where a tensor lies: bytes `begin` to `end` after the header."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_safetensors(path: Path) -> list[TensorHandle]:
    """The tensors of a file in the order of their bytes; only the header is read.

    Raises `SourceError` when the file cannot be read, `FormatError` when it is no well-formed safetensors file.
    """
    data_start, regions = read_regions(path)
    return [
        TensorHandle(r.name, r.dtype, r.shape, path, partial(file_chunks, path, data_start + r.begin, r.end - r.begin))
        for r in regions
    ]


def read_regions(path: Path) -> tuple[int, list[Region]]:
    """Where the tensors' bytes begin in a file, and where each lies from there on, in their order.

    Raises as `read_safetensors`.
    """
    with open_source(path) as file:
        size = os.fstat(file.fileno()).st_size
        data_start, header = _read_header(file, size, path)
    _check_metadata(header.pop(METADATA, {}), path)
    regions = sorted(_region(name, entry, path) for name, entry in header.items())
    _check_cover(regions, path)
    expected = data_start + (regions[-1].end if regions else 0)
    if size != expected:
        raise damaged(path, size, f"{expected:,} bytes")
    return data_start, regions


def _read_header(file: BinaryIO, size: int, path: Path) -> tuple[int, dict[str, object]]:
    """Where the data starts, and the header's JSON object."""
    if size < LENGTH_BYTES:
        raise damaged(path, size, "a safetensors file")
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{path.name} claims a header of {length:,} bytes", where=path, expected="a safetensors file")
    if length > size - LENGTH_BYTES:
        raise damaged(path, size, f"at least {LENGTH_BYTES + length:,} bytes")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header of {path.name} is not valid: {error}", where=path) from error
    if not isinstance(header, dict):
        raise FormatError(f"the header of {path.name} is not a JSON object", where=path)
    return LENGTH_BYTES + length, header


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, unless a key is there twice: two readers could then see two different files."""
    if len(dict(pairs)) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} appears twice")
    return dict(pairs)


def _check_metadata(metadata: object, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"the header of {path.name} is not valid: {METADATA} is not an object of texts", where=path)


def _region(name: str, entry: object, path: Path) -> Region:
    """A header entry, once its shape, dtype and offsets agree."""
    if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        raise _bad_entry(name, "is not an object of dtype, shape and data_offsets", path)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad_entry(name, f"has the unknown dtype {dtype!r}", path)
    if not _is_naturals(shape) or len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) >= 1 << 63:
        raise _bad_entry(name, "has an impossible shape", path)
    if not _is_naturals(offsets) or len(offsets) != 2:
        raise _bad_entry(name, "has impossible data_offsets", path)
    begin, end = offsets
    if end - begin != tensor_bytes(dtype, tuple(shape)):
        raise _bad_entry(name, f"is {dtype} of shape {shape}, but its data_offsets are {offsets}", path)
    return Region(begin, end, name, dtype, tuple(shape))


def _is_naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _bad_entry(name: str, problem: str, path: Path) -> FormatError:
    return FormatError(f"the header of {path.name} is not valid: tensor {name!r} {problem}", where=path)


def _check_cover(regions: Sequence[Region], path: Path) -> None:
    """Sorted regions must follow each other from 0 on, so that no byte is shared or hidden."""
    end = 0
    for region in regions:
        if region.begin != end:
            raise _bad_entry(region.name, f"begins at byte {region.begin}, where the one before it ends at {end}", path)
        end = region.end


def write_safetensors(
    path: Path,
    tensors: Sequence[TensorToWrite],
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write tensors to one file, one chunk in memory at a time.

    The file is the one that `safetensors.torch.save_file` writes, byte for byte, with the metadata in key order.
    `on_bytes` is told the size of every chunk of tensor bytes. Raises `LayoutError` for a name given twice and for
    chunks that do not add up to the tensor's size; an unfinished file stays behind.
    """
    check_names([tensor.name for tensor in tensors], path)
    tensors = sorted(tensors, key=_place)
    with path.open("wb") as file:
        file.write(_header(tensors, metadata))
        begun = 0
        for tensor in tensors:
            for nbytes in _write_chunks(file, tensor, path):
                if on_bytes is not None:
                    on_bytes(nbytes)
                if file.tell() - begun >= WRITE_BACK_BYTES:
                    begun = start_write_back(file, begun)


def check_names(names: Sequence[str], path: Path) -> None:
    """Raise `LayoutError` for names that a file, or the shards of a folder, cannot hold together."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated or METADATA in names:
        raise LayoutError(f"tensor names that cannot be written: {repeated or [METADATA]}", where=path)


def _place(tensor: TensorToWrite) -> tuple[int, str]:
    """The safetensors library's order: widest dtype first, so that tensors stay aligned, then by name."""
    return -list(DTYPES).index(tensor.dtype), tensor.name


def _header(tensors: Sequence[TensorToWrite], metadata: Mapping[str, str] | None) -> bytes:
    """The header's length and the header, padded to eight bytes."""
    header: dict[str, object] = {} if metadata is None else {METADATA: dict(sorted(metadata.items()))}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write_chunks(file: BinaryIO, tensor: TensorToWrite, path: Path) -> Iterator[int]:
    """Write a tensor's bytes, and yield the size of every chunk once it is written."""
    expected, written = tensor.nbytes, 0
    for chunk in tensor.chunks:
        written += _nbytes(chunk)
        if written > expected:
            break
        file.write(chunk)
        yield _nbytes(chunk)
    if written != expected:
        found = "more" if written > expected else f"only {written:,}"
        raise LayoutError(
            f"tensor {tensor.name!r} came with {found} bytes",
            where=path,
            expected=f"{expected:,}: {tensor.dtype} {list(tensor.shape)}",
        )


def _nbytes(chunk: Chunk) -> int:
    return memoryview(chunk).nbytes
