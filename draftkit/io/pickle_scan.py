"""What a pickle asks for, read from its opcodes alone: nothing in it is imported, built or called."""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import IO, Any, Final

from draftkit.errors import FormatError

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
        """Walk through one pickle."""
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
