"""Trees of drafts: what is told of them against what a run of them does, and tokens a second by nodes and batch.

    python -m scripts.bench.trees [--pair NAME TARGET DRAFT …] [--kind speed] [--file benchmarks/trees.jsonl]

Without `--pair`: zoo:eagle3, zoo:dflash and zoo:dspark. All in float32 on a CPU. Of each pair: the chain of K = 7 (or
of as many as the draft drafts), and trees of 8, 16, 32 and 60 nodes, of the kind that is usual for the draft.

- `acceptance`: at temperature 0 and 1 each tree is told (`tree_walk.py`) and run, on the same texts, and the rounds are
  compared; at temperature 1 it is also told on texts of another seed, and held against the interval of the run.
- `speed`: the median of 16 rounds of plain decoding, of the chain and of each tree at batch 1, 4 and 8, and by the
  acceptance lengths at temperature 0 the tokens a second. It needs a machine that does nothing else.

Each figure goes into `--file` as it is known, and one that is there already is not measured again: a stopped run goes
on. The tables are printed from the file at the end. A pair that is not there is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftkit.errors import DraftkitError
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.evaluate.runtime_lane import engine_of
from draftkit.evaluate.speed import ROUNDS, round_time
from draftkit.evaluate.tree_forecast import usual_tree
from draftkit.evaluate.tree_walk import own_texts, simulate_trees
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import SamplingParameters
from draftkit.results.settings import Settings
from draftkit.results.statistics import acceptance_length, length_over_prompts
from draftkit.runtime.tree_kinds import DraftTree
from draftkit.targets.target import Target
from scripts.bench.runtime import commit

ZOO = [[name, "zoo:target", name] for name in ("zoo:eagle3", "zoo:dflash", "zoo:dspark")]
NODES, BATCHES, K = (8, 16, 32, 60), (1, 4, 8), 7
FILE = Path(__file__).parents[2] / "benchmarks/trees.jsonl"


class Figures:
    """What is known, in a file that grows by a line for each figure."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = [json.loads(line) for line in lines]

    def of(self, **what: Any) -> dict[str, Any] | None:
        """The figure of that; None where it is not known."""
        return next((one for one in self.known if what.items() <= one.items()), None)

    def add(self, what: dict[str, Any], **figures: Any) -> None:
        self.known.append(what | figures | {"commit": commit()})
        with self.path.open("a") as file:
            file.write(json.dumps(self.known[-1]) + "\n")
        print(json.dumps(self.known[-1]), file=sys.stderr, flush=True)


class Pair:
    """A target and a draft, loaded when a figure of them is asked for."""

    def __init__(self, options: argparse.Namespace, name: str, target: str, draft: str):
        self.name = name
        self._sources = target, draft
        self._options = options

    @cached_property
    def loaded(self) -> tuple[Target, Any, Any]:
        """The target, the drafter and the tokenizer."""
        target, draft = self._sources
        model, tokenizer = load_model(target, device="cpu", dtype=torch.float32)
        with open_draft(draft, target) as opened:
            drafter = load_drafter(opened, model, tokenizer)
        return Target(model, drafter.aux_layers), drafter, tokenizer

    @property
    def k(self) -> int:
        return min(K, self.loaded[1].max_tokens or K)

    def tree(self, nodes: int) -> DraftTree:
        return usual_tree(self.loaded[1], nodes, self.k)

    def asked(self, temperature: float = 0.0, seed: int = 0, batch: int = 4) -> Conversations:
        options = self._options
        sampling = SamplingParameters(temperature, seed=seed)
        settings = Settings(
            max_new_tokens=options.tokens, concurrency=batch, device="cpu", sampling=sampling,
            num_speculative_tokens=self.k,
        )  # fmt: skip
        return Conversations(load_prompt_set(options.dataset, options.prompts).prompts, self.loaded[2], settings)

    def measure(self, figures: Figures, kinds: Sequence[str]) -> None:
        if "acceptance" in kinds:
            self._chain(figures)
            for temperature in (0.0, 1.0):
                self._acceptance(figures, temperature)
        if "speed" in kinds:
            self._speed(figures)

    def _chain(self, figures: Figures) -> None:
        what = {"pair": self.name, "kind": "acceptance", "temperature": 0.0, "nodes": "chain"}
        if figures.of(**what) is None:
            target, drafter, _ = self.loaded
            asked = self.asked()
            found = engine_of(target, drafter, asked.settings, num_slots=4).generate(asked.first_requests)
            figures.add(what, tree=f"K={self.k}", length=acceptance_length(found).mean)

    def _acceptance(self, figures: Figures, temperature: float) -> None:
        """Each tree told and run; at a temperature above 0 told of other texts too."""
        kind = {"pair": self.name, "kind": "acceptance", "temperature": temperature}
        missing = [nodes for nodes in NODES if figures.of(**kind, nodes=nodes) is None]
        if not missing:
            return
        target, drafter, _ = self.loaded
        trees = {nodes: self.tree(nodes) for nodes in missing}
        further = max(tree.depth for tree in trees.values()) + 1
        asked, others = self.asked(temperature), self.asked(temperature, seed=1)
        told = simulate_trees(target, drafter, own_texts(target, asked, further), list(trees.values()))
        elsewhere = (
            simulate_trees(target, drafter, own_texts(target, others, further), list(trees.values()))
            if temperature
            else {}
        )
        for nodes, tree in trees.items():
            settings = replace(asked.settings, tree=tree.name)
            found = engine_of(target, drafter, settings, num_slots=4).generate(asked.first_requests)
            rounds = [[r.accepted for r in g.rounds] for g in found]
            same = sum(
                one == other
                for ours, run in zip(told[tree], rounds, strict=True)
                for one, other in zip(ours, run, strict=False)
            )
            length = acceptance_length(found)
            figures.add(
                kind | {"nodes": nodes}, tree=tree.name, length=length.mean, low=length.low, high=length.high,
                told=_length(told[tree]), told_elsewhere=_length(elsewhere[tree]) if elsewhere else None,
                rounds=sum(map(len, rounds)), told_rounds=sum(map(len, told[tree])), same=same,
            )  # fmt: skip

    def _speed(self, figures: Figures) -> None:
        kinds: tuple[str | int, ...] = ("plain", "chain", *NODES)
        for nodes in kinds:
            for batch in BATCHES:
                what = {"pair": self.name, "kind": "speed", "nodes": nodes, "batch": batch}
                if figures.of(**what) is None:
                    figures.add(what, ms=self._round(nodes, batch))

    def _round(self, nodes: str | int, batch: int) -> float:
        target, drafter, _ = self.loaded
        asked = self.asked(batch=batch)
        tree = self.tree(nodes) if isinstance(nodes, int) else None
        settings = asked.settings if tree is None else replace(asked.settings, tree=tree.name)
        new = (ROUNDS + 1) * ((self.k if tree is None else tree.depth) + 1)
        first = asked.first_requests
        requests = [
            replace(first[i % len(first)], id=str(i), max_new_tokens=new, ignore_eos=True) for i in range(batch)
        ]
        plain = nodes == "plain"
        return round_time(Target(target.model) if plain else target, None if plain else drafter, requests, settings)


def _length(told: Sequence[Sequence[int]]) -> float:
    return length_over_prompts([(sum(rounds), len(rounds)) for rounds in told]).mean


def told_table(figures: Figures, name: str) -> Iterator[str]:
    """What was told of a pair against what was run."""
    yield "| T | tree | run | told | rounds that are equal | told of other texts |"
    yield "|---|---|---|---|---|---|"
    for one in figures.known:
        if (one["pair"], one["kind"]) == (name, "acceptance") and one["nodes"] != "chain":
            run = f"{one['length']:.3f}"
            if one["temperature"] and one["low"] is not None:
                run += f" [{one['low']:.2f}, {one['high']:.2f}]"
            other = "" if one["told_elsewhere"] is None else f"{one['told_elsewhere']:.3f}"
            rounds = f"{one['same']} of {one['rounds']}"
            yield f"| {one['temperature']:g} | `{one['tree']}` | {run} | {one['told']:.3f} | {rounds} | {other} |"


def speed_table(figures: Figures, name: str) -> Iterator[str]:
    """Tokens a second of a pair, and where its trees turn from a gain to a loss."""
    chain = figures.of(pair=name, kind="acceptance", nodes="chain")
    if figures.of(pair=name, kind="speed", nodes=NODES[-1], batch=BATCHES[-1]) is None or chain is None:
        return
    lengths: dict[str | int, float] = {"plain": 1.0, "chain": chain["length"]}
    for number in NODES:
        found = figures.of(pair=name, kind="acceptance", nodes=number, temperature=0.0)
        assert found is not None
        lengths[number] = found["length"]
    yield "| | AL | " + " | ".join(f"batch {batch}: tokens/s (ms a round)" for batch in BATCHES) + " |"
    yield "|---" * (len(BATCHES) + 2) + "|"
    speeds: dict[tuple[object, int], float] = {}
    for nodes, length in lengths.items():
        cells = []
        for batch in BATCHES:
            timed = figures.of(pair=name, kind="speed", nodes=nodes, batch=batch)
            assert timed is not None
            speeds[nodes, batch] = 1000 * length * batch / timed["ms"]
            cells.append(f"{speeds[nodes, batch]:.1f} ({timed['ms']:.1f})")
        label = {"plain": "plain", "chain": f"chain, {chain['tree']}"}.get(str(nodes), f"{nodes} nodes")
        yield f"| {label} | {length:.2f} | " + " | ".join(cells) + " |"
    yield ""
    yield turning_point(speeds)


def turning_point(speeds: dict[tuple[object, int], float]) -> str:
    """At which of the batches the best tree is faster than the chain and plain decoding."""
    said = []
    for batch in BATCHES:
        nodes = max(NODES, key=lambda nodes: speeds[nodes, batch])
        best = max(speeds["plain", batch], speeds["chain", batch])
        said.append(f"at batch {batch} {nodes} nodes are {speeds[nodes, batch] / best:.2f} ×")
    return f"The best tree against the better of chain and plain decoding: {', '.join(said)}."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs=3, action="append", metavar=("NAME", "TARGET", "DRAFT"))
    parser.add_argument("--kind", nargs="+", choices=("acceptance", "speed"), default=("acceptance", "speed"))
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--dataset", default="zoo", help="the prompts, as `draftkit eval` takes them")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    figures = Figures(options.file)
    pairs = [Pair(options, *names) for names in options.pair or ZOO]
    for pair in pairs:
        try:
            pair.measure(figures, options.kind)
        except DraftkitError as error:
            print(f"{pair.name} is left out: {error}", file=sys.stderr)
    for name in dict.fromkeys(one["pair"] for one in figures.known):
        print(f"\n## {name}\n")
        print("\n".join((*told_table(figures, name), "", *speed_table(figures, name))))


if __name__ == "__main__":
    main()
