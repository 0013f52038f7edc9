"""Reading and writing one GGUF file: its metadata, and its tensors as streams. The package `gguf` knows the format.

A matrix may lie in blocks of quantized numbers, each row for itself; it is read as float32, and written from any float.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftkit.errors import DraftkitError, FormatError, LayoutError, SourceError
from draftkit.io.dtypes import FLOATS, tensor_bytes, torch_dtype
from draftkit.io.handles import Chunk, TensorHandle, file_chunks, raw_memory
from draftkit.version import with_extra

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader, GGUFWriter

PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32")  # types of GGUF that are dtypes under the same name
# What matrices can be written as: the name for users → GGUF's, and the number of it for a whole file (`LlamaFileType`).
TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
PRECISE = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
ARCHITECTURE, FILE_TYPE = "general.architecture", "general.file_type"
TOKENIZER = "tokenizer."  # what the keys of the tokenizer begin with
TOKENS = "tokenizer.ggml.tokens"
LISTS = (TOKENS, "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")


class Typed(NamedTuple):
    """A value of the metadata as another file has it: with GGUF's numbers of its type, and of a list's items."""

    value: Any
    type: int
    items: int | None


@dataclass(frozen=True)
class GgufFile:
    """What a file says, and its tensors in the order of the file, not read yet.

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
        """The bytes in the file."""
        if self.handle.dtype == self.type:
            yield from self.handle.chunks()
            return
        for rows in _rows(self.handle):
            yield from _encoded(rows, self.type)


def open_reader(file: Path) -> GGUFReader:
    """The reader of a file, whole as far as its header says.

    Raises `DraftkitError` without the package `gguf`, `FormatError` for what is damaged, `SourceError` for one part of
    several.
    """
    gguf = _gguf(file)
    try:
        reader = gguf.GGUFReader(file)
    except Exception as error:  # whatever it stumbles over: it believes what it reads
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise FormatError(
            f"{file.name} is no GGUF file, or is damaged or cut short: {reason}", where=file, hint="fetch it again"
        ) from error
    if (parts := value_of(reader, "split.count") or 1) > 1:
        raise SourceError(
            f"{file.name} is one of {parts} parts, and a GGUF file is read in one",
            where=file,
            hint="llama-gguf-split --merge joins them",
        )
    return reader


def value_of(reader: GGUFReader, key: str) -> Any:
    """What the file says under a key, None where it says nothing; a float32 as the shortest number that it is."""
    field = reader.get_field(key)
    if field is None:
        return None
    value = field.contents()
    return _shortest(value) if field.types[-1].name == "FLOAT32" and isinstance(value, float) else value


def read_gguf(file: Path) -> GgufFile:
    """A file of tensors and metadata; no tensor is read. Raises as `open_reader`."""
    reader = open_reader(file)
    names = [name for name in reader.fields if not name.startswith("GGUF.")]
    metadata = {name: len(reader.fields[name].data) if name in LISTS else value_of(reader, name) for name in names}
    return GgufFile(metadata, [_handle(file, tensor) for tensor in reader.tensors])


def stored_tensors(file: Path) -> list[GgufTensor]:
    """The tensors of a file for another to have: byte for byte, quantized ones too. Raises as `open_reader`."""
    found = []
    for tensor in open_reader(file).tensors:
        handle, kind = _handle(file, tensor), tensor.tensor_type.name
        raw = partial(file_chunks, file, int(tensor.data_offset), int(tensor.n_bytes))
        found.append(GgufTensor(replace(handle, dtype=kind, reader=raw), kind))
    return found


def read_typed(file: Path, prefix: str) -> dict[str, Typed]:
    """The metadata under keys that begin with `prefix`, for another file to have. Raises as `open_reader`."""
    found = ((name, field) for name, field in open_reader(file).fields.items() if name.startswith(prefix))
    return {
        name: Typed(field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in found
    }


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


def _handle(file: Path, tensor: Any) -> TensorHandle:
    """A tensor of the reader, whose shape runs from the innermost dimension outward."""
    shape, kind = tuple(int(size) for size in tensor.shape[::-1]), tensor.tensor_type.name
    stored = GgufNumbers(file, int(tensor.data_offset), int(tensor.n_bytes), kind, shape[-1])
    return TensorHandle(tensor.name, kind if kind in PLAIN else "F32", shape, file, stored)


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


def _shortest(value: float) -> float:
    """The shortest decimal that is this number in float32."""
    packed = struct.pack("f", value)
    return next(short for digits in range(1, 18) if struct.pack("f", short := float(f"{value:.{digits}g}")) == packed)
