"""What one round is made of, eager and compiled: Python, dispatch, products, attention, allocation, sampling, the rest.

`python -m scripts.bench.round_profile --target zoo:target [--draft zoo:eagle3 --k 4] [--dtype float32] [--batches 1 8]`

One thread. A round's processor time is measured without a profiler, the least of rounds with a full batch; torch's
profiler, in a run of its own, says how that is shared out, by the time that each operation takes itself. Calling an
operation costs what the cheapest one takes, a view: that, times the number of operations, is "dispatch", and what they
take beyond it is their own. "Python" is all that no operation takes, the interpreter's work and the profiler's share of
it. Of compiled rounds, whose programs are made anew with marks for the profiler, "program" are the loops that inductor
has written and what calls them; what they call stands in the other columns.
"Sampling" is what draws, verifies and packs a round's tokens, wherever that is not a part of the program. The sum of a
row is the round.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import Request
from draftkit.runtime import rounds
from draftkit.runtime.compiled import programs
from draftkit.runtime.compiled.programs import Program
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target

# Operations by what they are for, by what their names hold; the first that fits counts.
KINDS = {
    "products": ("_linear_pointwise", "mm", "linear", "mkldnn"),
    "attention": ("attention", "flash", "softmax", "attend"),
    "allocation": ("empty", "resize_", "new_", "zeros", "full"),
}
PARTS = ("Python", "dispatch", *KINDS, "program", "sampling", "other")
SAMPLING = ("_packed", "_broken", "outcomes")  # of `runtime.rounds`, besides `verification`
PROMPT = 48  # tokens
VIEWS = ("aten::view", "aten::as_strided")
RANGES = {"round": "Python", "sampling": "Python", "program": "program"}  # that are no operations, and whose time is it
LOOPS = "cpp_fused"  # in the names of what inductor has written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--draft")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--eager-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("batch", "rounds", "ms", *(f"{part} ms" for part in PARTS), "operations", title=_title(options))
    for compiled in (False,) if options.eager_only else (False, True):
        for batch in options.batches:
            with _marked(), _engine(options, batch, compiled=compiled) as engine:
                table.add_row(str(batch), "compiled" if compiled else "eager", *_cells(engine, batch, options.rounds))
            Console(width=160, file=sys.stderr).print(table)
    Console(width=160).print(table)


def _title(options: argparse.Namespace) -> str:
    return f"{options.target}, {options.draft or 'plain'}" + (f", K = {options.k}" if options.draft else "")


@contextmanager
def _marked() -> Iterator[None]:
    """Programs tell the profiler of their parts, and are not kept."""
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, XDG_CACHE_HOME=folder),
        patch.dict(programs.OPTIONS, {"cpp.enable_kernel_profile": True}),
    ):
        yield


@contextmanager
def _engine(options: argparse.Namespace, batch: int, *, compiled: bool) -> Iterator[Engine]:
    model, _ = load_model(options.target, device="cpu", dtype=getattr(torch, options.dtype))
    if options.draft is None:
        yield Engine(Target(model), None, num_speculative_tokens=0, num_slots=batch, compile=compiled)
        return
    with open_draft(options.draft, options.target) as draft:
        drafter = load_drafter(draft, model)
        target = Target(model, drafter.aux_layers)
        yield Engine(target, drafter, num_speculative_tokens=options.k, num_slots=batch, compile=compiled)


def _cells(engine: Engine, batch: int, count: int) -> list[str]:
    """A round's time, its parts in the order of `PARTS`, and its operations."""
    prompt = tuple(range(5, 5 + PROMPT))
    asked = [Request(str(i), (*prompt, 5 + i), count, ignore_eos=True) for i in range(batch)]
    engine.generate(asked)
    taken = min(_full_rounds(engine, asked))
    with _told_apart(), profile(activities=[ProfilerActivity.CPU]) as watched:
        _full_rounds(engine, asked)
    parts, operations = shares(watched.events())
    return [f"{1e3 * taken:.2f}", *(f"{1e3 * taken * parts[part]:.2f}" for part in PARTS), f"{operations:.0f}"]


def _full_rounds(engine: Engine, asked: Sequence[Request]) -> list[float]:
    """The processor seconds of each round in which all requests are there."""
    seconds: list[float] = []
    run = engine._round

    def timed(active: dict[int, Any]) -> None:
        began = time.thread_time()
        with record_function("round"):
            run(active)
        if len(active) == len(asked):
            seconds.append(time.thread_time() - began)

    with patch.object(engine, "_round", timed):
        engine.generate(asked)
    return seconds


@contextmanager
def _told_apart() -> Iterator[None]:
    """Rounds in which sampling and compiled programs are ranges of the profiler."""
    verify = rounds.verification
    with ExitStack() as stack:
        for name in SAMPLING:
            stack.enter_context(patch.object(rounds, name, _named("sampling", getattr(rounds, name))))
        stack.enter_context(
            patch.object(rounds, "verification", lambda *modes, **of: _named("sampling", verify(*modes, **of)))
        )
        for kind, name in ((rounds._Watched, "sampling"), (Program, "program")):
            stack.enter_context(patch.object(kind, "__call__", _named(name, kind.__call__)))
        yield


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*arguments, **options)

    return ranged


def shares(events: Sequence[Any]) -> tuple[dict[str, float], float]:
    """The share of a round that each of `PARTS` has, and the operations of a round.

    Other work on the machine only ever adds: of each step of a round, the least of all that do the same counts.
    """
    done: dict[tuple[tuple[str, str], ...], list[list[float]]] = {}
    for steps in _by_round(events):
        done.setdefault(tuple(step[:2] for step in steps), []).append([step[2] for step in steps])
    names, seconds = max(done.items(), key=lambda found: len(found[1]))
    least = [min(each) for each in zip(*seconds, strict=True)]
    views = [each for each, (name, _) in zip(least, names, strict=True) if name in VIEWS]
    dispatch = mean(views) if views else 0.0
    times: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for each, (name, part) in zip(least, names, strict=True):
        called = 0.0 if name in RANGES else min(dispatch, each)
        times["dispatch"] += called
        times[part] += each - called
    return {part: times[part] / sum(times.values()) for part in PARTS}, sum(name not in RANGES for name, _ in names)


def _by_round(events: Sequence[Any]) -> list[list[tuple[str, str, float]]]:
    """The steps of each round, as they began: name, part, and the time that each takes itself."""
    found: dict[int, list[tuple[str, str, float]]] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        around = [event]
        while around[-1].cpu_parent is not None:
            around.append(around[-1].cpu_parent)
        if around[-1].name == "round":
            part = RANGES.get(event.name) or next(
                (one.name for one in around if one.name == "sampling"), _kind(event.name)
            )
            found.setdefault(around[-1].id, []).append((event.name, part, event.self_cpu_time_total))
    return list(found.values())


def _kind(name: str) -> str:
    if LOOPS in name:
        return "program"
    short = name.rpartition("::")[2]
    return next((kind for kind, words in KINDS.items() if any(word in short for word in words)), "other")


if __name__ == "__main__":
    main()
