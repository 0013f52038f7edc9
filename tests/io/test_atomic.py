"""A folder appears complete or not at all, whatever ends the run."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftkit.errors import DraftkitError
from draftkit.hub.locate import locate
from draftkit.io import atomic
from draftkit.io.atomic import atomic_folder, check_writable, start_write_back
from draftkit.layout.folder import read_draft

REPOSITORY = Path(__file__).parents[2]

# Writes half of a folder, says so, and waits to be killed.
HALF_A_RUN = """
import sys, time
from pathlib import Path
from draftkit.io.atomic import atomic_folder

with atomic_folder(Path(sys.argv[1]), replaces=lambda folder: True) as folder:
    (folder / "model").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""

# The same, caught after the first renaming of a path: where a system cannot exchange two folders, between moving the
# old one aside and putting the new one in its place.
KILLED_AT_A_RENAME = """
import os, signal, sys
from pathlib import Path
from draftkit.io import atomic

rename, exchanged = Path.rename, atomic._exchanged
atomic._exchanged = lambda *names: sys.argv[2] == "exchange" and exchanged(*names)
def rename_and_die(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = rename_and_die

with atomic.atomic_folder(Path(sys.argv[1]), replaces=lambda folder: True) as folder:
    (folder / "model").write_text("new")
"""


def anything(folder: Path) -> bool:
    return True


def write(out: Path, text: str = "new", replaces: Callable[[Path], bool] | None = None) -> None:
    with atomic_folder(out, replaces) as folder:
        (folder / "model").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(text)


def write_half(out: Path, error: BaseException) -> None:
    with atomic_folder(out, anything) as folder:
        (folder / "model").write_text("half")
        raise error


def content(out: Path) -> dict[str, str]:
    return {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


NEW = {"model": "new", "sub/file": "new"}


def test_a_folder_appears_with_its_missing_parents(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "out")
    assert content(tmp_path / "a" / "b" / "out") == NEW
    assert entries(tmp_path / "a" / "b") == ["out"]


def test_the_folder_has_ordinary_permissions(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "plain").mkdir()
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_nothing_is_to_be_seen_before_the_end(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as folder:
        assert folder.is_relative_to(tmp_path)
        assert all(name.startswith(".out.tmp-") for name in entries(tmp_path))


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert content(tmp_path / "out") == NEW
    assert entries(tmp_path) == ["out"]


def make_folder(out: Path) -> None:
    out.mkdir()
    (out / "old").write_text("old")


def make_file(out: Path) -> None:
    out.write_text("old")


def test_what_is_there_is_replaced_only_where_that_is_wanted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_folder(out)
    for replaces, problem in ((None, "--force"), (lambda folder: False, "has not written")):
        with pytest.raises(DraftkitError, match=problem):
            write(out, replaces=replaces)
        assert content(out) == {"old": "old"}
    write(out, replaces=anything)
    assert content(out) == NEW
    assert entries(tmp_path) == ["out"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    make_file(tmp_path / "out")
    with pytest.raises(DraftkitError, match="is a file"):
        write(tmp_path / "out", replaces=anything)
    assert (tmp_path / "out").read_text() == "old"


def test_what_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match="--force"), atomic_folder(tmp_path / "out"):
        make_folder(tmp_path / "out")
    assert content(tmp_path / "out") == {"old": "old"}
    assert entries(tmp_path) == ["out"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    make_folder(tmp_path / "real")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    write(tmp_path / "out", replaces=anything)
    assert (tmp_path / "out").is_symlink()
    assert content(tmp_path / "real") == NEW


def test_the_current_folder_and_mount_points_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "sub")
    for out in (Path("."), tmp_path / "work", Path("/proc")):
        with pytest.raises(DraftkitError, match="cannot be replaced"):
            write(out, replaces=anything)


def test_nothing_is_replaced_where_the_current_folder_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "out")
    old = content(tmp_path / "out")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(DraftkitError, match="already there"):
        write(tmp_path / "out")
    assert content(tmp_path / "out") == old


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), SystemExit(2), ConnectionError("net")])
def test_an_exception_leaves_the_old_state(tmp_path: Path, error: BaseException) -> None:
    make_folder(tmp_path / "old_out")
    for out in (tmp_path / "old_out", tmp_path / "new_out"):
        with pytest.raises(type(error)):
            write_half(out, error)
    assert content(tmp_path / "old_out") == {"old": "old"}
    assert entries(tmp_path) == ["old_out"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_is_told_with_its_place(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(DraftkitError, match=rf"{os.strerror(number)}(.|\n)*{tmp_path}/out"),
        atomic_folder(tmp_path / "out"),
    ):
        raise OSError(number, os.strerror(number))
    assert entries(tmp_path) == []


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    make_file(tmp_path / "file")
    with pytest.raises(DraftkitError, match=f"where: {tmp_path}/file"):
        write(tmp_path / "file" / "out")


def test_the_old_folder_comes_back_when_the_new_one_cannot_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(atomic, "_exchanged", lambda *names: False)
    make_folder(tmp_path / "out")
    with pytest.raises(DraftkitError, match=os.strerror(errno.EXDEV)):
        write(tmp_path / "out", replaces=anything)
    assert content(tmp_path / "out") == {"old": "old"}
    assert entries(tmp_path) == ["out"]


def test_everything_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = atomic._sync

    def record(path: Path) -> None:
        synced.append(path.name)
        assert path == tmp_path or not (tmp_path / "out").exists()
        sync(path)

    monkeypatch.setattr(atomic, "_sync", record)
    write(tmp_path / "out")
    assert {"model", "sub", "file", tmp_path.name} < set(synced)
    assert synced[-1] == tmp_path.name


@pytest.mark.parametrize("supported", [True, False])
def test_writing_back_takes_up_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    asked: list[tuple[int, int]] = []
    if supported:
        monkeypatch.setattr(os, "posix_fadvise", lambda _, begin, length, advice: asked.append((begin, length)))
    else:
        monkeypatch.delattr(os, "posix_fadvise")
    with (tmp_path / "model").open("wb") as file:
        file.write(b"12345")
        assert start_write_back(file, 0) == 5
        assert (tmp_path / "model").read_bytes() == b"12345"  # what is still in Python's buffer cannot be written back
        file.write(b"678")
        assert start_write_back(file, 5) == 8
    assert asked == ([(0, 5), (5, 3)] if supported else [])


def start(script: str, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, out, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def test_a_killed_run_leaves_the_old_state_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_folder(out)
    with start(HALF_A_RUN, out) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"

        write(out, "first", replaces=anything)  # the other run is alive: its work is left alone
        assert len(entries(tmp_path)) == 2

        run.send_signal(signal.SIGKILL)
        run.wait()
    assert content(out)["model"] == "first"
    assert len(entries(tmp_path)) == 2
    write(out, replaces=anything)
    assert content(out) == NEW
    assert entries(tmp_path) == ["out"]


def killed_at_a_rename(out: Path, how: str) -> None:
    make_folder(out)
    with start(KILLED_AT_A_RENAME, out, how) as run:
        assert run.wait() == -signal.SIGKILL


def test_a_run_killed_between_the_renames_gives_the_old_folder_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    killed_at_a_rename(out, "two renames")
    assert not out.exists()
    with pytest.raises(DraftkitError, match="--force"):
        write(out)
    assert content(out) == {"old": "old"}
    assert entries(tmp_path) == ["out"]
    assert f"{out} is put back" in caplog.text


def test_two_folders_are_exchanged_in_one_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    if not atomic._exchanged(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this system cannot")
    killed_at_a_rename(out, "exchange")
    assert content(out) == {"model": "new"}
    write(out, replaces=anything)
    assert entries(tmp_path) == ["one", "other", "out"]


def test_who_reads_what_a_killed_run_left_aside_puts_it_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed_at_a_rename(tmp_path / "located", "two renames")
    assert locate(str(tmp_path / "located")).path == tmp_path / "located"
    killed_at_a_rename(tmp_path / "read", "two renames")
    with pytest.raises(DraftkitError, match=r"config\.json is missing"):
        read_draft(tmp_path / "read")
    for name in ("located", "read"):
        assert content(tmp_path / name) == {"old": "old"}
        assert f"{tmp_path / name} is put back" in caplog.text
    assert entries(tmp_path) == ["located", "read"]


def test_what_cannot_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at_a_rename(tmp_path / "out", "two renames")
    (left,) = tmp_path.glob(".out.tmp-*/old")

    def refuse(path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(atomic, "locked", refuse)
    with pytest.raises(DraftkitError, match=rf"where: {left}\n.*mv {left} {tmp_path / 'out'}"):
        locate(str(tmp_path / "out"))


def test_only_leftovers_of_the_same_output_are_removed(tmp_path: Path) -> None:
    others = [".out2.tmp-00ff", ".out.tmp-mine", "out.tmp-00ff"]
    for name in (*others, ".out.tmp-00ff", ".out.gone-00ff"):
        (tmp_path / name).mkdir()
    write(tmp_path / "out")
    assert entries(tmp_path) == sorted([*others, "out"])


# Works until it is killed.
WORKER = """
import itertools, os, sys
from pathlib import Path
from draftkit.errors import DraftkitError
from draftkit.io.atomic import atomic_folder

os.fsync = lambda descriptor: None
for number in itertools.count():
    try:
        with atomic_folder(Path(sys.argv[1]), lambda folder: True) as folder:
            for name in "abc":
                (folder / name).write_text(sys.argv[2])
            assert sorted(os.listdir(folder)) == ["a", "b", "c"], "another run took it away"
    except DraftkitError as error:  # another run's output appeared between the two renames
        assert "Directory not empty" in str(error), error
    if number == 20:
        print("works", flush=True)
"""


@pytest.mark.slow
def test_runs_that_are_killed_among_others_that_work(tmp_path: Path) -> None:
    """Each run replaces what others write; none takes another's work away, and the dead ones' remains go."""
    out = tmp_path / "volume" / "out"
    for _ in range(3):
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, out, str(number)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
            )
            for number in range(3)
        ]  # fmt: skip
        for run in runs:
            assert run.stdout is not None
            assert run.stderr is not None
            line = run.stdout.readline()
            assert line == "works\n", run.stderr.read()
        for run in runs:
            run.kill()
            run.communicate()
    write(out, replaces=anything)
    assert content(out) == NEW
    assert entries(out.parent) == ["out"]


def test_the_lock_is_taken_or_the_folder_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that another run tidies away before its owner has the lock is not used."""
    real, stolen = fcntl.flock, []

    def steal(descriptor: int, operation: int) -> None:
        if not stolen:
            stolen.extend(tmp_path.iterdir())
            stolen[0].rename(tmp_path / ".out.gone-00ff")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", steal)
    write(tmp_path / "out")
    assert stolen
    assert content(tmp_path / "out") == NEW


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells the dead from the living there, so leftovers stay."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".out.tmp-00ff").mkdir()
    write(tmp_path / "out")
    assert content(tmp_path / "out") == NEW
    assert entries(tmp_path) == [".out.tmp-00ff", "out"]


def test_a_temporary_folder_goes_with_its_run_or_with_the_next(tmp_path: Path) -> None:
    code = "import os; from draftkit.io.atomic import temporary_folder as t\nwith t() as f: (f / 'x').touch()"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    for ending, left in (("os.kill(os.getpid(), 9)", 1), ("pass", 0)):
        subprocess.run([sys.executable, "-c", f"{code}; {ending}"], check=False, env=environment, cwd=REPOSITORY)
        assert len(entries(tmp_path)) == left


@pytest.mark.parametrize("path", ["file", "new/folders/file"])
def test_what_can_be_written_is_found_out_without_a_trace(tmp_path: Path, path: str) -> None:
    check_writable(tmp_path / path)
    assert entries(tmp_path) == []
    make_file(tmp_path / "blocks")
    with pytest.raises(DraftkitError, match="cannot be written"):
        check_writable(tmp_path / "blocks" / path)


def test_a_read_only_place_is_named_as_the_user_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(out: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(out.parent / f".{out.name}.tmp-00ff"))

    monkeypatch.setattr("draftkit.io.atomic._begin", refuse)
    run = tmp_path / "run" / "draft"
    with pytest.raises(DraftkitError, match=f"where: {re.escape(str(run))}$"):
        check_writable(run)
