"""Claims without locks: one of many who try has it, an owner that lives keeps it, and that of a dead one returns."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from draftkit.errors import SourceError
from draftkit.io import leases
from draftkit.io.leases import FilesOfFolder, Leases

QUICK = 1.0  # seconds of a lease


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE", QUICK)


def abandoned(folder: Path, name: str) -> None:
    """A claim whose owner was killed."""
    assert FilesOfFolder(folder).create(f"{name}~0", b"0123456789abcdef")


def wait_for(claims: Leases, name: str) -> float:
    """The seconds until it can be claimed."""
    began = time.monotonic()
    while time.monotonic() - began < 20:
        with claims.claimed(name) as mine:
            if mine:
                return time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"{name} stays claimed")


def test_one_has_it_at_a_time(tmp_path: Path) -> None:
    one, other = (Leases(FilesOfFolder(tmp_path)) for _ in range(2))
    for lasting in (False, True):
        with one.claimed("a", lasting=lasting) as mine, other.claimed("a") as theirs, other.claimed("b") as apart:
            assert (mine, theirs, apart) == (True, False, True)
    with other.claimed("a") as theirs:
        assert theirs


def test_an_owner_that_lives_keeps_it(tmp_path: Path) -> None:
    one, other = (Leases(FilesOfFolder(tmp_path)) for _ in range(2))
    until = time.monotonic() + 2 * QUICK
    with one.claimed("a") as mine:
        assert mine
        while time.monotonic() < until:
            with other.claimed("a") as theirs:
                assert not theirs
            time.sleep(0.02)


def test_the_claim_of_a_dead_one_returns_to_one_of_all_who_wait(tmp_path: Path) -> None:
    abandoned(tmp_path, "a")
    taken: list[int] = []

    def wait(number: int) -> None:
        claims, began = Leases(FilesOfFolder(tmp_path)), time.monotonic()
        with ExitStack() as held:
            while not taken and time.monotonic() - began < 20:
                if held.enter_context(claims.claimed("a")):
                    taken.append(number)
                    over.wait(2 * QUICK)
                time.sleep(0.01)

    over = threading.Event()
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert wait_for(Leases(FilesOfFolder(tmp_path)), "a") < QUICK
    assert os.listdir(tmp_path) == []


def test_counters_lose_nothing(tmp_path: Path) -> None:
    """What is done again and again, by several, one at a time."""
    count = tmp_path / "count"
    count.write_text("0")

    def add() -> None:
        claims, left = Leases(FilesOfFolder(tmp_path / "claims")), 20
        while left:
            with claims.claimed("count", lasting=True) as mine:
                if mine:
                    count.write_text(str(int(count.read_text()) + 1))
                    left -= 1
            time.sleep(0.001)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.read_text() == "80"
    Leases(FilesOfFolder(tmp_path / "claims")).settle()
    assert os.listdir(tmp_path / "claims") == []


class Vanishing(FilesOfFolder):
    """A store that cannot be reached any more once a claim is made."""

    def write(self, name: str, content: bytes) -> None:
        raise SourceError("the store cannot be reached")

    def remove(self, name: str) -> None:
        self.write(name, b"")


def test_work_that_is_done_does_not_fail_by_its_claim(tmp_path: Path) -> None:
    for lasting in (False, True):
        with Leases(Vanishing(tmp_path)).claimed(f"a{lasting}", lasting=lasting) as mine:
            assert mine
    with pytest.raises(ValueError, match="its own"), Leases(Vanishing(tmp_path)).claimed("b"):
        raise ValueError("its own")


def test_a_folder_that_goes_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends its work last removes it."""
    real, goes = Path.mkdir, iter([True, False])

    def mkdir(path: Path, *given: Any, **named: Any) -> None:
        real(path, *given, **named)
        if next(goes):
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert FilesOfFolder(tmp_path / "claims").create("a~0", b"1")
    assert FilesOfFolder(tmp_path / "none").names() == []
