"""Kills runs that can be resumed, replaces what they read, resumes them: `python -m scripts.attack.resume --cases 500`.

A case runs `data regenerate`, `data states`, `train` or `adapt` in a process that dies at some write (before it, after
it, or halfway), once or twice. Then nothing is replaced, or the target's weights, the draft, the rows or a setting are,
and the same command runs again. What comes out must be, row for row and bit for bit, what a run makes that nothing
disturbed, of the inputs as they are now; or it is refused, with all that was there kept, and goes on once the inputs
are back. In some cases the first process is only halted: a second must be refused while it lives, or share its work.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints import pico
from fixtures.fuzzing.judge import command
from fixtures.training.samples import samples

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.io.jsonl import dump_line
from draftkit.train import adapt, run  # noqa: F401  # before memory is limited
from scripts.attack._count import Case, Lost, Silent, main

TRAINING = (
    "--out out --set tokens_per_row=128 --set options.steps=2 --set optimization.max_steps=3 --set save_every=1 "
    "--set keep=2"
)
# The command of each kind, in a folder with `target`, `draft`, `rows.jsonl` and `data.jsonl`; what it writes is `out`.
COMMANDS = {
    "regenerate": "data regenerate rows.jsonl out --max-new-tokens 4 --concurrency 1",
    "states": "data states data.jsonl out --layers 1,3 --shard-tokens 128 --encoding float32",
    "train": f"train --recipe eagle3 --draft draft --data data.jsonl --resume {TRAINING}",
    "adapt": "adapt --draft draft --traffic rows.jsonl --replay none --held-out 0.4 --max-new-tokens 4 --concurrency 1 "
    f"--k 2 {TRAINING}",
}
READS = {
    "regenerate": ("target", "rows.jsonl"), "states": ("target", "data.jsonl"),
    "train": ("target", "draft", "data.jsonl"), "adapt": ("target", "draft", "rows.jsonl"),
}  # fmt: skip
SETTINGS = {
    "regenerate": ("--seed", "5"), "states": ("--encoding", "bf16"), "train": ("--set", "optimization.lr=0.002"),
    "adapt": ("--seed", "5"),
}  # fmt: skip
ORDER = (*("regenerate", "states") * 5, "train", *("regenerate", "states") * 5, "adapt")  # training takes longest
WRITES = ("replace", "rename", "mkdir", "write", "truncate", "ftruncate")  # of `os`


def make_inputs(folder: Path, seed: int) -> None:
    """A target, a draft, rows and samples; those of another seed are others under the same names and ids."""
    pico.save_tokenizer(pico.save_llama(folder / "target", seed=seed))
    torch.manual_seed(seed)
    pico.write_checkpoint(folder / "draft", pico.eagle3_config(), pico.eagle3_tensors())
    rows = [{"id": f"row {n}", "text": f"This is text {n * (seed + 1)}"} for n in range(10)]
    (folder / "rows.jsonl").write_bytes(b"".join(map(dump_line, rows)))
    origin = SamplesOrigin(target="pico", tokenizer_sha256="0" * 64)
    write_samples(folder / "data.jsonl", samples(16, seed), origin)


class Attack:
    """Cases in `corpus`, which has the inputs and others, and what undisturbed runs make of them."""

    def __init__(self, corpus: Path):
        self.corpus = corpus
        for seed, name in enumerate(("inputs", "others")):
            make_inputs(corpus / name, seed)
        self.fresh, self.writes = cache(self._fresh), cache(self._writes)

    def run(self, number: int, folder: Path) -> None:
        """A case, in an empty folder."""
        rng = random.Random(number)
        kind = ORDER[number % len(ORDER)]
        self.put(folder, None)
        if rng.random() < 0.15:
            self.halt(kind, folder, rng)
            return
        replaced = rng.choice((None, "setting", *READS[kind]))
        for _ in range(rng.choice((1, 1, 2))):
            attempt(kind, folder, rng.randint(1, self.writes(kind)), rng.choice(("before", "after", "halfway")))
        there = contents(folder / "out")
        self.put(folder, replaced)
        if resume(kind, folder, replaced) is None:
            self.check(kind, folder, replaced)
            return
        if replaced is None:
            raise Lost("the run that was killed cannot go on")
        check_kept(there, contents(folder / "out"))
        self.put(folder, None)
        if (error := resume(kind, folder, None)) is not None:
            raise Lost(f"with its own inputs, the run cannot go on: {error}")
        self.check(kind, folder, None)

    def halt(self, kind: str, folder: Path, rng: random.Random) -> None:
        """Two processes at once: the first is halted at a write, the second comes, and then the first goes on. Where
        states are stored, they share the work."""
        if kind == "states":
            self.share(folder, rng)
            return
        child = attempt(kind, folder, rng.randint(1, self.writes(kind)), "halted")
        try:
            there = contents(folder / "out")
            # A process that is halted before it takes the lock is no writer yet.
            writes = f" {child} " in Path("/proc/locks").read_text()
            error = resume(kind, folder, None)
            if writes and os.path.exists(f"/proc/{child}") and not is_over(child):
                if error is None:
                    raise Silent("two processes wrote one output")
                if f"process {child} on" not in error and "it has just begun" not in error:
                    raise Silent(f"the other process is not named: {error}")
                check_kept(there, contents(folder / "out"))
        finally:
            with suppress(ProcessLookupError, ChildProcessError):  # it is over, and was waited for
                os.kill(child, signal.SIGCONT)
                os.waitpid(child, 0)
        self.check(kind, folder, None)

    def share(self, folder: Path, rng: random.Random) -> None:
        """Two processes store states: the second waits for what the first, which is halted at a write, has locked."""
        first = attempt("states", folder, rng.randint(1, self.writes("states")), "halted")
        second = attempt("states", folder, sys.maxsize, "before", waits=False)
        time.sleep(0.3)
        with suppress(ProcessLookupError, ChildProcessError):  # it is over, and was waited for
            os.kill(first, signal.SIGCONT)
            os.waitpid(first, 0)
        os.waitpid(second, 0)
        self.check("states", folder, None)

    def put(self, folder: Path, replaced: str | None) -> None:
        """The inputs, of which `replaced` is another."""
        for path in (self.corpus / "inputs").iterdir():
            copy((self.corpus / "others" if path.name == replaced else path.parent) / path.name, folder / path.name)

    def check(self, kind: str, folder: Path, replaced: str | None) -> None:
        """Raise where an output is not what an undisturbed run makes of the inputs."""
        found, expected = results(folder / "out"), self.fresh(kind, replaced)
        if found != expected:
            differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise (Silent if replaced else Lost)(f"{kind}, {replaced} replaced: another {', '.join(differing)}")

    def _fresh(self, kind: str, replaced: str | None) -> dict[str, object]:
        folder = self.corpus / f"fresh-{kind}-{replaced}"
        folder.mkdir()
        self.put(folder, replaced)
        error = resume(kind, folder, replaced)
        assert error is None, error
        return results(folder / "out")

    def _writes(self, kind: str) -> int:
        """How often an undisturbed run of a kind writes."""
        folder = self.corpus / f"count-{kind}"
        folder.mkdir()
        self.put(folder, None)
        attempt(kind, folder, sys.maxsize, "before")
        return int((folder / "writes").read_text())


def copy(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(source, to)
    else:
        shutil.copyfile(source, to)


def resume(kind: str, folder: Path, replaced: str | None) -> str | None:
    """Run the command; its message where it is refused."""
    words = (*COMMANDS[kind].split(), "--target", "target", *(SETTINGS[kind] if replaced == "setting" else ()))
    names = {"out", "target", "draft", "rows.jsonl", "data.jsonl"}
    refused, _, said = command(*(folder / word if word in names else word for word in words))
    return said if refused else None


def attempt(kind: str, folder: Path, at: int, how: str, *, waits: bool = True) -> int:
    """The command in a process of its own, which dies at a write, or is `halted` there; returns its id, at once unless
    it `waits` for that.

    One that comes to its end notes how often it wrote.
    """
    child = os.fork()
    if child:
        if waits:
            os.waitpid(child, os.WUNTRACED)
        return child
    try:
        done = Writes(at, how)
        resume(kind, folder, None)
        (folder / "writes").write_text(str(done.number))
    finally:
        os._exit(0)


class Writes:
    """Counts the writes of this process from now on, and ends it at one."""

    def __init__(self, at: int, how: str):
        self.number, self.at, self.how = 0, at, how
        for name in WRITES:
            setattr(os, name, partial(self.one, getattr(os, name)))
        builtins.open = io.open = partial(self.opening, open)

    def opening(self, open: Callable[..., Any], file: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        return (self.one if mode.strip("rbt") else _plain)(open, file, mode, *arguments, **more)

    def one(self, write: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """A write, or the end."""
        self.number += 1
        if self.number != self.at:
            return write(*arguments, **more)
        if self.how == "halted":
            os.kill(os.getpid(), signal.SIGSTOP)
            return write(*arguments, **more)
        if self.how == "halfway" and isinstance(arguments[-1], bytes | memoryview):
            write(*arguments[:-1], arguments[-1][: len(arguments[-1]) // 2])
        elif self.how != "before":
            write(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)
        return None


def _plain(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    return call(*arguments, **more)


def is_over(child: int) -> bool:
    """Whether a process has ended and only waits to be asked how."""
    return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def contents(out: Path) -> dict[str, bytes]:
    """What lies in an output, but for what is hidden."""
    if out.is_file():
        return {"": out.read_bytes()}
    files = (path for path in out.rglob("*") if path.is_file())
    names = {path: path.relative_to(out) for path in files}
    return {str(name): path.read_bytes() for path, name in names.items() if not str(name).startswith(".")}


def check_kept(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Raise where a refused run has changed what was there; the half of a last line may go."""
    for name, data in before.items():
        whole = data[: data.rfind(b"\n") + 1] if name in ("", "answers.jsonl") else data
        if not after.get(name, b"").startswith(whole):
            raise Lost(f"a run that was refused has changed {name or 'its output'}")


def results(out: Path) -> dict[str, object]:
    """What counts of an output: rows after the heading, states, the weights of a draft."""
    found: dict[str, object] = {}
    for name, data in contents(out).items():
        if name in ("", "answers.jsonl", "training.jsonl", "held-out.jsonl"):
            found[name] = data.splitlines()[1:]
        elif name.startswith("states-") or name in ("draft/model.safetensors", "adapt.json"):
            found[name] = data.replace(str(out).encode(), b"")
    return found


def cases(corpus: Path) -> Iterator[Case]:
    attack = Attack(corpus)
    for number in count():
        yield f"{ORDER[number % len(ORDER)]} {number}", partial(attack.run, number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(__doc__, cases, default=40)
