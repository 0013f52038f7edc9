"""Weight files that are cut off, hostile or no files at all are refused, and nothing in them is run."""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import pickletools
import re
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.examples import examples
from fixtures.fuzzing.robust import attempt, sandbox
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftkit.errors import FormatError, UnsafeFileError
from draftkit.io import torch_file
from draftkit.io.tensors import open_checkpoint


@pytest.fixture(scope="module", autouse=True)
def in_sandbox() -> Iterator[None]:
    with sandbox():
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with the config of an EAGLE-1 draft, and no weights yet."""
    folder = tmp_path / "source"
    pico.write_checkpoint(folder, pico.eagle_config(), {})
    (folder / "pytorch_model.bin").unlink()
    return folder


def small_eagle() -> dict[str, torch.Tensor]:
    """An EAGLE-1 draft without its embedding table, which is most of it."""
    return pico.eagle_tensors(embed=False)


# --- files that end at any boundary between their sections


def safetensors_sections(data: bytes) -> set[int]:
    """Where the length, the header and each tensor end."""
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    entries = [entry for name, entry in json.loads(data[8:header_end]).items() if name != "__metadata__"]
    return {0, 8, header_end} | {header_end + entry["data_offsets"][1] for entry in entries}


def zip_sections(data: bytes) -> set[int]:
    """Where each entry's header and data begin and end, and the parts of the directory begin."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        sections = {0, archive.start_dir, data.rindex(b"PK\x05\x06")}
        for entry in archive.infolist():
            begin = entry.header_offset + 30 + sum(struct.unpack_from("<HH", data, entry.header_offset + 26))
            sections |= {entry.header_offset, begin, begin + entry.file_size}
        return sections


def legacy_sections(data: bytes) -> set[int]:
    """Where each instruction of the five pickles begins, and after them the length and the data of each storage end."""
    stream = io.BytesIO(data)
    sections: set[int] = set()
    keys: list[str] = []
    for _ in range(5):
        begin = stream.tell()
        sections |= {position or 0 for _, _, position in pickletools.genops(stream)}
        keys = pickle.loads(data[begin : stream.tell()]) if begin > 1000 else []
    for _ in keys:
        sections.add(stream.tell())
        (elements,) = struct.unpack("<q", stream.read(8))
        sections.add(stream.tell())
        stream.seek(elements * torch.float16.itemsize, io.SEEK_CUR)
    assert len(keys) == len(small_eagle())
    assert stream.tell() == len(data)
    return sections


def save_zip(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path)


def save_legacy(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


CUT: dict[str, tuple[str, Callable[[dict[str, torch.Tensor], Path], None], Callable[[bytes], set[int]]]] = {
    "safetensors": ("model.safetensors", save_file, safetensors_sections),
    "zip": ("pytorch_model.bin", save_zip, zip_sections),
    "legacy": ("pytorch_model.bin", save_legacy, legacy_sections),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUT)
def test_a_file_that_ends_at_any_boundary(kind: str, source: Path) -> None:
    name, save, sections = CUT[kind]
    save(small_eagle(), source / name)
    assert attempt(source) is None
    whole = (source / name).read_bytes()
    around = {cut + step for cut in sections(whole) for step in ((0,) if kind == "legacy" else (-1, 0, 1))}
    cuts = sorted(around & set(range(len(whole))))
    assert len(cuts) > 30
    for cut in cuts:
        (source / name).write_bytes(whole[:cut])
        refused = attempt(source)
        assert isinstance(refused, FormatError)
        assert name in str(refused)
        assert not isinstance(refused, UnsafeFileError)


# --- pickles that ask for functions


def plain(hostile: bytes) -> bytes:
    return hostile


def zipped(hostile: bytes) -> bytes:
    """As torch.save writes it today."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {
            "data.pkl": hostile,
            "byteorder": b"little",
            "data/0": bytes(64),
            "version": b"3\n",
        }.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def legacy(hostile: bytes, place: int = 3) -> bytes:
    """As torch.save wrote it before 1.6: five pickles, one of them replaced."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    stream, pickles = io.BytesIO(file.getvalue()), []
    for _ in range(5):
        begin = stream.tell()
        list(pickletools.genops(stream))
        pickles.append(file.getvalue()[begin : stream.tell()])
    pickles[place] = hostile
    return b"".join(pickles)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": plain,
    "zip": zipped,
    "legacy": legacy,
    "legacy, system information": partial(legacy, place=2),
    "legacy, list of storages": partial(legacy, place=4),
}


class Call:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


def refuse(source: Path, content: bytes) -> str:
    """The message with which a hostile file is refused; nothing in it has made the folder `trap`."""
    (source / "pytorch_model.bin").write_bytes(content)
    refused = attempt(source)
    assert isinstance(refused, UnsafeFileError)
    assert not (source / "trap").exists()
    assert "weights_only" not in str(refused)
    return str(refused)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("form", FORMS)
def test_every_function_is_named(form: str, protocol: int, source: Path) -> None:
    state = {
        "fc.weight": OrderedDict(),
        "first": Call(os.mkdir, str(source / "trap")),
        "again": Call(os.mkdir, str(source / "trap")),
        "second": Call(exec, f"import os; os.mkdir({str(source / 'trap')!r})"),
        "third": Call(pickle.loads, pickle.dumps(Call(os.mkdir, str(source / "trap")))),
    }
    message = refuse(source, FORMS[form](pickle.dumps(state, protocol)))
    builtins = "__builtin__" if protocol < 3 else "builtins"
    assert re.search(rf"asks for posix\.mkdir, {builtins}\.exec, _?pickle\.loads\. Nothing was run", message)


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def hidden(*, trap: bytes) -> dict[str, tuple[bytes, str]]:
    """Pickles that hide what they call, which is os.mkdir(trap); with what the refusal says."""
    argument = b"X" + struct.pack("<I", len(trap)) + trap
    call = argument + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP
    computed = b"cbuiltins\nstr\n" + text("os") + pickle.TUPLE1 + pickle.REDUCE
    return {
        "INST": (b"(" + argument + b"ios\nmkdir\n.", "os.mkdir"),
        "OBJ": (b"(cos\nmkdir\n" + argument + b"o.", "os.mkdir"),
        "texts": (text("os") + text("mkdir") + pickle.STACK_GLOBAL + call, "os.mkdir"),
        "a dotted name": (text("os") + text("path.os.mkdir") + pickle.STACK_GLOBAL + call, "os.path.os.mkdir"),
        "remembered texts": (
            text("mkdir") + b"\x94" + text("os") + b"\x9400" + b"h\x01h\x00" + pickle.STACK_GLOBAL + call,
            "os.mkdir",
        ),
        "texts remembered by number": (
            b"Vos\np7\n0Vmkdir\nr\x00\x01\x00\x00" + b"0g7\nj\x00\x01\x00\x00" + pickle.STACK_GLOBAL + call,
            "os.mkdir",
        ),
        "texts under a mark": (
            b"((" + text("os") + text("mkdir") + b"\x93" + b"1" + b"cos\nmkdir\n" + call,
            "os.mkdir",
        ),
        "texts behind a decoy": (
            text("os") + text("getcwd") + b"02" + b"0" + text("mkdir") + pickle.STACK_GLOBAL + call,
            "os.mkdir",
        ),
        "a computed name": (computed + text("mkdir") + pickle.STACK_GLOBAL + call, "something whose name it computes"),
        "an extension": (b"\x82\xf0" + call, "the extension of code 240"),
        "then damage": (b"cos\nmkdir\n" + call[:-1] + b"\xff", "os.mkdir"),
        "then its end": (b"cos\nmkdir\n" + argument, "os.mkdir"),
    }


@pytest.mark.parametrize("protocol", [b"", b"\x80\x02", b"\x80\x05"], ids=["no protocol", "2", "5"])
@pytest.mark.parametrize("form", ["plain", "zip", "legacy"])
@pytest.mark.parametrize("name", hidden(trap=b""))
def test_hidden_functions_are_named(name: str, form: str, protocol: bytes, source: Path) -> None:
    content, named = hidden(trap=str(source / "trap").encode())[name]
    copyreg.add_extension("os", "mkdir", 240)
    try:
        assert named in refuse(source, FORMS[form](protocol + content))
    finally:
        copyreg.remove_extension("os", "mkdir", 240)


@pytest.mark.parametrize("name", sorted(set(hidden(trap=b"")) - {"then damage", "then its end"}))
def test_the_hidden_functions_would_be_called(name: str, tmp_path: Path) -> None:
    """The samples above are hostile indeed."""
    copyreg.add_extension("os", "mkdir", 240)
    try:
        pickle.loads(b"\x80\x04" + hidden(trap=str(tmp_path / "trap").encode())[name][0])
    finally:
        copyreg.remove_extension("os", "mkdir", 240)
    assert (tmp_path / "trap").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("zip", [True, False])
def test_weights_of_any_protocol_are_not_called_hostile(protocol: int, zip: bool, source: Path) -> None:
    path = source / "pytorch_model.bin"
    torch.save(small_eagle(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=zip)
    refused = attempt(source)
    assert refused is None if protocol == 2 else not isinstance(refused, UnsafeFileError)


# --- pickles that ask for nothing, and are hostile nevertheless


def test_tuples_that_take_forever_to_hash(source: Path) -> None:
    doubled = b")" + b"q\x00h\x00\x86" * 64  # remember, recall, pair: 2**64 empty tuples
    for form in (plain, zipped, legacy):
        (source / "pytorch_model.bin").write_bytes(form(b"\x80\x02}" + doubled + b"K\x01s."))
        assert "tuples of more than" in str(attempt(source))


def test_a_pickle_of_endless_instructions(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "MAX_OPCODES", 10_000)
    for form in (plain, zipped):
        (source / "pytorch_model.bin").write_bytes(form(b"\x80\x02" + b"N" * 10_000 + b"."))
        assert "more than 10,000 instructions" in str(attempt(source))


class Built:
    """Pickles to what a function returns, with attributes of its own and items."""

    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def test_attributes_of_pickled_objects_hide_no_method(source: Path) -> None:
    attributes = dict.fromkeys(["items", "keys", "values", "__iter__", "detach", "contiguous", "dtype", "shape"], "x")
    tensors = small_eagle()
    tensor = next(iter(tensors.values()))
    rebuild, arguments = tensor.__reduce_ex__(2)
    method = {"detach": "x", "resolve_conj": "x"}
    tensors["fc.weight"] = Built(torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, method))  # type: ignore[assignment]
    torch.save(Built(OrderedDict, (), attributes, None, iter(tensors.items())), source / "pytorch_model.bin")
    assert attempt(source) is None


class Storage:
    """Pickles to a storage under any identity."""

    def __init__(self, *identity: object) -> None:
        self.identity = identity


class Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        return value.identity if isinstance(value, Storage) else None


numbers = st.sampled_from([0, 1, 2, 4, 64, -1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, -1 << 63, 1 << 70])
odd = (
    st.none()
    | st.booleans()
    | numbers
    | st.floats()
    | st.sampled_from(["", "0", "../0", "cuda:0", "meta", b"0", (), {}])
)
shapes = st.lists(numbers, max_size=3).map(tuple)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@examples(200)
@given(st.data())
def test_storages_of_any_identity_and_tensors_of_any_shape(weights_of: Path, data: st.DataObject) -> None:
    identity: list[object] = ["storage", torch.FloatStorage, "0", "cpu", data.draw(numbers)]
    arguments: list[object] = [None, data.draw(numbers), data.draw(shapes), data.draw(shapes), False, OrderedDict()]
    for values in (identity, arguments):
        for place in data.draw(st.sets(st.integers(0, len(values) - 1), max_size=1)):
            values[place] = data.draw(odd)
    form = data.draw(st.sampled_from([zipped, legacy]))
    arguments[0] = arguments[0] or Storage(*identity, *([None] if form is legacy else []))
    file = io.BytesIO()
    Pickler(file, 2).dump({"fc.weight": Built(torch._utils._rebuild_tensor_v2, tuple(arguments))})
    (weights_of / "pytorch_model.bin").write_bytes(form(file.getvalue()))
    attempt(weights_of)
    with suppress(FormatError):
        for handle in open_checkpoint(weights_of).values():
            handle.load()


@pytest.mark.parametrize("shape", [(0, -1), (-1, -1), (-4,), (1 << 31, 1 << 31), (0, 1 << 40, 1 << 40)])
def test_impossible_shapes(shape: tuple[int, ...], source: Path) -> None:
    storage, strides = Storage("storage", torch.FloatStorage, "0", "cpu", 4), (0,) * len(shape)
    rebuilt = Built(torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, False, OrderedDict()))
    file = io.BytesIO()
    Pickler(file, 2).dump({"fc.weight": rebuilt})
    (source / "pytorch_model.bin").write_bytes(zipped(file.getvalue()))
    assert "pytorch_model.bin" in str(attempt(source))  # refused as a file, not as a draft of no known format


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `source` again, kept over the examples of a test."""
    folder = tmp_path_factory.mktemp("source")
    pico.write_checkpoint(folder, pico.eagle_config(), small_eagle())
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@examples(150)
@given(st.data())
def test_damage_inside_the_pickle_of_a_sound_zip(weights_of: Path, data: st.DataObject) -> None:
    """Unlike damage to the file, which its checksums give away."""
    file = io.BytesIO()
    torch.save(small_eagle(), file)
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in content if name.endswith("data.pkl"))
    damaged = bytearray(content[name])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with zipfile.ZipFile(weights_of / "pytorch_model.bin", "w") as archive:
        for entry, whole in (content | {name: bytes(damaged)}).items():
            archive.writestr(entry, whole)
    attempt(weights_of)


@pytest.mark.filterwarnings("ignore")
def test_other_files_of_torch(source: Path) -> None:
    path = source / "pytorch_model.bin"
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    assert isinstance(attempt(source), FormatError)
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            archive.addfile(tarfile.TarInfo(name))
    refused = attempt(source)
    assert "not one of tensors only" in str(refused)
    assert "weights_only" not in str(refused)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_with_two_pickles_of_a_name(source: Path) -> None:
    with zipfile.ZipFile(source / "pytorch_model.bin", "w") as archive:
        for _ in range(2):
            archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
    assert "compressed or repeated zip entries" in str(attempt(source))


# --- what is no file, where one is expected


def make_eagle(folder: Path) -> None:
    pico.write_checkpoint(folder, pico.eagle_config(), pico.eagle_tensors(), safetensors=True)


def make_causal_lm(folder: Path) -> None:
    pico.save_llama(folder, num_hidden_layers=1)


@pytest.mark.parametrize("make", [make_eagle, make_causal_lm])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "broken link", "loop", "endless device"])
def test_no_file(kind: str, file: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "source")
    path = tmp_path / "source" / file
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "broken link":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path)
        case "endless device":
            path.symlink_to("/dev/zero")
    refused = attempt(tmp_path / "source")
    is_copied = file == "tokenizer.json" and make is make_causal_lm and kind != "folder"
    if file in ("config.json", "model.safetensors") or is_copied:
        assert file in str(refused)
    elif file == "tokenizer.json":
        assert refused is None
