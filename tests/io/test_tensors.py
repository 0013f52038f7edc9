"""Checkpoints go through the readers and the writer bit for bit, and damaged or hostile files are refused cleanly."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftkit.errors import FormatError, LayoutError, SourceError, UnsafeFileError
from draftkit.io import safetensors_file
from draftkit.io.atomic import start_write_back
from draftkit.io.dtypes import DTYPES, dtype_name, torch_dtype
from draftkit.io.handles import TensorHandle, TensorToWrite, raw_memory
from draftkit.io.safetensors_file import read_safetensors, write_safetensors
from draftkit.io.tensors import open_checkpoint, write_checkpoint

torch.set_num_threads(1)
REPOSITORY = Path(__file__).parents[2]
LIGHT = examples(40)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits of any dtype and shape, scalars and empty tensors included."""
    dtype = torch_dtype(draw(st.sampled_from(list(DTYPES))))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.zeros(shape, dtype=dtype)
    bits = st.integers(0, 1 if dtype == torch.bool else 255)
    raw_memory(tensor)[:] = bytes(draw(st.lists(bits, min_size=tensor.nbytes, max_size=tensor.nbytes)))
    return tensor


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
states = st.dictionaries(names, tensors(), max_size=6)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), bytes(raw_memory(tensor.contiguous()))


def all_bits(state: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: bits(tensor) for name, tensor in state.items()}


def loaded(handles: Iterable[TensorHandle]) -> dict[str, object]:
    return {handle.name: bits(handle.load()) for handle in handles}


def to_write(state: dict[str, torch.Tensor], step: int = 5) -> list[TensorToWrite]:
    def chunks(memory: memoryview) -> Iterable[memoryview]:
        return (memory[start : start + step] for start in range(0, len(memory), step))

    return [TensorToWrite(n, dtype_name(t.dtype), tuple(t.shape), chunks(raw_memory(t))) for n, t in state.items()]


def forward(handles: Iterable[TensorHandle], size: int = 7) -> list[TensorToWrite]:
    return [TensorToWrite(handle.name, handle.dtype, handle.shape, handle.chunks(size)) for handle in handles]


SAMPLE = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b.scalar": torch.tensor(7, dtype=torch.int64),
    "c.empty": torch.empty(0, 5),
    "d.mask": torch.tensor([True, False, True]),
}


# --- dtypes and handles


def test_every_dtype_has_its_torch_twin() -> None:
    for name, dtype in DTYPES.items():
        assert dtype_name(torch_dtype(name)) == name
        assert torch_dtype(name).itemsize == dtype.itemsize


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(FormatError, match="complex128"):
        dtype_name(torch.complex128)
    with pytest.raises(FormatError, match="F7"):
        torch_dtype("F7")


def test_a_loaded_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    save_file(SAMPLE, tmp_path / "model.safetensors")
    torch.save(SAMPLE, tmp_path / "model.pt")
    for handle in (*read_safetensors(tmp_path / "model.safetensors"), *read_bin(tmp_path / "model.pt").values()):
        before = bits(handle.load())
        handle.load().zero_()
        assert bits(handle.load()) == before


# --- safetensors, both ways


@LIGHT
@given(states, st.none() | st.dictionaries(names, names, max_size=1))
def test_what_we_write_is_what_the_library_writes(
    state: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    if not state:
        metadata = None  # safetensors 0.8 writes broken JSON for metadata without tensors
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours.safetensors"), Path(folder, "theirs.safetensors")
        save_file(state, theirs, metadata)
        write_safetensors(ours, to_write(state), metadata)
        assert ours.read_bytes() == theirs.read_bytes()
        assert loaded(read_safetensors(ours)) == all_bits(state)

        # The library writes F8_E8M0, but cannot load it.
        if not any(tensor.dtype == torch.float8_e8m0fnu for tensor in state.values()):
            assert all_bits(load_file(ours)) == all_bits(state)


@LIGHT
@given(states)
def test_copying_a_file_changes_no_byte(state: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, copy = Path(folder, "source.safetensors"), Path(folder, "copy.safetensors")
        save_file(state, source)
        write_safetensors(copy, forward(read_safetensors(source)))
        assert copy.read_bytes() == source.read_bytes()


def test_metadata_is_written_in_key_order_and_without_tensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", [], {"b": "é\n", "a": "1"})
    text = (tmp_path / "m.safetensors").read_bytes()[8:]
    assert text.rstrip() == '{"__metadata__":{"a":"1","b":"é\\n"}}'.encode()
    assert read_safetensors(tmp_path / "m.safetensors") == []


def test_copying_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    save_file(SAMPLE, tmp_path / "model.safetensors")
    script = """
import sys
from pathlib import Path
from draftkit.io.handles import TensorToWrite
from draftkit.io.tensors import open_checkpoint, write_checkpoint

handles = open_checkpoint(Path(sys.argv[1])).values()
write_checkpoint(Path(sys.argv[2]), [TensorToWrite(h.name, h.dtype, h.shape, h.chunks()) for h in handles])
assert not {"torch", "numpy", "safetensors"} & set(sys.modules), "heavy imports"
"""
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-c", script, tmp_path, tmp_path / "out"], check=True, cwd=REPOSITORY)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_progress_adds_up(tmp_path: Path) -> None:
    seen: list[int] = []
    write_safetensors(tmp_path / "m.safetensors", to_write(SAMPLE), on_bytes=seen.append)
    assert sum(seen) == sum(tensor.nbytes for tensor in SAMPLE.values())


def test_writing_to_disk_begins_while_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def record(file: BinaryIO, begin: int) -> int:
        assert begin == (begun[-1] if begun else 0)
        begun.append(start_write_back(file, begin))
        return begun[-1]

    monkeypatch.setattr(safetensors_file, "start_write_back", record)
    monkeypatch.setattr(safetensors_file, "WRITE_BACK_BYTES", 100)
    state = {"a": torch.arange(50.0), "b": torch.arange(70.0), "c": torch.empty(0)}
    write_safetensors(tmp_path / "ours.safetensors", to_write(state))
    save_file(state, tmp_path / "theirs.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    size = (tmp_path / "ours.safetensors").stat().st_size
    assert len(begun) >= size // 300
    assert size - 100 < begun[-1] <= size


def test_a_large_tensor_passes_through_little_memory(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(24 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    handles = read_safetensors(tmp_path / "model.safetensors")
    tracemalloc.start()
    try:
        write_safetensors(tmp_path / "copy", [TensorToWrite(h.name, h.dtype, h.shape, h.chunks()) for h in handles])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20


@pytest.mark.parametrize(("data", "found"), [(b"", "only 0"), (b"1234567", "only 7"), (b"123456789", "more")])
def test_chunks_that_do_not_add_up_are_refused(tmp_path: Path, data: bytes, found: str) -> None:
    with pytest.raises(LayoutError, match=rf"'w' came with {found} bytes(.|\n)*expected: 8: F32 \[2\]"):
        write_safetensors(tmp_path / "m.safetensors", [TensorToWrite("w", "F32", (2,), [data])])


@pytest.mark.parametrize("repeated", [["w", "w"], ["__metadata__"]])
def test_names_that_cannot_be_written_are_refused(tmp_path: Path, repeated: list[str]) -> None:
    streams = [TensorToWrite(name, "U8", (), [b"1"]) for name in repeated]
    for write in (write_checkpoint, lambda folder, streams: write_safetensors(folder / "m.safetensors", streams)):
        with pytest.raises(LayoutError, match=repeated[0]):
            write(tmp_path, streams)
    assert list(tmp_path.iterdir()) == []


# --- damaged and hostile safetensors


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE_HEADERS = {
    "not JSON": b"{'a'}",
    "not UTF-8": b'{"\xff":1}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "not an object": [1],
    "deep": b'{"a":' + b"[" * 100_000,
    "huge number": b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
    "duplicate tensor": b'{"a":' + (one := json.dumps(entry()).encode()) + b',"a":' + one + b"}",
    "duplicate key in an entry": b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
    "lone surrogate": b'{"\\ud800":' + one + b"}",
    "entry is a list": {"a": [0, 4]},
    "entry without a shape": {"a": {"dtype": "U8", "data_offsets": [0, 4]}},
    "entry with more": {"a": entry(more=1)},
    "metadata is a list": {"__metadata__": [], "a": entry()},
    "metadata is nested": {"__metadata__": {"k": {}}, "a": entry()},
    "unknown dtype": {"a": entry(dtype="F7")},
    "dtype is a list": {"a": entry(dtype=["U8"])},
    "negative shape": {"a": entry(shape=[-2, -2])},
    "fractional shape": {"a": entry(shape=[4.0])},
    "boolean shape": {"a": entry(shape=[4, True])},
    "shape is a number": {"a": entry(shape=4)},
    "too many dimensions": {"a": entry(shape=[1] * 64 + [4])},
    "shape overflows": {"a": entry(shape=[0, 1 << 62, 4], offsets=[0, 0]), "b": entry()},
    "shape does not match": {"a": entry(shape=[3])},
    "one offset": {"a": entry(offsets=[4])},
    "negative offsets": {"a": entry(offsets=[-4, 0])},
    "offsets reversed": {"a": entry(offsets=[4, 0])},
    "out of range": {"a": entry(shape=[1 << 40], offsets=[0, 1 << 40])},
    "overlap": {"a": entry(), "b": entry(shape=[2], offsets=[2, 4])},
    "same bytes twice": {"a": entry(), "b": entry()},
    "gap": {"a": entry(shape=[1], offsets=[0, 1]), "b": entry(shape=[1], offsets=[3, 4])},
    "bytes before the first": {"a": entry(shape=[2], offsets=[2, 4])},
    "bytes after the last": {"a": entry(shape=[2], offsets=[0, 2])},
}


@pytest.mark.parametrize("header", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS.keys())
def test_hostile_headers_are_refused(tmp_path: Path, header: object) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes(header, b"1234"))
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_header_too_long_is_not_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(FormatError, match=f"header of {length:,} bytes"):
        open_checkpoint(tmp_path)


def sample_file(folder: str) -> bytes:
    save_file(SAMPLE, Path(folder, "model.safetensors"))
    return Path(folder, "model.safetensors").read_bytes()


def test_truncation_is_told_with_both_sizes(tmp_path: Path) -> None:
    whole = sample_file(str(tmp_path))
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    for cut in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(FormatError, match=rf"truncated or damaged \({cut:,} bytes found\)") as caught:
            open_checkpoint(tmp_path)
        if cut >= header_end:
            assert f"expected: {len(whole):,} bytes" in str(caught.value)


def read_or_refuse(path: Path) -> None:
    """The only way out other than reading every tensor is a `FormatError`."""
    try:
        handles = open_checkpoint(path.parent)
    except FormatError:
        return
    for handle in handles.values():
        handle.load()


@LIGHT
@given(st.data())
def test_damage_anywhere_is_read_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = bytearray(sample_file(folder))
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        path = Path(folder, "model.safetensors")
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        read_or_refuse(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values})


@LIGHT
@given(st.binary(max_size=60) | st.dictionaries(st.text(max_size=5), json_values | entries, max_size=4), st.binary())
def test_fuzzed_headers_are_read_or_refused(header: object, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        path.write_bytes(safetensors_bytes(header, data))
        read_or_refuse(path)


def test_a_file_that_shrinks_after_opening_is_told(tmp_path: Path) -> None:
    whole = sample_file(str(tmp_path))
    handles = open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(FormatError, match="shrunk"):
        handles["d.mask"].load()


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
        with pytest.raises(FormatError, match="git lfs pull"):
            open_checkpoint(tmp_path)
        (tmp_path / name).unlink()


# --- PyTorch files


def read_bin(path: Path) -> dict[str, TensorHandle]:
    """A checkpoint folder that holds nothing but this file."""
    with tempfile.TemporaryDirectory() as folder:
        os.link(path, Path(folder, path.name))
        return open_checkpoint(Path(folder))


# What torch's format of before 1.6 can hold.
OLD_DTYPES = ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "C64", "F64", "I64")


@LIGHT
@given(states, st.booleans())
def test_bin_files_round_trip(state: dict[str, torch.Tensor], zipped: bool) -> None:
    zipped = zipped or any(dtype_name(tensor.dtype) not in OLD_DTYPES for tensor in state.values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pytorch_model.bin")
        torch.save(OrderedDict(state), path, _use_new_zipfile_serialization=zipped)
        handles = open_checkpoint(Path(folder))
        assert list(handles) == list(state)
        assert loaded(handles.values()) == all_bits(state)
        assert {name: handle.nbytes for name, handle in handles.items()} == {n: t.nbytes for n, t in state.items()}

        write_safetensors(path.with_name("copy.safetensors"), forward(handles.values()))
        assert loaded(read_safetensors(path.with_name("copy.safetensors"))) == all_bits(state)


@pytest.mark.parametrize("zipped", [True, False])
def test_views_stream_what_they_show(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(24.0)
    state = {
        "transposed": base.view(4, 6).t(),
        "strided": base[1::3],
        "one element with a stride": base[1::3][:1],
        "no element with a stride": base[1::3][:0],
        "tied": base,
        "slice": base[5:9],
        "expanded": base[:2, None].expand(2, 3),
        "channels_last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=zipped)
    handles = open_checkpoint(tmp_path)
    assert loaded(handles.values()) == all_bits(state)
    assert b"".join(handles["transposed"].chunks(7)) == bytes(raw_memory(base.view(4, 6).t().contiguous()))


def test_conjugate_and_negative_views_stream_their_values(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    torch.save({"conjugate": numbers.conj(), "negative": numbers.clone().conj().imag}, tmp_path / "model.bin")
    handles = open_checkpoint(tmp_path)
    assert handles["conjugate"].load().tolist() == [1 - 2j, 3 + 4j]
    assert handles["negative"].load().tolist() == [-2, 4]


class Payload:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, call: Callable[..., object], argument: str) -> None:
        self.call, self.argument = call, argument

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return self.call, (self.argument,)


def write_zip(path: Path, state: object) -> None:
    torch.save(state, path)


def write_legacy(path: Path, state: object) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def write_pickle(path: Path, state: object) -> None:
    path.write_bytes(pickle.dumps(state, protocol=2))


def write_new_pickle(path: Path, state: object) -> None:
    path.write_bytes(pickle.dumps(state, protocol=4))


@pytest.mark.parametrize("write", [write_zip, write_legacy, write_pickle])
@pytest.mark.parametrize(("call", "wanted"), [(os.system, f"{os.name}.system"), (exec, "exec"), (os.mkdir, "mkdir")])
def test_hostile_pickles_are_named_and_not_run(
    tmp_path: Path, write: Callable[[Path, object], None], call: Callable[..., object], wanted: str
) -> None:
    trap = tmp_path / "trap"
    argument = {os.system: f"touch {trap}", exec: f"open({str(trap)!r}, 'w')", os.mkdir: str(trap)}[call]
    write(tmp_path / "pytorch_model.bin", {"x": Payload(call, argument), "w": torch.ones(1)})
    with pytest.raises(UnsafeFileError, match=wanted) as caught:
        open_checkpoint(tmp_path)
    assert "pytorch_model.bin" in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not trap.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickle_protocols_that_torch_does_not_read_are_refused(tmp_path: Path) -> None:
    write_new_pickle(tmp_path / "model.bin", OrderedDict(x=1))
    with pytest.raises(FormatError, match="not one of tensors only, or not of protocol 2"):
        open_checkpoint(tmp_path)


NOT_FLAT = {
    "a list": ([torch.ones(1)], "holds list"),
    "wrapped": ({"state_dict": {"w": torch.ones(1)}, "epoch": 3}, "'state_dict' is dict"),
    "not a name": ({0: torch.ones(1)}, "key 0 is int"),
    "sparse": ({"w": torch.eye(2).to_sparse()}, "'w' is a tensor of torch.sparse_coo"),
    "no data": ({"w": torch.empty(2, device="meta")}, "'w' is a tensor of .* on meta"),
    "no such dtype": ({"w": torch.ones(2, dtype=torch.complex128)}, "'w' is a tensor of .*complex128"),
    "bomb": ({"w": torch.ones(1).expand(1 << 40)}, "'w' repeats a few elements to 4,398,046,511,104 bytes"),
}


@pytest.mark.parametrize(("state", "found"), NOT_FLAT.values(), ids=NOT_FLAT.keys())
def test_only_a_flat_dict_of_tensors_is_taken(tmp_path: Path, state: object, found: str) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=found):
        open_checkpoint(tmp_path)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "epoch": 3, "lr": 0.1}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"2 of 3 keys(.|\n)*'epoch' is int(.|\n)*'lr' is float"):
        open_checkpoint(tmp_path)


@LIGHT
@given(st.data(), st.booleans())
def test_truncated_bin_files_are_refused(data: st.DataObject, zipped: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pytorch_model.bin")
        torch.save(SAMPLE, path, _use_new_zipfile_serialization=zipped)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:cut])
        # A cut through a name in an old file's pickle makes another name of it, which is refused as unsafe.
        expected = rf"truncated or damaged \({cut:,} bytes found\)" if zipped else "truncated or damaged|would run code"
        with pytest.raises(FormatError, match=expected):
            open_checkpoint(Path(folder))


@pytest.mark.filterwarnings("ignore")
@LIGHT
@given(st.data(), st.booleans())
def test_damaged_bin_files_are_read_or_refused(data: st.DataObject, zipped: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pytorch_model.bin")
        torch.save(SAMPLE, path, _use_new_zipfile_serialization=zipped)
        whole = bytearray(path.read_bytes())
        for _ in range(3):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(whole)
        read_or_refuse(path)


def test_compressed_bin_files_are_refused(tmp_path: Path) -> None:
    torch.save(SAMPLE, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(FormatError, match="compressed"):
        open_checkpoint(tmp_path)


# --- folders


def test_folders_without_weights(tmp_path: Path) -> None:
    for name in ("adapter_model.safetensors", "training_args.bin", "optimizer.bin", "scheduler.bin", "config.json"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(SourceError, match=r"no weights(.|\n)*model\.safetensors\.index\.json(.|\n)*pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    with pytest.raises(SourceError, match="no such folder"):
        open_checkpoint(tmp_path / "config.json")


def test_the_usual_name_wins_over_others_and_safetensors_over_pickles(tmp_path: Path) -> None:
    def written(name: str) -> str:
        path, state = tmp_path / name, {name: torch.ones(1)}
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
        return next(iter(open_checkpoint(tmp_path)))

    torch.save({}, tmp_path / "training_args.bin")
    assert written("draft.pt") == "draft.pt"
    assert written("pytorch_model.bin") == "pytorch_model.bin"
    assert written("draft.safetensors") == "draft.safetensors"
    assert written("other.safetensors") == "pytorch_model.bin"  # which of two is not for us to guess
    assert written("model.safetensors") == "model.safetensors"


def test_several_files_without_an_index_are_not_guessed(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file(SAMPLE, tmp_path / name)
    with pytest.raises(SourceError, match=r"several weight files and no index: a\.safetensors, b\.safetensors"):
        open_checkpoint(tmp_path)


@LIGHT
@given(states, st.integers(1, 200))
def test_shards_round_trip(state: dict[str, torch.Tensor], max_shard_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = write_checkpoint(Path(folder), to_write(state), max_shard_bytes)
        assert sorted(files) == sorted(Path(folder).iterdir())
        assert loaded(open_checkpoint(Path(folder)).values()) == all_bits(state)

        shards = [read_safetensors(file) for file in files if file.suffix == ".safetensors"]
        in_name_order = [name for shard in shards for name in sorted(handle.name for handle in shard)]
        assert in_name_order == sorted(state)
        assert all(len(shard) <= 1 or sum(handle.nbytes for handle in shard) <= max_shard_bytes for shard in shards)


def test_shards_have_the_names_and_index_of_hugging_face(tmp_path: Path) -> None:
    files = write_checkpoint(tmp_path, to_write(SAMPLE), max_shard_bytes=10, metadata={"format": "pt"})
    assert [file.name for file in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in SAMPLE.values())}
    assert index["weight_map"]["a.weight"] == "model-00001-of-00003.safetensors"
    assert b'{"__metadata__":{"format":"pt"}' in files[0].read_bytes()


def test_sharded_bin_files(tmp_path: Path) -> None:
    weight_map = {name: f"pytorch_model-{i}.bin" for i, name in enumerate(SAMPLE)}
    for name, shard in weight_map.items():
        torch.save({name: SAMPLE[name]}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert loaded(open_checkpoint(tmp_path).values()) == all_bits(SAMPLE)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..\\x", "C:x", "..", ""])
def test_an_index_may_not_leave_its_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(SAMPLE, tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(SAMPLE, shard)}))
    with pytest.raises(FormatError, match="outside its folder"):
        open_checkpoint(folder)


def test_an_index_may_follow_the_links_of_a_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    save_file(SAMPLE, tmp_path / "blob")
    (snapshot / "one.safetensors").symlink_to(tmp_path / "blob")
    index = {"weight_map": dict.fromkeys(SAMPLE, "one.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert loaded(open_checkpoint(snapshot).values()) == all_bits(SAMPLE)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"w": 1}}, {"weight_map": {}}])
def test_an_index_without_a_weight_map(tmp_path: Path, index: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="weight_map"):
        open_checkpoint(tmp_path)


def test_all_disagreements_with_an_index_are_told_at_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "stray": torch.ones(1), "moved": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "2.safetensors")
    weight_map = {"a": "1.safetensors", "absent": "1.safetensors", "b": "2.safetensors", "moved": "2.safetensors"}
    index = {"weight_map": weight_map | {"c": "3.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(tmp_path)
    for problem in (
        "'absent' is listed in 1.safetensors, but is not there",
        "'stray' is in 1.safetensors, but is not listed there",
        "'moved' is in 1.safetensors, but is not listed there",
        "'moved' is listed in 2.safetensors, but is not there",
        "3.safetensors is missing",
    ):
        assert problem in str(caught.value)


def test_a_handle_can_be_renamed(tmp_path: Path) -> None:
    save_file(SAMPLE, tmp_path / "model.safetensors")
    handle = dataclasses.replace(open_checkpoint(tmp_path)["a.weight"], name="fc.weight")
    assert handle.name == "fc.weight"
    assert bits(handle.load()) == bits(SAMPLE["a.weight"])


def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")  # a loop cannot be opened
    with pytest.raises(SourceError, match="cannot be read"):
        read_safetensors(tmp_path / "model.safetensors")
