"""Files of answers that grow while they are made: one of a disk line by line, one in a store part by part.

A killed run leaves whole lines. Lines are JSON objects, and the first says what the others are.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Protocol

from draftkit.errors import DraftkitError, FormatError
from draftkit.io.atomic import DISK_FAILURES
from draftkit.io.jsonl import dump_line, parse_line, read_lines
from draftkit.io.lock import sole_writer
from draftkit.io.store import Store, is_address, is_passing

BLOCK = 1 << 16  # bytes that are searched for a line end at a time
FREE_SPACE = "what was there before is kept: free some space and run the command again"


class Journal(Protocol):
    """What was written, and what is added to it. `every`: the seconds between two times that it is best added to."""

    every: float

    def begun(self) -> bool:
        """Whether anything is there."""

    def lines(self) -> Iterator[tuple[str, dict[str, object]]]:
        """The lines, the first one too, each with its place. Raises `FormatError` naming a damaged one."""

    def append(self, header: bytes, lines: Sequence[bytes]) -> None:
        """Add lines and wait until they are kept, after a header where nothing is there. On failure nothing has
        changed; raises `DraftkitError`."""


def journal_at(place: Path | str, format: str) -> Journal:
    """What is at a path or an address, held by this process alone. Raises `DraftkitError` for what is something else,
    and while another process has it."""
    return JournalParts(str(place), format) if is_address(place) else JournalFile(Path(place), format)


class JournalFile:
    """A file, whose lines are on disk a second after they were made. Opening it removes a last line that was only half
    written."""

    every = 1.0

    def __init__(self, path: Path, format: str):
        self.path = path
        held = ExitStack()
        weakref.finalize(self, held.close)
        held.enter_context(sole_writer(path))
        if path.exists():
            _cut_half_line(path, format)

    def begun(self) -> bool:
        return self.path.exists()

    def lines(self) -> Iterator[tuple[str, dict[str, object]]]:
        return ((f"{self.path}, line {number}", line) for number, line in read_lines(self.path))

    def append(self, header: bytes, lines: Sequence[bytes]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                begin = file.tell()
                try:
                    _write_all(file.fileno(), b"".join(lines if begin else [header, *lines]))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(begin)
                    raise
        except OSError as error:
            if error.errno not in DISK_FAILURES:
                raise
            said = f"writing {self.path.name} failed: {error.strerror}"
            raise DraftkitError(said, where=self.path, hint=FREE_SPACE) from error


class JournalParts:
    """The objects `00000000.jsonl`, `00000001.jsonl` … beneath an address: no store adds to an object. Each begins with
    the header, so that it is a file of answers by itself. Two processes may open it: the second to add a part is
    refused. Where the store cannot tell that, one may."""

    every = 30.0

    def __init__(self, address: str, format: str):
        self._store = Store(address)
        self._parts = [name for name in self._store.names() if not is_passing(name)]
        self._begins = dump_line({"format": format})[:-2]
        self._header = b""
        if self._parts and self._parts != [part_name(number) for number in range(len(self._parts))]:
            raise not_ours(address)
        held = ExitStack()
        weakref.finalize(self, held.close)
        held.enter_context(self._store.shared())

    def begun(self) -> bool:
        return bool(self._parts)

    def lines(self) -> Iterator[tuple[str, dict[str, object]]]:
        for part in self._parts:
            header, *lines = (self._store.read(part) or b"\n").splitlines(keepends=True)
            if not header.startswith(self._begins):
                raise not_ours(self._store.address)
            if part == self._parts[0]:
                self._header = header
                yield f"{self._store}/{part}, line 1", parse_line(header, f"{self._store}/{part}, line 1")
            if header != self._header:
                raise FormatError("the part was made with other settings", where=f"{self._store}/{part}")
            for number, line in enumerate(lines, start=2):
                where = f"{self._store}/{part}, line {number}"
                yield where, parse_line(line, where)

    def append(self, header: bytes, lines: Sequence[bytes]) -> None:
        part = part_name(len(self._parts))
        if not self._store.create(part, b"".join([self._header or header, *lines])):
            raise DraftkitError(
                "another process is adding to it",
                where=f"{self._store}/{part}",
                hint="wait until it has ended: the same command goes on then",
            )
        self._header = self._header or header
        self._parts.append(part)


def part_name(number: int) -> str:
    return f"{number:08d}.jsonl"


def not_ours(place: Path | str) -> DraftkitError:
    """What is there is something else."""
    return DraftkitError(
        "the output is already there, and is no file of responses", where=place, hint="choose another file"
    )


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _cut_half_line(path: Path, format: str) -> None:
    """Remove what follows the last line end; a killed run may have left it. Only a file of ours is touched."""
    begins = dump_line({"format": format})[:-2]
    try:
        with path.open("rb+") as file:
            if file.read(len(begins)) != begins[: file.tell()]:
                raise not_ours(path)
            file.truncate(_end_of_lines(file))
    except OSError as error:
        raise DraftkitError(f"{path.name} cannot be continued: {error.strerror}", where=path) from error


def _end_of_lines(file: BinaryIO) -> int:
    """The offset at which the last whole line ends."""
    position = file.seek(0, os.SEEK_END)
    while position:
        begin = max(0, position - BLOCK)
        file.seek(begin)
        end = file.read(position - begin).rfind(b"\n")
        if end >= 0:
            return begin + end + 1
        position = begin
    return 0
