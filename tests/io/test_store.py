"""Objects in stores: read, written and created once; what cannot be reached is one message."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from uuid import uuid4

import pytest
from fixtures import plain_store

from draftkit.errors import DraftkitError, SourceError
from draftkit.io.store import Store, is_address, is_there, written

assert plain_store


@pytest.fixture(params=["memory", "plain"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid4().hex}" if request.param == "memory" else f"plain://{tmp_path}/store"


def test_what_an_address_is() -> None:
    assert [is_address(place) for place in ("s3://b/x", "gs://b", "memory://a", "plain:///tmp")] == [True] * 4
    places = ("hf://datasets/a/b", "a/b", "/tmp/x://y", Path("x"), "zoo:target", "://x", "C:/x")
    assert not any(map(is_address, places))


def test_objects_are_read_as_they_were_written(address: str, tmp_path: Path) -> None:
    store = Store(address)
    assert (store.names(), store.read("a"), store.size("a"), is_there(address)) == ([], None, None, False)
    store.write("a/b", b"0123456789")
    store.write("c", b"1")
    assert (store.names(), store.read("a/b")) == (["a/b", "c"], b"0123456789")
    assert (store.size("a/b"), store.size("a"), is_there(address)) == (10, None, True)
    one = Store(f"{address}/a/b")
    assert (one.names(), one.read(), one.size()) == ([""], b"0123456789", 10)
    before = store.version("c")
    store.write("c", b"22")
    assert store.version("c") != before
    store.download(tmp_path / "file", "c")
    assert (tmp_path / "file").read_bytes() == b"22"
    for _ in range(2):
        store.remove("c")
    assert store.names() == ["a/b"]


def test_what_is_replaced_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where fsspec believes that objects never change, as it does of http."""
    monkeypatch.setattr(plain_store.PlainStore, "ukey", lambda *_: "the same")
    store = Store(f"plain://{tmp_path}/store")
    versions = set()
    for content in (b"one", b"other"):
        store.write("a", content)
        versions |= {store.version("a"), store.version("a")}
    assert len(versions) == 2


def test_what_is_created_is_so_once(address: str) -> None:
    store, found = Store(address), []
    assert store.creates_once
    threads = [threading.Thread(target=lambda n=n: found.append(store.create("a", bytes([n])))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 7 + [True]
    assert store.names() == ["a"]


def test_a_store_that_creates_twice_is_known(tmp_path: Path) -> None:
    assert not Store(f"old://{tmp_path}").creates_once
    assert not Store(f"looking://{tmp_path}").creates_once
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_put_there_when_it_is_whole(address: str) -> None:
    with pytest.raises(FileNotFoundError), written(f"{address}/x.txt") as path:
        (path / "none").write_text("half")
    assert not is_there(f"{address}/x.txt")
    with written(f"{address}/x.txt") as path:
        path.write_text("whole")
    with pytest.raises(DraftkitError, match="already there"), written(f"{address}/x.txt"):
        pass
    assert Store(address).read("x.txt") == b"whole"


def test_what_cannot_be_reached_says_why() -> None:
    with pytest.raises(SourceError, match=r"cannot be opened.*\n.*nowhere://x"):
        Store("nowhere://x")
    with pytest.raises(SourceError, match="pip install s3fs"):
        Store("s3://bucket/x")


def test_a_disk_that_is_full_is_no_fault_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"plain://{tmp_path}/store")
    store.write("a", b"1")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plain_store.PlainStore, "get_file", full)
    with pytest.raises(SourceError, match=r"No space left on device\n(.*\n)*  next: free some space"):
        store.download(tmp_path / "a", "a")
