"""Gives draftkit random cases of every kind of input: `python -m scripts.attack.fuzz --cases 100000 --out FOLDER`.

A case is refused in one message or accepted and verified; it never ends in a traceback, a hang, a huge allocation or
with something left behind. Cases run in worker processes under a limit of memory and time; one that dies or hangs is
killed and replaced. Case N of a kind depends on the seed and N alone, so a run that was stopped goes on where it was
(`--out` holds its counts), and `--kind KIND --case N` repeats one, with its files left in FOLDER.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

os.environ |= {
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ |= {"HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2"}
import torch
from fixtures.fuzzing import KINDS
from fixtures.fuzzing.judge import Kind
from fixtures.fuzzing.robust import EXTRA_MEMORY, WAITING

WORKER_CASES = 5000  # then it is replaced, so that what leaks ends with it
GRACE = 30  # seconds beyond the limit that a case has for itself
EXAMPLES = 40  # failures of a kind that are kept; more have the same cause


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out = Path(options.out or tempfile.mkdtemp(prefix="draftkit-fuzz-"))
    out.mkdir(parents=True, exist_ok=True)
    if options.case is not None:
        _repeat(options.kind[0], options.case, options.seed, out)
        return
    names = options.kind or list(KINDS)
    shares = {name: KINDS[name].share for name in names}
    wanted = {name: round(options.cases * share / sum(shares.values())) for name, share in shares.items()}
    runs = [Run(name, wanted[name], options.seed, out) for name in names]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(Run.finish, runs))
    _show(runs)
    sys.exit(any(run.counts["failed"] for run in runs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="repeatable; default: all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", help="a folder for counts and failures; one that has some is continued")
    parser.add_argument("--case", type=int, help="repeat one case of a kind")
    options = parser.parse_args()
    if options.case is not None and len(options.kind or []) != 1:
        parser.error("--case takes one --kind")
    return options


def _repeat(name: str, number: int, seed: int, out: Path) -> None:
    with tempfile.TemporaryDirectory() as corpus:
        kind = KINDS[name](Path(corpus))
        folder = out / f"{name}-{number}"
        folder.mkdir()
        print("accepted" if kind.run(_random(seed, name, number), folder) else "refused")


def _random(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed}/{name}/{number}")


def _show(runs: list[Run]) -> None:
    print(f"{'kind':10} {'cases':>8} {'accepted':>9} {'refused':>8} {'failed':>7} {'seconds':>8}")
    for run in runs:
        counts = [run.counts[name] for name in ("cases", "accepted", "refused", "failed")]
        print(f"{run.name:10} {counts[0]:8} {counts[1]:9} {counts[2]:8} {counts[3]:7} {run.seconds:8.1f}")
    for run in runs:
        for failure in run.failures[:3]:
            print(f"\n{failure['what']}\n  python -m scripts.attack.fuzz --kind {run.name} --case {failure['case']}")


class Run:
    """The cases of one kind, from the counts in its file on."""

    def __init__(self, name: str, cases: int, seed: int, out: Path):
        self.name, self.cases, self.seed = name, cases, seed
        self.file = out / f"{name}.json"
        self.counts: Counter[str] = Counter()
        self.failures: list[dict[str, object]] = []
        self.seconds = 0.0
        if self.file.exists():
            stored = json.loads(self.file.read_text())
            if stored["seed"] != seed:
                sys.exit(f"{self.file} was begun with seed {stored['seed']}")
            self.counts, self.failures, self.seconds = Counter(stored["counts"]), stored["failures"], stored["seconds"]

    def finish(self) -> Run:
        while self.counts["cases"] < self.cases:
            started, before = time.monotonic(), self.seconds
            for outcome, what in self._worker():
                self.counts.update(("cases", outcome))
                self.seconds = before + time.monotonic() - started
                if outcome == "failed" and len(self.failures) < EXAMPLES:
                    self.failures.append({"case": self.counts["cases"] - 1, "what": what})
                if outcome == "failed" or self.counts["cases"] % 500 == 0:
                    self._save()
            self._save()
        return self

    def _worker(self) -> Iterator[tuple[str, str]]:
        """The outcomes of one worker's cases; the last is a failure when it died."""
        ours, theirs = multiprocessing.Pipe()
        first = self.counts["cases"]
        numbers = range(first, min(self.cases, first + WORKER_CASES))
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self.name, self.seed, numbers, theirs)
        )
        process.start()
        theirs.close()
        try:
            ours.recv()  # its sound inputs are made
            for _ in numbers:
                if not ours.poll(WAITING + GRACE):
                    yield "failed", f"hangs for more than {WAITING + GRACE} s"
                    break
                yield ours.recv()
        except EOFError:
            process.join()
            if ours is not None and self.counts["cases"] == first and process.exitcode == 1:
                sys.exit(f"the sound inputs of kind {self.name} cannot be made")
            yield "failed", f"the process died: exit code {process.exitcode}"
        finally:
            process.kill()
            process.join()

    def _save(self) -> None:
        stored = {"seed": self.seed, "counts": self.counts, "seconds": self.seconds, "failures": self.failures}
        self.file.write_text(json.dumps(stored, indent=1))


def _work(name: str, seed: int, numbers: range, results: Connection) -> None:
    """A worker: makes the sound inputs, then runs cases and sends (outcome, what)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # nothing waits for the disk
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        corpus = Path(place, "corpus")
        corpus.mkdir()
        kind = KINDS[name](corpus)
        _limit_memory()
        results.send(None)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        for number in numbers:
            results.send(_outcome(kind, _random(seed, name, number), Path(place)))
            if number % 200 == 0:
                gc.collect()


def _limit_memory() -> None:
    """An absurd allocation fails, instead of taking the machine down."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + EXTRA_MEMORY, resource.RLIM_INFINITY))


def _outcome(kind: Kind, rng: random.Random, place: Path) -> tuple[str, str]:
    folder, temporary = place / "case", place / "tmp"
    try:
        folder.mkdir()
        temporary.mkdir()
        with _temporary(temporary):
            accepted = kind.run(rng, folder)
        left = os.listdir(temporary)
        assert not left, f"left in the temporary folder: {left}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as a hang and a panic in Rust are
        return "failed", "".join(traceback.format_exception(error, limit=-12, chain=False))[:6000]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
    return ("accepted" if accepted else "refused"), ""


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Temporary files go to the folder."""
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


if __name__ == "__main__":
    main()
