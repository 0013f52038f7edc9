"""Claims where nothing locks: in stores of objects, and on file systems without locks.

A claim `NAME~N` is an object that is made only where it is not there yet (a conditional put; `O_EXCL` on a disk). Its
owner writes it anew every few seconds. Whoever sees it unchanged for longer takes the owner for dead, and makes the one
of the next number: one of all who try does. Clocks are not compared. An owner that was only halted goes on beside the
new one, so that what is done under a claim must come out the same twice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol
from uuid import uuid4

from draftkit.errors import DraftkitError

LEASE = 60.0  # seconds within which a live owner has written its claim anew
FREE = b"free"


class Objects(Protocol):
    """Small objects by name, in one place."""

    def names(self) -> list[str]:
        """The names of all that are there."""

    def read(self, name: str) -> bytes | None:
        """The content of one; None where it is not there."""

    def create(self, name: str, content: bytes) -> bool:
        """Make one; False where it is there already, of however many that try at once for all but one."""

    def write(self, name: str, content: bytes) -> None:
        """Write one anew."""

    def remove(self, name: str) -> None:
        """Take one away; it may be gone."""


class FilesOfFolder:
    """Objects that are files of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [path.name for path in self.folder.iterdir()]
        return []

    def read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return (self.folder / name).read_bytes()
        return None

    def create(self, name: str, content: bytes) -> bool:
        with suppress(FileExistsError), self._made(name) as file:
            file.write(content)
            return True
        return False

    def _made(self, name: str) -> BinaryIO:
        """A file that was not there, in a folder that another process may remove whenever it is empty."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                return (self.folder / name).open("xb")

    def write(self, name: str, content: bytes) -> None:
        with (self.folder / name).open("r+b") as file:  # all contents have one length
            file.write(content)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


class Leases:
    """The claims among some `objects`, as one process sees them."""

    def __init__(self, objects: Objects):
        self._objects = objects
        self._seen: dict[str, tuple[bytes | None, float]] = {}  # contents, and since when they are that

    @contextmanager
    def claimed(self, name: str, *, lasting: bool = False) -> Iterator[bool]:
        """Whether this process may do a piece of work while the body runs; False where another does it, or did just
        now.

        `lasting`: for what is done again and again. Where a piece is done once, whoever has claimed it looks first
        whether it is done.
        """
        mine = self._take(name)
        if mine is None:
            yield False
            return
        over = threading.Event()
        thread = threading.Thread(target=self._renew, args=(mine, over), daemon=True)
        thread.start()
        try:
            yield True
        finally:
            over.set()
            thread.join()
            with suppress(OSError, DraftkitError):  # where it cannot be reached, it ends by itself
                self._objects.write(mine, _content(FREE)) if lasting else self._objects.remove(mine)

    def settle(self) -> None:
        """Take away the claims of processes that are gone, as far as that is known."""
        for name in {claim.rpartition("~")[0] for claim in self._objects.names() if "~" in claim}:
            number = self._newest(name)
            if number is not None and not self._is_held(f"{name}~{number}"):
                self._objects.remove(f"{name}~{number}")

    def _take(self, name: str) -> str | None:
        """The claim that this process has made; None where another has it."""
        newest = self._newest(name)
        if newest is not None and self._is_held(f"{name}~{newest}"):
            return None
        number = 0 if newest is None else newest + 1
        mine = f"{name}~{number}"
        if not self._objects.create(mine, _content(uuid4().bytes)):
            return None
        if self._newest(name) != number:  # others had come further before this was made
            self._objects.remove(mine)
            return None
        if newest is not None:
            self._objects.remove(f"{name}~{newest}")
        return mine

    def _newest(self, name: str) -> int | None:
        claims = (claim.rpartition("~") for claim in self._objects.names())
        return max((int(number) for of, _, number in claims if of == name), default=None)

    def _is_held(self, claim: str) -> bool:
        """Whether its owner lives, as far as is known: until it was seen unchanged for so long, it does."""
        content, now = self._objects.read(claim), time.monotonic()
        if content is None or content == _content(FREE):
            return False
        if claim not in self._seen or self._seen[claim][0] != content:
            self._seen[claim] = content, now
        return now - self._seen[claim][1] < LEASE

    def _renew(self, claim: str, over: threading.Event) -> None:
        while not over.wait(LEASE / 4):
            with suppress(Exception):  # the next time may succeed
                self._objects.write(claim, _content(os.urandom(16)))


def _content(text: bytes) -> bytes:
    return text.ljust(16)
