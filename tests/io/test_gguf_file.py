"""The header of a GGUF file is believed only where it accounts for every byte; what the package `gguf` reads of a sound
file is what is read here."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from fixtures.checkpoints.gguf_files import Entry, Parts

from draftkit.errors import FormatError
from draftkit.io.gguf_file import Typed, read_gguf, read_header, read_typed, write_gguf

F32, BLOCKS = 0, 8  # GGUF's numbers of tensor types: plain, and blocks of 32 numbers in 34 bytes
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9


def parts() -> Parts:
    """Three tensors: 4 × 8 numbers, a vector that does not fill its place, one block."""
    tensors = [
        Entry(b"a", [8, 4], F32, np.arange(32, dtype="<f4").tobytes()),
        Entry(b"b", [5], F32, np.arange(5, dtype="<f4").tobytes()),
        Entry(b"c", [32, 1], BLOCKS, struct.pack("<e32b", 1.0, *range(32))),
    ]
    made = Parts([(b"general.architecture", STRING, Parts([], []).text(b"llama"))], tensors)
    return made.with_key("n", UINT32, struct.pack("<I", 7))


def written(tmp_path: Path, made: Parts) -> Path:
    (tmp_path / "a.gguf").write_bytes(made.encoded())
    return tmp_path / "a.gguf"


def test_a_sound_file_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    file = written(tmp_path, parts())
    theirs, ours = gguf.GGUFReader(file), read_header(file)
    assert [(t.name, int(t.data_offset), int(t.n_bytes)) for t in theirs.tensors] == [
        (r.name, r.start, r.nbytes) for r in ours.regions
    ]
    assert ours.metadata == {"general.architecture": ("llama", STRING, None), "n": (7, UINT32, None)}
    loaded = {handle.name: handle.load().numpy() for handle in read_gguf(file).tensors}
    assert loaded["a"].tolist() == np.arange(32.0).reshape(4, 8).tolist()
    assert loaded["c"].tolist() == [list(range(32))]


def of_tensor(place: int, **values: object) -> Callable[[Parts], object]:
    return lambda made: made.tensors[place].__dict__.update(values)


def of_file(**values: object) -> Callable[[Parts], object]:
    return lambda made: made.__dict__.update(values)


LIES: dict[str, tuple[Callable[[Parts], object], str]] = {
    "overlap": (of_tensor(1, offset=0), "'b' is said to begin at byte 0, which is byte 128"),
    "overlap in part": (of_tensor(1, offset=96), "which is byte 128"),
    "unaligned": (of_tensor(1, offset=129), "which is byte 128"),
    "a gap": (of_tensor(1, offset=160), "which is byte 128"),
    "beyond the file": (of_tensor(2, offset=1 << 40), "which is byte 160"),
    "2^64 - 1": (of_tensor(2, offset=(1 << 64) - 1), "which is byte 160"),
    "two of a name": (of_tensor(1, name=b"a"), "there are two tensors 'a'"),
    "no name": (of_tensor(1, name=b""), "a name of 0 bytes"),
    "a name with a zero": (of_tensor(1, name=b"b\0c"), "has a name"),
    "a long name": (of_tensor(1, name=b"b" * 64), "a name of 64 bytes"),
    "a product that wraps": (of_tensor(0, dimensions=[1 << 32, 1 << 32]), "impossible shape"),
    "a negative size": (of_tensor(1, dimensions=[(1 << 64) - 5]), "impossible shape"),
    "no dimensions": (of_tensor(1, dimensions=[]), "0 dimensions"),
    "five": (of_tensor(1, dimensions=[5, 1, 1, 1, 1]), "5 dimensions"),
    "rows that blocks do not fill": (of_tensor(2, dimensions=[16, 2]), "rows of 16 numbers, and Q8_0 blocks of 32"),
    "another type": (of_tensor(0, kind=1), "'b' is said to begin at byte 128, which is byte 64"),
    "no type": (of_tensor(0, kind=99), "unknown type 99"),
    "one tensor less": (of_file(num_tensors=2), "ends at byte"),
    "no tensors": (of_file(num_tensors=0), "ends at byte"),
    "2^64 - 1 tensors": (of_file(num_tensors=(1 << 64) - 1), "damaged or cut short"),
    "2^63 keys": (of_file(num_keys=1 << 63), "damaged or cut short"),
    "a key twice": (lambda made: made.keys.append(made.keys[0]), "appears twice"),
    "an empty key": (lambda made: made.with_key("", UINT32, bytes(4)), "a key is empty"),
    "a list of 2^60": (
        lambda made: made.with_key("l", ARRAY, struct.pack("<IQ", UINT32, 1 << 60)), "bytes are announced"),
    "a list of lists": (
        lambda made: made.with_key("l", ARRAY, struct.pack("<IQIQ", ARRAY, 1, UINT32, 0)), "unknown type 9"),
    "a text of 2^64 - 1": (
        lambda made: made.with_key("t", STRING, struct.pack("<Q", (1 << 64) - 1)), "bytes are announced"),
    "alignment 3": (lambda made: made.with_key("general.alignment", UINT32, struct.pack("<I", 3)), "no power of two"),
    "another alignment": (
        lambda made: made.with_key("general.alignment", UINT32, struct.pack("<I", 64)), "which is byte 192"),
    "version 1": (of_file(version=1), "of version 1"),
    "big-endian": (of_file(order=">"), "its numbers are big-endian"),
    "more behind it": (of_file(behind=bytes(32)), "ends at byte"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies(name: str, tmp_path: Path) -> None:
    change, message = LIES[name]
    change(made := parts())
    with pytest.raises(FormatError) as refused:
        read_gguf(written(tmp_path, made))
    assert message in str(refused.value)


def test_any_float_is_read(tmp_path: Path) -> None:
    """A NaN with a sign and a payload, for which there is no shortest decimal."""
    made = (
        parts().with_key("nan", FLOAT32, struct.pack("<I", 0xFFC00001)).with_key("x", FLOAT32, struct.pack("<f", 0.1))
    )
    metadata = read_gguf(written(tmp_path, made)).metadata
    assert math.isnan(metadata["nan"])
    assert metadata["x"] == 0.1


def test_values_of_other_types_are_named(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, parts().with_key("split.count", UINT32, struct.pack("<I", 1))))
    assert header.value("n", int) == 7
    assert header.value("m", int) is None
    with pytest.raises(FormatError, match=r"GGUF key n is 7(?s:.*)expected: str"):
        header.value("n", str)
    texts = Typed(["x"], ARRAY, STRING)
    made = parts().with_key("split.count", ARRAY, struct.pack("<IQ", STRING, 1) + Parts([], []).text(b"x"))
    assert read_typed(written(tmp_path, parts().with_key("l", *made.keys[-1][1:])), "l") == {"l": texts}
    with pytest.raises(FormatError, match=r"split\.count is \['x'\]"):
        read_header(written(tmp_path, made))


def test_lists_of_nothing_are_not_written(tmp_path: Path) -> None:
    write_gguf(tmp_path / "b.gguf", {"general.architecture": "llama", "l": Typed([], ARRAY, UINT32)}, [])
    assert read_header(tmp_path / "b.gguf").metadata.keys() == {"general.architecture"}


def test_blocks_that_nobody_unpacks(tmp_path: Path) -> None:
    made = parts()
    made.tensors[2] = Entry(b"c", [32, 1], 9, bytes(36))  # Q8_1, which only intermediate results have
    with pytest.raises(FormatError, match="of type Q8_1, which the package gguf does not unpack"):
        read_gguf(written(tmp_path, made))
