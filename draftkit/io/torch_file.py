"""Reading one PyTorch checkpoint (`.bin`, `.pt`) without running code from it.

Such a file is a pickle beside raw tensor data. `weights_only` keeps the pickle from calling anything but tensor
constructors, and a memory map keeps the data on disk until it is streamed. What a refused pickle asks for is read from
its opcodes.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import reprlib
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit.errors import DraftkitError, FormatError, UnsafeFileError
from draftkit.io.dtypes import NAME_OF_TORCH_DTYPE, dtype_name, tensor_bytes
from draftkit.io.handles import TensorHandle, damaged, open_source, raw_memory

if TYPE_CHECKING:
    import torch
import pickletools
from typing import IO, Final

ZIP_MAGIC = b"PK\x03\x04"  # torch.save writes a zip since torch 1.6, and a plain pickle before
EXPECTED = "a dict of tensor names to tensors, written by torch.save"
MAX_PROBLEMS_SHOWN = 8
# What the pickles of plain tensors ask for, beside dtypes.
OF_TENSORS = re.compile(
    r"collections\.OrderedDict|torch\.(storage\.)?\w+Storage|torch\._utils\._rebuild_\w+|torch\.(Size|Tensor|device)"
    r"|torch\.nn\.parameter\.Parameter|torch\.serialization\._get_layout|_codecs\.encode"
)


def read_torch(path: Path) -> list[TensorHandle]:
    """The tensors of a flat state dict, in its order. Tensors that share storage are separate tensors here.

    Raises `SourceError` when the file cannot be read, `UnsafeFileError` when its pickle wants anything but tensors,
    `FormatError` when it is damaged or holds something else than a flat dict of names to tensors.
    """
    import torch

    state, size = _read(path)
    _check_state(state, path, size)
    # The unbound methods, because a pickle may hide those of its objects behind attributes of the same names.
    return [
        TensorHandle(
            name, dtype_name(tensor.dtype), tuple(tensor.shape), path, partial(_stream, torch.Tensor.detach(tensor))
        )
        for name, tensor in dict.items(state)
    ]


def read_torch_tensor(path: Path, name: str) -> tuple[TensorHandle, dict[str, int]]:
    """The tensor of a file that holds it alone, or in a dict under `name` beside whole numbers; and those numbers.

    Raises as `read_torch` does.
    """
    import torch

    state, size = _read(path)
    entries = state if isinstance(state, dict) else {name: state}
    numbers = {str(key): value for key, value in dict.items(entries) if key != name and type(value) is int}
    tensors = {key: value for key, value in dict.items(entries) if key not in numbers}
    _check_state(tensors, path, size)
    if list(tensors) != [name]:
        raise FormatError(f"{path.name} holds {', '.join(tensors)}", where=path, expected=f"one tensor, {name}")
    tensor = torch.Tensor.detach(tensors[name])
    handle = TensorHandle(name, dtype_name(tensor.dtype), tuple(tensor.shape), path, partial(_stream, tensor))
    return handle, numbers


def _read(path: Path) -> tuple[Any, int]:
    """The object that the file holds, unchecked, and its size in bytes."""
    with open_source(path) as file:
        is_zip = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
        size = os.fstat(file.fileno()).st_size
    return _load(path, is_zip, size), size


def _load(path: Path, is_zip: bool, size: int) -> Any:
    """The object that the file holds; tensors of a zip stay on disk, those of an older file are in memory."""
    import torch

    wanted: list[str] = []
    try:
        wanted = _wanted_by_zip(path) if is_zip else _wanted_by_pickle(path)
        with warnings.catch_warnings(action="ignore"):  # torch's advice to whoever wrote the file
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except DraftkitError:
        raise
    except Exception as error:  # damage surfaces as whatever the zip reader or the unpickler stumbles over
        raise _refusal(path, size, wanted, error) from error


def _wanted_by_pickle(path: Path) -> list[str]:
    with open_source(path) as file:
        return wanted_globals(file, path)


def _wanted_by_zip(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        _check_entries(entries, path)
        folder = entries[0].filename.partition("/")[0]
        with archive.open(f"{folder}/data.pkl") as file:
            return wanted_globals(file, path)


def _check_entries(entries: list[zipfile.ZipInfo], path: Path) -> None:
    """Refuse what torch's zip reader would take for something else, without a word."""
    # A memory map of a compressed entry would be read as numbers.
    odd = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    names = Counter(entry.filename.lower() for entry in entries)
    odd += [name for name, count in names.items() if count > 1]
    if odd:
        raise FormatError(
            f"{path.name} has compressed or repeated zip entries, which torch.save never writes",
            where=f"{path}: {odd[0]}",
            hint="load and save it again with torch, or ask the author for a safetensors file",
        )


def _refusal(path: Path, size: int, wanted: list[str], error: Exception) -> FormatError:
    """Why a file is not loaded. Texts of torch that tell the user to load it unsafely are not passed on."""
    text = str(error)
    unsafe = [name for name in wanted if not OF_TENSORS.fullmatch(name) and name not in NAME_OF_TORCH_DTYPE]
    unsafe = unsafe or re.findall(r"GLOBAL (\w\S*)", text)
    if unsafe:
        shown = ", ".join(unsafe[:MAX_PROBLEMS_SHOWN])
        return UnsafeFileError(
            f"loading {path.name} would run code: its pickle asks for {shown}. Nothing was run",
            where=path,
            expected=EXPECTED,
            hint="ask the author for a safetensors file",
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text:
        return damaged(path, size, EXPECTED, "its pickle is not one of tensors only, or not of protocol 2")
    return damaged(path, size, EXPECTED, (text.splitlines() or [type(error).__name__])[0])


def _check_state(state: object, path: Path, size: int) -> None:
    """Raise `FormatError` with everything that keeps this object from being a flat dict of names to tensors."""
    if not isinstance(state, dict):
        raise FormatError(f"{path.name} holds {type(state).__name__}", where=path, expected=EXPECTED)
    problems = [problem for key, value in dict.items(state) if (problem := _problem(key, value, size))]
    if problems:
        shown = "\n    ".join(problems[:MAX_PROBLEMS_SHOWN])
        raise FormatError(
            f"{path.name} is not a flat dict of tensors, at {len(problems)} of {len(state)} keys:\n    {shown}",
            where=path,
            expected=EXPECTED,
        )


def _problem(key: object, value: object, file_size: int) -> str | None:
    """What is wrong with one entry of a state dict."""
    import torch

    if not isinstance(key, str):
        return f"the key {reprlib.repr(key)} is {type(key).__name__}"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"{key!r} is {type(value).__name__}"
    assert isinstance(value, torch.Tensor)
    if value.layout != torch.strided or value.device.type != "cpu" or str(value.dtype) not in NAME_OF_TORCH_DTYPE:
        return f"{key!r} is a tensor of {value.layout}, {value.dtype} on {value.device}"
    shape = tuple(value.shape)
    if min(shape, default=0) < 0 or math.prod(size or 1 for size in shape) >= 1 << 63:  # torch takes it from a pickle
        return f"{key!r} has the impossible shape {list(shape)}"
    nbytes = tensor_bytes(dtype_name(value.dtype), shape)
    if nbytes > file_size:
        return f"{key!r} repeats a few elements to {nbytes:,} bytes, in a file of {file_size:,}"
    return None


def _stream(tensor: torch.Tensor, size: int) -> Iterator[memoryview]:
    """A tensor's bytes; one that is not contiguous, or lazily conjugated or negated, is copied first."""
    memory = raw_memory(tensor.resolve_conj().resolve_neg().contiguous())
    for start in range(0, len(memory), size):
        yield memory[start : start + size]


def write_torch(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a state dict as torch.save does, for the few files that their loaders expect in no other form."""
    import torch

    torch.save(tensors, path)


COMPUTED: Final = "something whose name it computes"
MAX_OPCODES: Final = 1_000_000  # a state dict takes about 40 for each tensor
MAX_TUPLE: Final = 1_000  # a tensor's arguments are about 30 values
PICKLES: Final = 5  # of a file that torch wrote before it wrote zips: the state dict is the fourth

_MARK: Final = "the mark of the pickle machine"  # compared by identity
_TEXTS: Final = {pickletools.pyunicode, pickletools.pybytes_or_str}
_NEVER_HASHED: Final = {pickletools.pylist, pickletools.pydict, pickletools.pyset}


def wanted_globals(stream: IO[bytes], path: Path) -> list[str]:
    """The functions and classes, as `module.name`, that the pickles of a file ask for, each once, as far as they parse.

    Raises `FormatError` for a pickle that would keep its reader busy without end: one of more opcodes than weights
    need, or one whose tuples hold each other so often that to hash them takes forever.
    """
    machine = _Machine(path)
    try:
        for _ in range(PICKLES):
            machine.run(stream)
    except (ValueError, LookupError, TypeError, EOFError, MemoryError):
        pass  # damage: who loads the file tells it better
    return list(machine.wanted)


class _Machine:
    """A pickle machine whose values are texts, which may become names, and the sizes of everything else.

    A size counts the values inside as often as they are referred to: hashing a tuple visits that many.
    """

    def __init__(self, path: Path):
        self.path = path
        self.wanted: dict[str, None] = {}
        self.opcodes = 0

    def run(self, stream: IO[bytes]) -> None:
        """Read the instructions of one pickle, without carrying any of them out."""
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        for opcode, argument, _ in pickletools.genops(stream):
            self.opcodes += 1
            if self.opcodes > MAX_OPCODES:
                raise self._endless(f"more than {MAX_OPCODES:,} instructions")
            self._step(opcode, argument)

    def _step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        match opcode.name:
            case "MARK":
                self.stack.append(_MARK)
            case "DUP":
                self.stack.append(self.stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case _:
                taken = self._take(opcode)
                self._note_global(opcode.name, argument, taken)
                if opcode.stack_after:
                    kind = opcode.stack_after[0]
                    self.stack.append(argument if kind in _TEXTS else self._size(kind, taken))

    def _take(self, opcode: pickletools.OpcodeInfo) -> list[Any]:
        """The values that an opcode takes off the stack."""
        fixed, taken = len(opcode.stack_before), []
        if pickletools.markobject in opcode.stack_before:
            fixed = opcode.stack_before.index(pickletools.markobject)
            while (value := self.stack.pop()) is not _MARK:
                taken.append(value)
        taken += [self.stack.pop() for _ in range(fixed)]
        return taken[::-1]

    def _note_global(self, opcode: str, argument: Any, taken: list[Any]) -> None:
        if opcode in ("GLOBAL", "INST"):
            self.wanted[argument.replace(" ", ".")] = None
        elif opcode == "STACK_GLOBAL":
            known = all(isinstance(name, str) for name in taken)
            self.wanted[".".join(taken) if known else COMPUTED] = None
        elif opcode in ("EXT1", "EXT2", "EXT4"):
            self.wanted[f"the extension of code {argument}"] = None

    def _size(self, kind: pickletools.StackObject, parts: list[Any]) -> int:
        if kind in _NEVER_HASHED:
            return 1
        size = 1 + sum(1 if isinstance(part, str) else part for part in parts)
        if size > MAX_TUPLE:
            raise self._endless(f"tuples of more than {MAX_TUPLE:,} values")
        return size

    def _endless(self, what: str) -> FormatError:
        return FormatError(
            f"the pickle of {self.path.name} has {what}, which no weights need",
            where=self.path,
            hint="ask the author for a safetensors file",
        )
