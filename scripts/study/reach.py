"""Is it worth its time to count drafts by the chance that serving gets to them? At equal processor time of steps.

`python -m scripts.study.reach --work DIR [--seconds 25] [--lr 5e-4] [--seeds 3] [--only p-eagle dflash dspark]`

Rows, schedule and judges are those of `scripts/study/p_eagle.py`, whose DIR can be given. Every way goes on from the
embedded draft of its recipe. How many steps fit into the time follows from steps of all ways in turns. Judged by
simulated rounds at K = 8, 7 for blocks, over the target's greedy answers to the 80 embedded prompts. What is in DIR is
not done again.

Answered at 8c6d54d (`benchmarks/training.md`): with P-EAGLE it is; with block drafts nothing was seen beyond the seeds.
Nobody has to keep this running.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftkit.io.records import from_dict, to_dict
from draftkit.loading import open_draft
from draftkit.results.statistics import gain, length_over_prompts
from draftkit.train.recipes import recipe_class
from draftkit.train.recipes.recipe import Origin, Recipe
from scripts.check.on_policy import pool
from scripts.study.p_eagle import Study, judged_in_order, merged, schedule_of, sums_of
from scripts.zoo._samples import TARGET

TRIED = 14  # steps of each way that find out how long they take
COLD = 2  # of them that do not count


@dataclass(frozen=True)
class Compared:
    """Ways to weigh the drafts of a recipe by name, as its options; `common` ones of all; `k` drafts a round."""

    k: int
    common: Mapping[str, object]
    ways: Mapping[str, Mapping[str, object]]


BLOCKS = {"max_anchors": 64}
WEIGHED: dict[str, dict[str, object]] = {
    "decay": {"dpace": None},
    "dpace=0.5": {"dpace": 0.5},
    "reached=0.1": {"dpace": None, "reached": 0.1},
}
COMPARED = {
    "p-eagle": Compared(8, {"steps": 8}, {"all alike": {"reached": None}, "reached=0.1": {"reached": 0.1}}),
    "dflash": Compared(7, BLOCKS, WEIGHED),
    "dspark": Compared(7, BLOCKS, WEIGHED),
}


class Ways:
    """The ways of one recipe."""

    def __init__(self, study: Study, name: str, lr: float):
        self.study, self.name, self.lr, self.compared = study, name, lr, COMPARED[name]

    def begun(self, way: str) -> Recipe:
        kind = recipe_class(self.name)
        options = merged(to_dict(kind.options_type()), {**self.compared.common, **self.compared.ways[way]})
        with open_draft(f"zoo:{self.name}", TARGET) as draft:
            return kind.start(
                Origin(self.study.target, draft), from_dict(kind.options_type, options, f"recipe {self.name}")
            )

    def pace(self) -> dict[str, float]:
        """Processor seconds of a step of each, in turns."""
        recipes = {way: self.begun(way) for way in self.compared.ways}
        optimizers = {way: optimizer_of(recipe, self.lr) for way, recipe in recipes.items()}
        took: dict[str, list[float]] = {way: [] for way in recipes}
        for step in range(TRIED):
            batch = self.study.answers.batch(step % 4)
            for way, recipe in recipes.items():
                took[way].append(self._step(recipe, optimizers[way], batch))
        return {way: median(seconds[COLD:]) for way, seconds in took.items()}

    def train(self, way: str, steps: int, seed: int) -> tuple[Recipe, float]:
        """The trained draft, and the processor seconds of its steps."""
        torch.manual_seed(seed)
        recipe, rows = self.begun(way), self.study.answers
        optimizer = optimizer_of(recipe, self.lr)
        schedule = schedule_of(optimizer, steps)
        numbers: list[int] = []
        seconds = 0.0
        for step in range(steps):
            if not numbers:
                numbers = random.Random(f"{seed} {step}").sample(range(len(rows.packed)), len(rows.packed))
            seconds += self._step(recipe, optimizer, rows.batch(numbers.pop()))
            schedule.step()
        return recipe, seconds

    def _step(self, recipe: Recipe, optimizer: torch.optim.Optimizer, batch: Any) -> float:
        began = time.process_time()
        recipe(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.process_time() - began

    def judge(self, recipe: Recipe) -> list[tuple[int, int]]:
        """Accepted drafts and rounds of each prompt."""
        return [sums_of(judged) for judged in judged_in_order(recipe, self.study.judges, self.compared.k)]


def optimizer_of(recipe: Recipe, lr: float) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in recipe.draft.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=COMPARED, default=list(COMPARED))
    options = parser.parse_args()
    torch.set_num_threads(1)
    study = Study(options.work, "zoo:p-eagle", options.lr)
    kept = options.work / f"reach-{options.seconds:g}-{options.lr:g}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in options.only:
        ways = Ways(study, name, options.lr)
        if name not in found:
            paces = ways.pace()
            steps = {way: round(options.seconds / pace) for way, pace in paces.items()}
            start = ways.judge(ways.begun(next(iter(paces))))
            found[name] = {"paces": paces, "steps": steps, "start": start}
        for seed in range(options.seeds):
            for way, steps in found[name]["steps"].items():
                key = f"{name}, {way}, seed {seed}"
                if key not in found:
                    recipe, seconds = ways.train(way, steps, seed)
                    found[key] = {"sums": ways.judge(recipe), "seconds": seconds}
                    kept.write_text(json.dumps(found))
                    print(f"{key}: {length_over_prompts(found[key]['sums']).mean:.3f} in {seconds:.0f} s", flush=True)
    Console(width=150).print(table(found, options))


def table(found: dict[str, Any], options: argparse.Namespace) -> Table:
    shown = Table(
        "recipe", "way", "s a step", "steps", "CPU s", "acceptance length", "of each seed", "against the first",
        title=f"{options.seconds:g} s of steps each, {options.seeds} seeds",
    )  # fmt: skip
    for name in options.only:
        start = length_over_prompts(found[name]["start"])
        shown.add_row(name, "as it starts", "", "", "", f"{start.mean:.3f} [{start.low:.3f}, {start.high:.3f}]", "", "")
        first: list[tuple[int, int]] = []
        for way, steps in found[name]["steps"].items():
            runs = [found[f"{name}, {way}, seed {seed}"] for seed in range(options.seeds)]
            sums = pool([run["sums"] for run in runs])
            length, won = length_over_prompts(sums), gain(first, sums, comparisons=1) if first else None
            first = first or sums
            shown.add_row(
                name,
                way,
                f"{found[name]['paces'][way]:.3f}",
                str(steps),
                f"{sum(run['seconds'] for run in runs) / len(runs):.0f}",
                f"{length.mean:.3f} [{length.low:.3f}, {length.high:.3f}]",
                ", ".join(f"{length_over_prompts(run['sums']).mean:.3f}" for run in runs),
                "" if won is None else f"{won.mean:+.3f} [{won.low:+.3f}, {won.high:+.3f}]",
            )
    return shown


if __name__ == "__main__":
    main()
