"""Drafts by draftkit's recipes from equally many tokens of the embedded target: acceptance, passes, and speed.

`python -m scripts.bench.recipes --work DIR [--samples 1000] [--epochs 2] [--tokens-per-row 1024] [--prompts 80]`

Data and states are those of `scripts/bench/train.py`; its DIR can be given. Every recipe reads the same samples as
often, with its own defaults but for what `Bench.settings` says of the optimiser and for up to 8 draft tokens. EAGLE-3,
DFlash and DSpark are new drafts; P-EAGLE and PARD are made of others, whose training comes on top: P-EAGLE of this
EAGLE-3, PARD of the embedded autoregressive draft. All have the target's whole vocabulary.

Then draftkit decodes the held-out prompts greedily with each at K=4 and 8, one request at a time, and without a draft.
A pass is one call of the draft's layers. Seconds are the process's own, which other work lengthens less. Everything is
kept in DIR, and what is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftkit.evaluate.job import processor
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter, load_model
from draftkit.requests import Request
from draftkit.results.cell import Interval
from draftkit.results.statistics import acceptance_length
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, Proposal
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target
from scripts.bench.runtime import commit
from scripts.bench.train import LAYERS, TARGET, Bench

KS = (4, 8)
MAX_NEW_TOKENS = 128
COLUMNS = ("draft", "made of", "steps", "training CPU s", "K", "AL [95 %]", "passes", "tokens/CPU s", "× plain")


@dataclass(frozen=True)
class Made:
    """A draft: its recipe and options; `start`, the draft that it is made of, here or in the zoo."""

    recipe: str
    options: Mapping[str, object]
    start: str = ""


DRAFTS = {
    "EAGLE-3": Made("eagle3", {"steps": 7}),
    "P-EAGLE": Made("p-eagle", {"steps": 8}, start="EAGLE-3"),
    "PARD": Made("pard", {"steps": 8}, start="zoo:draft-model"),
    "DFlash": Made("dflash", {"block_size": 9, "layers": list(LAYERS)}),
    "DSpark": Made("dspark", {"block_size": 8, "layers": list(LAYERS)}),
}


class Trainings:
    """The drafts, each in a folder of its own."""

    def __init__(self, bench: Bench):
        self.bench = bench
        self.folder = bench.work / "recipes"
        self.folder.mkdir(exist_ok=True)

    def draft(self, name: str) -> Path:
        return self.folder / name / "draft"

    def train(self, name: str) -> list[float]:
        """The seconds of each step."""
        made, result = DRAFTS[name], self.folder / f"{name}.json"
        if not result.exists():
            options = self.bench.options
            settings = self.bench.settings(
                made.recipe, self.folder / name, options.tokens_per_row, {"epochs": options.epochs}
            )
            start = str(self.draft(made.start)) if made.start in DRAFTS else made.start
            self.bench.train(settings | {"options": dict(made.options), "draft": start}, result)
        return [step["cpu_seconds"] for step in json.loads(result.read_text())["steps"]]


@dataclass(frozen=True)
class Decoded:
    """What decoding the prompts took: `passes` of the draft a round."""

    low: float
    mean: float
    high: float
    passes: float
    tokens: int
    cpu_seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.cpu_seconds


class Passes:
    """Counts the calls of a draft's layers while it proposes, and its proposals."""

    def __init__(self, drafter: Drafter):
        self.calls = self.proposals = 0
        self._proposing = False
        self._propose = drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]
        assert drafter.module is not None
        first = next(part for name, part in drafter.module.named_modules() if name.endswith("layers.0"))
        first.register_forward_hook(self._called)

    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        self.proposals += 1
        self._proposing = True
        proposal = self._propose(committed, k, draw)
        self._proposing = False
        return proposal

    def _called(self, *_: object) -> None:
        self.calls += self._proposing


class Decoding:
    """The held-out prompts, decoded by one engine at a time."""

    def __init__(self, folder: Path, prompts: int):
        self.folder = folder
        self.model, tokenizer = load_model(TARGET, device="cpu", dtype=torch.float32)
        encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", prompts)]
        self.requests = [Request(str(number), prompt, MAX_NEW_TOKENS) for number, prompt in enumerate(encoded)]

    def run(self, name: str, draft: Path | None, k: int) -> Decoded:
        result = self.folder / f"{name}-{k}.json"
        if not result.exists():
            result.write_text(json.dumps(asdict(self._run(draft, k))))
        return Decoded(**json.loads(result.read_text()))

    def _run(self, draft: Path | None, k: int) -> Decoded:
        drafter = None if draft is None else load_drafter(read_draft(draft), self.model)
        passes = None if drafter is None else Passes(drafter)
        target = Target(self.model, None if drafter is None else drafter.aux_layers)
        engine = Engine(target, drafter, num_speculative_tokens=k, num_slots=1)
        engine.generate(self.requests[:1])  # what the first request waits for besides
        began = time.process_time()
        generations = engine.generate(self.requests)
        seconds = time.process_time() - began
        length = acceptance_length(generations) if drafter is not None else Interval(1.0, 1.0, 1.0)
        tokens = sum(len(generation.tokens) for generation in generations)
        each = 0.0 if passes is None else passes.calls / passes.proposals
        low, high = length.bounds or (length.mean, length.mean)
        return Decoded(low, length.mean, high, each, tokens, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, states, drafts and results")
    parser.add_argument("--draftkit-python", default=sys.executable, help="the Python that draftkit trains with")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--tokens-per-row", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=80, help="held-out prompts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    trainings = Trainings(bench)
    steps = {name: trainings.train(name) for name in DRAFTS}
    decoding = Decoding(trainings.folder, options.prompts)
    plain = decoding.run("plain", None, 0)
    tokens = options.epochs * sum(len(bench.samples[number]) for number in bench.training)
    table = Table(
        *COLUMNS,
        title=f"{TARGET}, {tokens:,.0f} training tokens each, {len(decoding.requests)} prompts, commit {commit()}\n"
        f"{processor()}, {options.threads} threads; without a draft {plain.speed:.0f} tokens/CPU s",
    )
    for name, made in DRAFTS.items():
        for k in KS:
            found = decoding.run(name, trainings.draft(name), k)
            table.add_row(
                name,
                made.start,
                str(len(steps[name])),
                f"{sum(steps[name]):.0f}",
                str(k),
                f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]",
                f"{found.passes:.2f}",
                f"{found.speed:.0f}",
                f"{found.speed / plain.speed:.2f}",
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
