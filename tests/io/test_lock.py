"""Two processes never write one output."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import Command

from draftkit.errors import DraftkitError
from draftkit.io.lock import sole_writer
from draftkit.zoo import prompts_path

HOLD = """
import sys
from pathlib import Path
from draftkit.io.lock import sole_writer

with sole_writer(Path(sys.argv[1]), folder=sys.argv[2] == "True"):
    print("holds", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(out: Path, *, folder: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes `out` until the body ends, or it is killed."""
    command = [sys.executable, "-c", HOLD, str(out), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("folder", [False, True])
def test_another_process_is_named_until_it_is_gone(folder: bool, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with held(out, folder=folder) as process:
        said = rf"writing out: process {process.pid} on {re.escape(socket.gethostname())}, since 2.*: -c .*out {folder}"
        with pytest.raises(DraftkitError, match=said), sole_writer(out, folder=folder):
            pass
        process.kill()
        process.wait()
        with sole_writer(out, folder=folder):
            assert str(os.getpid()) in next((tmp_path / "new").rglob("*lock")).read_text()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))  # the folders are those of the killed one


def test_nothing_is_left_of_a_lock_but_what_was_written(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "a" / "b" / "out"):
        pass
    assert entries(tmp_path) == []
    with sole_writer(tmp_path / "out", folder=True):
        (tmp_path / "out" / "mine").touch()
    assert entries(tmp_path / "out") == ["mine"]


def test_a_process_may_write_an_output_from_several_places_and_a_fork_is_another(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = ExitStack(), ExitStack()
    first.enter_context(sole_writer(out))
    second.enter_context(sole_writer(out))
    first.close()  # in any order
    child = os.fork()
    if not child:
        try:
            with sole_writer(out):
                os._exit(0)
        except DraftkitError:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    second.close()
    assert entries(tmp_path) == []


COUNT = """
import sys
from pathlib import Path
from draftkit.errors import DraftkitError
from draftkit.io.lock import sole_writer

out, done = Path(sys.argv[1]), 0
while done < 40:
    try:
        with sole_writer(out):
            count = int(out.read_text())
            out.write_text(str(count + 1))
            done += 1
    except DraftkitError:
        pass
"""


def test_no_two_are_ever_in_at_once(tmp_path: Path) -> None:
    """The file of the lock comes and goes meanwhile."""
    out = tmp_path / "out"
    out.write_text("0")
    runs = [subprocess.Popen([sys.executable, "-c", COUNT, str(out)]) for _ in range(3)]
    assert [run.wait(timeout=100) for run in runs] == [0] * 3
    assert (out.read_text(), entries(tmp_path)) == ("120", ["out"])


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with held(tmp_path / "out"), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(fcntl, "flock", refuse)
        with sole_writer(tmp_path / "out"):
            pass
    assert f"{tmp_path / 'out'}: its file system has no locks" in caplog.text


def test_what_lies_in_the_place_of_a_lock_is_one_message(tmp_path: Path) -> None:
    (tmp_path / ".linked.lock").symlink_to(tmp_path / "precious")
    (tmp_path / ".taken.lock").mkdir()
    for name in ("linked", "taken"):
        with pytest.raises(DraftkitError, match=f"{name} cannot be written"), sole_writer(tmp_path / name):
            pass
    assert not (tmp_path / "precious").exists()


COMMANDS = {
    "data prepare": ("IN", "OUT", "--target", "zoo:target"),
    "data regenerate": ("IN", "OUT", "--target", "zoo:target"),
    "data synthesize": ("--target", "zoo:target", "--count", 1, "--out", "OUT"),
    "data states": ("IN", "FOLDER", "--target", "zoo:target"),
    "train": ("--recipe", "eagle3", "--target", "zoo:target", "--data", "IN", "--out", "FOLDER"),
    "adapt": ("--draft", "zoo:eagle3", "--target", "zoo:target", "--traffic", "IN", "--out", "FOLDER"),
    "eval": ("--target", "zoo:target", "--draft", "zoo:eagle3", "--out", "OUT"),
    "eval --resume": ("--target", "zoo:target", "--draft", "zoo:eagle3", "--out", "OUT"),
    "eval --csv": ("--target", "zoo:target", "--draft", "zoo:eagle3", "--records", "OUT"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_output_that_another_process_writes(
    command: str, draftkit: Command, tmp_path: Path
) -> None:
    """Before it reads what is there, so that nothing of the other's is cut off or believed."""
    folder, out = "FOLDER" in COMMANDS[command], tmp_path / "out"
    rows = tmp_path / "in.jsonl"
    rows.write_text(prompts_path().read_text().partition("\n")[0] + "\n")
    if not folder:
        out.write_text('{"format":"draftkit-regenerated","half of a l')
    before = out.read_bytes() if out.exists() else b""
    places = {"IN": rows, "OUT": out, "FOLDER": out}
    with held(out, folder=folder) as process:
        ran = draftkit(*command.split(), *(places.get(str(word), word) for word in COMMANDS[command]))
        assert (ran.code, f"another process is writing out: process {process.pid}" in ran.err) == (1, True), ran.err
        assert (ran.out, out.is_file() and out.read_bytes()) == ("", before if not folder else False)
