"""Copies of remote objects: whole, fetched once, and safe for several processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fixtures.plain_store import PlainStore

from draftkit.errors import DraftkitError, SourceError
from draftkit.io.cache import local_file, named
from draftkit.io.store import Store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_files_of_stores_are_copied_until_they_change() -> None:
    address = f"memory://{uuid4().hex}"
    Store(address).write("a.txt", b"one")
    copy = local_file(f"{address}/a.txt")
    assert (copy.read_bytes(), copy.name, named(copy)) == (b"one", "a.txt", f"{address}/a.txt")
    assert local_file(f"{address}/a.txt") == copy
    Store(address).write("a.txt", b"two")
    assert local_file(f"{address}/a.txt").read_bytes() == b"two"
    assert copy.read_bytes() == b"one"
    assert local_file("some/path") == Path("some/path")
    with pytest.raises(SourceError, match="is missing"):
        local_file(f"{address}/b.txt")


def test_what_was_not_fetched_whole_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, usual = f"plain://{tmp_path}/store", PlainStore.get_file
    Store(address).write("a", b"0123456789")

    def cut(files: PlainStore, place: str, path: str, **more: Any) -> None:
        Path(path).write_bytes(b"012")

    def killed(files: PlainStore, place: str, path: str, **more: Any) -> None:
        Path(path).write_bytes(b"012")
        os._exit(9)

    monkeypatch.setattr(PlainStore, "get_file", cut)
    with pytest.raises(DraftkitError, match="fetched with 3 bytes"):
        local_file(f"{address}/a")
    monkeypatch.setattr(PlainStore, "get_file", killed)
    if (child := os.fork()) == 0:
        local_file(f"{address}/a")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.setattr(PlainStore, "get_file", usual)
    assert local_file(f"{address}/a").read_bytes() == b"0123456789"


def test_one_of_several_that_want_a_file_fetches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, usual = f"plain://{tmp_path}/store", PlainStore.get_file
    Store(address).write("a", b"0123456789")
    fetched, found = list[str](), list[bytes]()

    def slow(files: PlainStore, place: str, path: str, **more: Any) -> None:
        fetched.append(place)
        time.sleep(0.2)
        usual(files, place, path, **more)

    monkeypatch.setattr(PlainStore, "get_file", slow)
    threads = [threading.Thread(target=lambda: found.append(local_file(f"{address}/a").read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(fetched), found) == (1, [b"0123456789"] * 4)
