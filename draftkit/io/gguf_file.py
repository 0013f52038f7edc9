"""Reading and writing one GGUF file: its metadata, and its tensors as streams.

The header is read here, and believed only after it accounts for every byte of the file, as llama.cpp's own reader
(b11434, `ggml/src/gguf.cpp`) asks; that of the package `gguf` believes counts, sizes and offsets. The package has the
numbers of the types, and their blocks. A matrix may lie in blocks of quantized numbers, each row for itself; it is read
as float32, and written from any float.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from draftkit.errors import DraftkitError, FormatError, LayoutError, SourceError
from draftkit.io.dtypes import FLOATS, tensor_bytes, torch_dtype
from draftkit.io.handles import Chunk, TensorHandle, file_chunks, open_source, raw_memory
from draftkit.io.records import excerpt
from draftkit.version import with_extra

if TYPE_CHECKING:
    import torch
    from gguf import GGUFWriter

MAGIC, VERSIONS = b"GGUF", (2, 3)
# GGUF's numbers of the types of metadata, and what `struct` calls those that are one number.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
ALIGNMENT, ALIGNMENT_KEY = 32, "general.alignment"  # bytes, where the key does not say other
MOST_DIMENSIONS = 4
NAME_BYTES = 64  # of a tensor's name in llama.cpp, the zero behind it included

# Types of GGUF that are dtypes under the same name.
PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")
# What matrices can be written as: the name for users → GGUF's, and the number of it for a whole file (`LlamaFileType`).
TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
PRECISE = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
ARCHITECTURE, FILE_TYPE = "general.architecture", "general.file_type"
TOKENIZER = "tokenizer."  # what the keys of the tokenizer begin with
TOKENS = "tokenizer.ggml.tokens"
Value = TypeVar("Value", int, str, list)
LISTS = (TOKENS, "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")


class Typed(NamedTuple):
    """A value of the metadata as another file has it: with GGUF's numbers of its type, and of a list's items."""

    value: Any
    type: int
    items: int | None


class GgufRegion(NamedTuple):
    """Where a tensor lies in a file: `nbytes` from byte `start` on. `kind`: GGUF's name of its type."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors: its metadata, and where each tensor lies."""

    file: Path
    metadata: dict[str, Typed]
    regions: list[GgufRegion]

    def value(self, key: str, kind: type[Value]) -> Value | None:
        """What the file says under a key, None where it says nothing. Raises `FormatError` for another type."""
        found = self.metadata.get(key)
        if found is None:
            return None
        if type(found.value) is not kind:
            raise FormatError(
                f"GGUF key {key} is {excerpt(found.value)}",
                where=self.file,
                expected=kind.__name__,
                hint="fetch it again",
            )
        return found.value

    def length(self, key: str) -> int | None:
        """How long the list under a key is. Raises as `value`."""
        found = self.value(key, list)
        return None if found is None else len(found)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its metadata, and its tensors in the order of the file, not read yet.

    `metadata`: the tokenizer's long lists (`LISTS`) stand as their lengths.
    """

    metadata: dict[str, Any]
    tensors: list[TensorHandle]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write, under GGUF's name of the type that it is written as."""

    handle: TensorHandle
    type: str

    @property
    def nbytes(self) -> int:
        return _nbytes(self.type, self.handle.shape)

    def chunks(self) -> Iterator[Chunk]:
        """The tensor's bytes as the file holds them."""
        if self.handle.dtype == self.type:
            yield from self.handle.chunks()
            return
        for rows in _rows(self.handle):
            yield from _encoded(rows, self.type)


def read_header(file: Path) -> Header:
    """The header of a file, which accounts for every byte of it.

    Raises `DraftkitError` without the package `gguf`, `SourceError` for a file that cannot be read and for one part of
    several, `FormatError` for what is damaged.
    """
    _gguf(file)
    with open_source(file) as source:
        try:
            with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _parsed(_Cursor(data), file)
        except ValueError as error:  # an empty file is none that mmap takes
            raise FormatError(
                f"{file.name} is no GGUF file, or is damaged or cut short: {error}", where=file, hint="fetch it again"
            ) from error
    if (parts := header.value("split.count", int) or 1) > 1:
        raise SourceError(
            f"{file.name} is one of {parts} parts, and a GGUF file is read in one",
            where=file,
            hint="llama-gguf-split --merge joins them",
        )
    return header


def read_gguf(file: Path) -> GgufFile:
    """A file of tensors and metadata; no tensor is read. Raises as `read_header`."""
    header = read_header(file)
    metadata = {name: _plain(found) for name, found in header.metadata.items()}
    metadata |= {name: header.length(name) for name in LISTS if name in metadata}
    return GgufFile(metadata, [_handle(file, region) for region in header.regions])


def stored_tensors(file: Path) -> list[GgufTensor]:
    """The tensors of a file for another to have: byte for byte, quantized ones too. Raises as `read_header`."""
    return [
        GgufTensor(TensorHandle(r.name, r.kind, r.shape, file, partial(file_chunks, file, r.start, r.nbytes)), r.kind)
        for r in read_header(file).regions
    ]


def read_typed(file: Path, prefix: str) -> dict[str, Typed]:
    """The metadata under keys that begin with `prefix`, for another file to have. Raises as `read_header`."""
    return {name: found for name, found in read_header(file).metadata.items() if name.startswith(prefix)}


def type_of(handle: TensorHandle, wanted: str) -> str:
    """GGUF's type for a tensor where matrices are `wanted`, one of `TYPES`.

    As llama.cpp's converter chooses (`conversion/base.py`): float32 for vectors, norms, routers and what is no
    `.weight`; rows that blocks do not fill in float16.
    """
    kind, _ = TYPES[wanted]
    if handle.dtype not in FLOATS:
        return handle.dtype
    if len(handle.shape) < 2 or not handle.name.endswith(".weight") or handle.name.endswith(PRECISE):
        return "F32"
    return kind if kind in PLAIN or handle.shape[-1] % _block(kind)[0] == 0 else "F16"


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Sequence[GgufTensor],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write a file, one chunk of one tensor in memory at a time.

    `metadata`: integers are written as uint32, those in lists as int32; `Typed` values as they are. Raises
    `LayoutError` for chunks that do not add up to their tensor's size; an unfinished file stays behind, so write
    inside `atomic_file`.
    """
    gguf = _gguf(path)
    import numpy

    writer = gguf.GGUFWriter(path, str(metadata[ARCHITECTURE]))
    for key, value in metadata.items():
        if key != ARCHITECTURE:
            _add(writer, key, value)
    for tensor in tensors:
        kind, handle = gguf.GGMLQuantizationType[tensor.type], tensor.handle
        writer.add_tensor_info(handle.name, handle.shape, numpy.dtype(numpy.float32), tensor.nbytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        for tensor in tensors:
            written = 0
            for chunk in tensor.chunks():
                written += file.write(chunk)
                if on_bytes is not None:
                    on_bytes(len(chunk))
            if written != tensor.nbytes:
                raise LayoutError(
                    f"tensor {tensor.handle.name} came with {written:,} bytes", expected=f"{tensor.nbytes:,}"
                )
            writer.write_padding(file, written)
    finally:
        writer.close()


def _gguf(file: Path | None = None) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise DraftkitError(
            "GGUF files are read and written with the package gguf", where=file, hint=with_extra("gguf")
        ) from error
    return gguf


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    from gguf import GGUFValueType

    if isinstance(value, Typed) and value.type == ARRAY and not value.value:
        return  # the package writes no list without items
    if isinstance(value, Typed):
        items = None if value.items is None else GGUFValueType(value.items)
        writer.add_key_value(key, value.value, GGUFValueType(value.type), items)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list | tuple)
        writer.add_array(key, list(value))


@dataclass(frozen=True)
class GgufNumbers:
    """The bytes of a tensor in a file; where they are quantized, by whole rows of `width` numbers, as float32."""

    file: Path
    start: int
    nbytes: int
    kind: str
    width: int

    def __call__(self, size: int) -> Iterator[Chunk]:
        if self.kind in PLAIN:
            yield from file_chunks(self.file, self.start, self.nbytes, size)
            return
        import numpy
        from gguf import GGMLQuantizationType, dequantize

        row = _nbytes(self.kind, (self.width,))
        rows = max(size // (4 * self.width), 1)
        for chunk in file_chunks(self.file, self.start, self.nbytes, rows * row):
            stored = numpy.frombuffer(chunk, numpy.uint8).reshape(-1, row)
            yield dequantize(stored, GGMLQuantizationType[self.kind]).astype(numpy.float32).tobytes()

    def part(self, index: int, count: int) -> GgufNumbers:
        nbytes = self.nbytes // count
        return replace(self, start=self.start + index * nbytes, nbytes=nbytes)


def _handle(file: Path, region: GgufRegion) -> TensorHandle:
    """A tensor to be read. Raises `FormatError` for a type whose blocks nobody unpacks."""
    if region.kind not in PLAIN and not _is_unpacked(region.kind):
        raise FormatError(
            f"tensor {region.name} is of type {region.kind}, which the package gguf does not unpack",
            where=file,
            hint="convert the file that it was quantized from",
        )
    stored = GgufNumbers(file, region.start, region.nbytes, region.kind, region.shape[-1])
    return TensorHandle(region.name, region.kind if region.kind in PLAIN else "F32", region.shape, file, stored)


def _rows(handle: TensorHandle) -> Iterator[torch.Tensor]:
    """A tensor as blocks of whole rows."""
    import torch

    width, dtype = handle.shape[-1], torch_dtype(handle.dtype)
    for block in handle.blocks(tensor_bytes(handle.dtype, (width,))):
        yield torch.frombuffer(bytearray(block), dtype=dtype).view(-1, width)


def _encoded(rows: torch.Tensor, kind: str) -> Iterator[Chunk]:
    if kind in PLAIN:
        yield raw_memory(rows.to(torch_dtype(kind)).contiguous())
        return
    from gguf import GGMLQuantizationType, quantize

    yield quantize(rows.float().numpy(), GGMLQuantizationType[kind]).tobytes()


def _nbytes(kind: str, shape: Sequence[int]) -> int:
    numbers, size = _block(kind)
    return math.prod(shape) // numbers * size


def _block(kind: str) -> tuple[int, int]:
    """How many numbers a block of this type has, and how many bytes."""
    gguf = _gguf()
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return numbers, size


def _is_unpacked(kind: str) -> bool:
    import numpy
    from gguf import GGMLQuantizationType, dequantize

    try:
        dequantize(numpy.zeros((1, _block(kind)[1]), numpy.uint8), GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def _plain(found: Typed) -> Any:
    """A value of the metadata as Python has it; a float32 as the shortest decimal that is this number."""
    return _shortest(found.value) if found.type == FLOAT32 and math.isfinite(found.value) else found.value


def _shortest(value: float) -> float:
    packed = struct.pack("f", value)
    return next(short for digits in range(1, 18) if struct.pack("f", short := float(f"{value:.{digits}g}")) == packed)


class _Cursor:
    """A place in the bytes of a file. Raises `ValueError` for what would lie behind their end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def taken(self, nbytes: int) -> bytes:
        if nbytes > len(self.data) - self.at:
            raise ValueError(f"{nbytes:,} bytes are announced at byte {self.at:,} of {len(self.data):,}")
        begin, self.at = self.at, self.at + nbytes
        return self.data[begin : self.at]

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{count}{code}", self.taken(count * size))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        data = self.taken(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"a text that ends at byte {self.at:,} is not UTF-8") from None


def _parsed(cursor: _Cursor, file: Path) -> Header:
    """The header that begins the file. Raises `ValueError` for anything that llama.cpp would not load."""
    if cursor.taken(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with the four bytes GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise ValueError(
            "its numbers are big-endian" if swapped in VERSIONS else f"it is of version {version}, not of 2 or 3"
        )
    num_tensors, num_keys = cursor.numbers("Q", 2)
    metadata: dict[str, Typed] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if not key or key in metadata:
            raise ValueError(f"the key {key!r} appears twice" if key else "a key is empty")
        metadata[key] = _value(cursor, key)
    entries = [_entry(cursor) for _ in range(num_tensors)]
    return Header(file, metadata, _regions(entries, cursor, _alignment(metadata)))


def _value(cursor: _Cursor, key: str) -> Typed:
    kind = cursor.number("I")
    if kind == ARRAY:
        items, count = cursor.number("I"), cursor.number("Q")
        if items == STRING:
            return Typed([cursor.text() for _ in range(count)], kind, items)
        if items in NUMBERS:
            return Typed(list(cursor.numbers(NUMBERS[items], count)), kind, items)
        kind = items
    elif kind == STRING:
        return Typed(cursor.text(), kind, None)
    elif kind in NUMBERS:
        return Typed(cursor.number(NUMBERS[kind]), kind, None)
    raise ValueError(f"the key {key!r} is of the unknown type {kind}")


def _alignment(metadata: Mapping[str, Typed]) -> int:
    """The bytes of which every tensor's offset is a multiple."""
    stated = metadata.get(ALIGNMENT_KEY)
    if stated is None:
        return ALIGNMENT
    if stated.type != UINT32 or stated.value.bit_count() != 1:
        raise ValueError(f"{ALIGNMENT_KEY} is {stated.value}, and no power of two")
    return int(stated.value)


def _entry(cursor: _Cursor) -> GgufRegion:
    """What the header says of a tensor, whose dimensions run from the innermost outward; `start`: as it says it."""
    name = cursor.text()
    if not 0 < len(name.encode()) < NAME_BYTES or "\0" in name:
        raise ValueError(f"tensor {name!r} has a name of {len(name.encode())} bytes, not of 1 to {NAME_BYTES - 1}")
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}")
    shape = cursor.numbers("Q", dimensions)[::-1]
    if math.prod(size or 1 for size in shape) >= 1 << 63:
        raise ValueError(f"tensor {name!r} has the impossible shape {list(shape)}")
    number, start = cursor.number("I"), cursor.number("Q")
    kind = _kind_named(number)
    if kind is None:
        raise ValueError(f"tensor {name!r} is of the unknown type {number}")
    if shape[-1] % _block(kind)[0]:
        raise ValueError(f"tensor {name!r} has rows of {shape[-1]} numbers, and {kind} blocks of {_block(kind)[0]}")
    return GgufRegion(name, kind, shape, start, _nbytes(kind, shape))


def _regions(entries: Sequence[GgufRegion], cursor: _Cursor, alignment: int) -> list[GgufRegion]:
    """The tensors where they lie in the file, each behind the one before: no byte is shared or hidden."""
    begin, size = _padded(cursor.at, alignment), len(cursor.data)
    found: dict[str, GgufRegion] = {}
    offset = end = 0
    for entry in entries:
        if entry.name in found:
            raise ValueError(f"there are two tensors {entry.name!r}")
        if entry.start != offset:
            raise ValueError(f"tensor {entry.name!r} is said to begin at byte {entry.start}, which is byte {offset}")
        end, offset = offset + entry.nbytes, _padded(offset + entry.nbytes, alignment)
        found[entry.name] = entry._replace(start=begin + entry.start)
    least = begin + end if entries else cursor.at  # what is behind the last may be left out
    if not least <= size <= begin + offset:
        raise ValueError(f"the last tensor ends at byte {least:,}, and the file at byte {size:,}")
    return list(found.values())


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _kind_named(number: int) -> str | None:
    gguf = _gguf()
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        return None
    return str(kind.name) if kind in gguf.GGML_QUANT_SIZES else None
