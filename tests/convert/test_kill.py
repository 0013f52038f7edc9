"""`kill -9` at any moment of a conversion leaves the old output, the new one or none, and the next run tidies up."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico

from draftkit.convert.unified import PROVENANCE_FILE

REPOSITORY = Path(__file__).parents[2]
CLI = "import sys; from draftkit.cli import main; main()"

# Runs the command line in forks of a process that has imported everything, each killed before its N-th look at or
# change of the file system: between two of these, nothing changes but what a file in the hidden folder holds. Prints
# how each ended.
FORKS = """
import contextlib, io, json, os, signal, sys
from draftkit.cli import main

os.fsync = lambda descriptor: None  # the death of a process loses nothing that was written

def run(arguments):
    sys.argv = ["draftkit", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as exit:
            return exit.code or 0
    return 0

def run_and_die(arguments, kill_at):
    count = 0
    def on_event(event, values):
        nonlocal count
        if event == "open" or event.startswith(("os.", "shutil.")):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(on_event)
    os._exit(run(arguments))

assert run(sys.argv[1:]) == 0
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        run_and_die(**request)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Content = dict[str, bytes]
Run = Callable[..., int]


def content(folder: Path) -> Content | None:
    """What a folder holds, or None when there is none."""
    if not folder.exists():
        return None
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_old(out: Path) -> Content:
    (out / "eval").mkdir(parents=True)
    (out / PROVENANCE_FILE).write_text("{}")
    for index in range(3):
        (out / f"old-{index}.safetensors").write_text("old")
        (out / "eval" / f"old-{index}").write_text("old")
    old = content(out)
    assert old is not None
    return old


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill") / "source"
    return pico.write_checkpoint(folder, pico.eagle_config(), pico.eagle_tensors(embed=False), safetensors=True)


@pytest.fixture(scope="module")
def run(source: Path) -> Iterator[Run]:
    """`run(out, "--force", kill_at=7)`: convert, in a process killed before its 7th step; returns how it ended."""
    command: list[str | Path] = [sys.executable, "-c", FORKS, "convert", source, source.parent / "warm", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as server:
        requests, endings = server.stdin, server.stdout
        assert requests is not None
        assert endings is not None

        def request(out: Path, *options: str, kill_at: int | None = None) -> int:
            arguments = ["convert", str(source), str(out), "--json", *options]
            requests.write(json.dumps({"arguments": arguments, "kill_at": kill_at}) + "\n")
            requests.flush()
            return int(endings.readline())

        yield request
        requests.close()


@pytest.fixture(scope="module")
def new(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Content:
    """What an undisturbed run writes."""
    out = tmp_path_factory.mktemp("new") / "out"
    assert run(out) == 0
    converted = content(out)
    assert converted is not None
    assert {"config.json", "model.safetensors"} <= converted.keys()
    return converted


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# Every fourth step in each run of the tests, every step among the long proofs.
EVERY = pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.long)])


def kills(run: Run, out: Path, *options: str, every: int) -> Iterator[None]:
    """Kill a run at its first step, the next so many steps later, and so on, until one comes to its end."""
    for step in range(1, 10_000, every):
        ended = run(out, *options, kill_at=step)
        if ended == 0:
            assert step > 20
            return
        assert ended == -signal.SIGKILL
        yield


@pytest.mark.slow
@EVERY
def test_a_new_output_is_whole_or_not_there(every: int, run: Run, new: Content, tmp_path: Path) -> None:
    out = tmp_path / "parent" / "out"
    seen = set()
    for _ in kills(run, out, every=every):
        found = content(out)
        assert found in (None, new)
        seen.add("none" if found is None else "new")
        if entries(out.parent):  # otherwise nothing had been begun
            assert run(out, "--force") == 0
            assert content(out) == new
            assert entries(out.parent) == ["out"]
            shutil.rmtree(out)
    assert seen == {"none", "new"} or every > 1


@pytest.mark.slow
@EVERY
def test_an_old_output_is_whole_or_replaced(every: int, run: Run, new: Content, tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = make_old(out)
    seen = set()
    for _ in kills(run, out, "--force", every=every):
        found = content(out)
        assert found in (None, old, new)
        seen.add("none" if found is None else "old" if found == old else "new")
        if found != old:
            # The old output lies aside, whole or half removed. Whole it comes back, and without --force it stays.
            shutil.rmtree(out, ignore_errors=True)
            is_back = run(out) == 1
            assert is_back or found == new
            assert content(out) == (old if is_back else new)
        if entries(tmp_path) != ["out"] or found != old:
            assert run(out, "--force") == 0
            assert content(out) == new
            assert entries(tmp_path) == ["out"]
            shutil.rmtree(out)
            make_old(out)
    # There is none only where a system cannot exchange two folders in one step.
    assert seen - {"none"} == {"old", "new"} or every > 1


@pytest.mark.long
def test_kills_upon_kills(run: Run, new: Content, tmp_path: Path) -> None:
    """Every run meets what the ones before it have left."""
    out = tmp_path / "out"
    old = make_old(out)
    moments = random.Random(0)
    for _ in range(60):
        assert run(out, "--force", kill_at=moments.randint(1, 60)) in (0, -signal.SIGKILL)
        assert content(out) in (None, old, new)
    assert run(out, "--force") == 0
    assert content(out) == new
    assert entries(tmp_path) == ["out"]


def start(source: Path, out: Path) -> subprocess.Popen[bytes]:
    command: list[str | Path] = [sys.executable, "-c", CLI, "convert", source, out, "--force"]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_work(out: Path, process: subprocess.Popen[bytes]) -> None:
    """Until the process has begun its hidden folder."""
    others = set(entries(out.parent))
    while process.poll() is None and not set(entries(out.parent)) - others:
        time.sleep(0.0005)


@pytest.mark.long
def test_kills_in_the_middle_of_writing(tmp_path: Path) -> None:
    """A real command with 25 MB to write, killed at moments spread over its writing and a little beyond."""
    vocabulary = 200_000
    tensors = pico.eagle_tensors(embed=False) | {"embed_tokens.weight": torch.zeros(vocabulary, 64, dtype=torch.half)}
    config = pico.eagle_config(vocab_size=vocabulary)
    source = pico.write_checkpoint(tmp_path / "source", config, tensors, safetensors=True)
    out = tmp_path / "parent" / "out"
    process = start(source, out)
    wait_for_work(out, process)
    begun = time.monotonic()
    assert process.wait() == 0
    seconds, new = time.monotonic() - begun, content(out)
    shutil.rmtree(out)
    old, interrupted = make_old(out), 0
    for moment in range(6):
        with start(source, out) as process:
            wait_for_work(out, process)
            time.sleep(seconds * moment / 5)
            process.kill()
        interrupted += process.returncode == -signal.SIGKILL
        assert content(out) in (None, old, new)
        shutil.rmtree(out, ignore_errors=True)
        if moment % 2:
            make_old(out)
    assert interrupted > 2
    assert start(source, out).wait() == 0
    assert content(out) == new
    assert entries(out.parent) == ["out"]
