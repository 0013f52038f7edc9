"""The cache of remote objects: never larger than it may be, and safe for several processes."""

from __future__ import annotations

import fcntl
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkit.errors import DraftkitError, SourceError
from draftkit.io.cache import TOTAL, LocalCache, local_cache, local_copy, local_file
from draftkit.io.store import Store


def filled(size: int, calls: list[int] | None = None) -> Callable[[Path], None]:
    def fetch(path: Path) -> None:
        path.write_bytes(bytes([size % 251]) * size)
        if calls is not None:
            calls.append(size)

    return fetch


def size_of(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in {*files} - {TOTAL}:
            with suppress(FileNotFoundError):  # another process may just have removed it
                total += Path(place, name).stat().st_size
    return total


@settings(max_examples=30, deadline=None)
@given(asked=st.lists(st.integers(1, 40), max_size=30))
def test_it_holds_no_more_than_it_may_and_drops_what_was_read_first(
    asked: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache, calls = LocalCache(tmp_path_factory.mktemp("cache"), 100), list[int]()
    held: list[int] = []
    for size in asked:
        before = len(calls)
        with cache.copy(f"k{size}", "x", size, filled(size, calls)) as path:
            assert path.read_bytes() == bytes([size % 251]) * size
            assert size_of(cache.folder) <= 100
        assert (len(calls) == before) is (size in held)
        held = [*(one for one in held if one != size), size]
        while sum(held) > 100:
            del held[0]
        time.sleep(0.002)  # the times of reading are told apart
    assert sorted(int(path.stem[1:]) for path in cache.folder.iterdir() if path.is_dir() and path.name[0] == "k") == (
        sorted(held)
    )


def test_what_is_being_read_stays(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path, 100)
    with cache.copy("a", "x", 60, filled(60)) as path:
        with pytest.raises(DraftkitError, match=r"do not fit .* are in use"), cache.copy("b", "x", 50, filled(50)):
            pass
        with cache.copy("c", "x", 40, filled(40)):
            assert path.stat().st_size == 60
    with cache.copy("b", "x", 50, filled(50)):
        assert not path.exists()
    with pytest.raises(DraftkitError, match="do not fit into the cache"), cache.copy("d", "x", 101, filled(101)):
        pass


def test_it_is_listed_where_something_has_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many copies more than one at once; and what a killed process has counted and not fetched is found then."""
    cache, listed, usual = LocalCache(tmp_path, 100), list[Path](), Path.iterdir
    monkeypatch.setattr("draftkit.io.cache.MANY", 10)
    monkeypatch.setattr(Path, "iterdir", lambda folder: listed.append(folder) or usual(folder))
    for number in range(101):
        with cache.copy(f"k{number}", "x", 1, filled(1)):
            pass
    assert len(listed) == 2  # the first time, and when it was full
    assert size_of(tmp_path) == int((tmp_path / TOTAL).read_text()) == 95
    for damaged in ("", "999999"):
        (tmp_path / TOTAL).write_text(damaged)
        with cache.copy(f"again{damaged}", "x", 1, filled(1)):
            assert size_of(tmp_path) == int((tmp_path / TOTAL).read_text())


def test_what_was_not_fetched_whole_is_fetched_again(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path, 100)
    with pytest.raises(DraftkitError, match="9 bytes"), cache.copy("a", "x", 10, filled(9)):
        pass

    def fail(path: Path) -> None:
        path.write_bytes(b"1")
        raise SourceError("gone")

    with pytest.raises(SourceError), cache.copy("a", "x", 10, fail):
        pass
    with cache.copy("a", "x", 10, filled(10)) as path:
        assert path.stat().st_size == 10
    if (child := os.fork()) == 0:  # killed while it fetches
        with cache.copy("b", "x", 90, lambda part: os._exit(9)):
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with cache.copy("c", "x", 50, filled(50)), cache.copy("b", "x", 50, filled(50)) as path:
        assert path.stat().st_size == 50


@pytest.mark.parametrize("limit", [100, 1000])
def test_several_processes_use_one_cache(limit: int, tmp_path: Path) -> None:
    """Each finds what it wants whole, together they hold no more than they may, and where all of it fits one of them
    fetches for all."""
    log = tmp_path / "fetched"

    def work(seed: int) -> None:
        cache = LocalCache(tmp_path / "cache", limit)
        for turn in range(30):
            size = 20 + (turn * 7 + seed) % 5

            def fetch(path: Path, size: int = size) -> None:
                filled(size)(path)
                with log.open("a") as file:
                    file.write(f"{size}\n")

            with cache.copy(f"k{size}", "x", size, fetch) as path:
                found = path.read_bytes()
                assert found == bytes([size % 251]) * size
                assert size_of(tmp_path / "cache") <= limit

    children = []
    for seed in (0, 0, 2):
        if (child := os.fork()) == 0:
            code = 1
            try:
                work(seed)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert size_of(tmp_path / "cache") <= limit
    fetched = log.read_text().split()
    assert {*fetched} == {"20", "21", "22", "23", "24"}
    assert limit == 100 or len(fetched) == 5


def test_files_of_stores_are_copied_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path))
    address = f"memory://{uuid4().hex}"
    Store(address).write("a.txt", b"one")
    assert local_file(f"{address}/a.txt").read_bytes() == b"one"
    assert local_file(f"{address}/a.txt") == local_file(f"{address}/a.txt")
    assert local_file(f"{address}/a.txt").name == "a.txt"
    Store(address).write("a.txt", b"two")
    assert local_file(f"{address}/a.txt").read_bytes() == b"two"
    assert local_file("some/path") == Path("some/path")
    with pytest.raises(SourceError, match="is missing"):
        local_copy(f"{address}/b.txt")


def test_the_environment_says_how_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("DRAFTKIT_CACHE_GB", "0.5")
    assert str(local_cache()) == f"{tmp_path}/copies, of 0.5 GB at most"
    for wrong in ("0", "-1", "many", "nan", "inf"):
        monkeypatch.setenv("DRAFTKIT_CACHE_GB", wrong)
        with pytest.raises(DraftkitError, match=f"DRAFTKIT_CACHE_GB is {wrong}"):
            local_cache()


def test_nothing_else_in_its_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called: copies end in their size, and so may what a user has there."""
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("DRAFTKIT_CACHE_GB", "1e-8")
    (tmp_path / "photos.2024").mkdir()
    address = f"memory://{uuid4().hex}"
    for number in range(3):
        Store(address).write(f"{number}", b"12345678")
        with local_copy(f"{address}/{number}") as path:
            assert path.read_bytes() == b"12345678"
    assert (tmp_path / "photos.2024").is_dir()
    assert list((tmp_path / "copies").glob("*.8/*")) == [path]


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DraftkitError, match="has no locks"), LocalCache(tmp_path, 9).copy("a", "x", 1, filled(1)):
        pass
