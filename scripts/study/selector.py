"""Does DFlash2's selector accept more than the DFlash that it starts from? Both go on for the same processor time.

`python -m scripts.study.selector --draft DFLASH --samples FILE --judges FILE --out FILE.json [--seconds 20] [--lr 1e-3]
[--seeds 3] [--limit N] [--only WAY …]`

Every way sees the same rows of 512 tokens of the embedded target's own answers in the same order, one a step, until the
seconds of its steps are over; the learning rate rises for a tenth of them and falls to a tenth along a cosine. It is
judged by simulated rounds over `--judges`, answers of the target that are not trained on, which at temperature 0 is
what decoding accepts. What is in FILE.json is not done again. Prints lengths with 95 % intervals by resampling samples,
also without the scores of the selector, and differences from going on as DFlash, on the same samples.

Answered at 988ccd6 (`benchmarks/training.md`): it does, if its tables begin large enough.
Nobody has to keep this running.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from draftkit.data.sample_files import read_training_samples
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.layout.folder import Draft
from draftkit.loading import open_draft
from draftkit.results.statistics import gain, length_over_prompts
from draftkit.train.recipes.bases.dflash import BlockRecipe
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.dflash_dflash2 import DFlash2, DFlash2Options
from draftkit.train.recipes.recipe import Origin
from scripts.check.on_policy import pool
from scripts.study.p_eagle import Rows, judged_in_order, sums_of

TARGET = "zoo:target"
AS_BEFORE = "dflash"


def small_tables(origin: Origin) -> BlockRecipe:
    recipe = DFlash2.start(origin, DFlash2Options())
    selector = recipe.draft.candidate_selector
    assert selector is not None
    for table in (selector.predecessor_codebook, selector.hidden_projection.weight):
        nn.init.normal_(table, std=0.02)
    return recipe


def without_convolutions(origin: Origin) -> BlockRecipe:
    recipe = DFlash2.start(origin, DFlash2Options())
    for name, parameter in recipe.draft.named_parameters():
        if "_conv." in name:
            parameter.requires_grad_(False)
    return recipe


WAYS: dict[str, Callable[[Origin], BlockRecipe]] = {
    AS_BEFORE: lambda origin: DFlash.start(origin, DFlashOptions(dpace=None)),
    "dflash2": lambda origin: DFlash2.start(origin, DFlash2Options()),
    "dflash2, tables of 0.02": small_tables,
    "dflash2, selector alone": without_convolutions,
}


class Study:
    """The target, the draft to start from, what it is trained on and what judges it."""

    def __init__(self, options: argparse.Namespace, draft: Draft):
        self.options = options
        self.target = load_training_target(TARGET, device="cpu", dtype=torch.float32)
        self.origin = Origin(self.target, draft)
        self.start = WAYS[AS_BEFORE](self.origin)
        states = OnlineStates(self.target, self.start.aux_layers)
        self.rows = Rows(read_training_samples(options.samples), states)
        self.judges = Rows(read_training_samples(options.judges)[: options.limit], states)

    def run(self, way: str, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        recipe = WAYS[way](self.origin)
        parameters = [parameter for parameter in recipe.draft.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        count = len(self.rows.packed)
        order = random.Random(seed).sample(range(count), count)
        steps, seconds, budget = 0, 0.0, self.options.seconds
        while seconds < budget:
            batch = self.rows.batch(order[steps % count])
            done = seconds / budget
            for group in optimizer.param_groups:
                group["lr"] = self.options.lr * min(done / 0.1, 0.55 + 0.45 * math.cos(math.pi * (done - 0.1) / 0.9))
            began = time.process_time()
            recipe(batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds += time.process_time() - began
            steps += 1
        found: dict[str, Any] = {"steps": steps, "seconds": seconds, "sums": self.judge(recipe)}
        if recipe.draft.candidate_selector is not None:
            nn.init.zeros_(recipe.draft.candidate_selector.successor_codebook)
            found["without"] = self.judge(recipe)
        return found

    def judge(self, recipe: BlockRecipe) -> list[tuple[int, int]]:
        """Accepted drafts and rounds of each sample."""
        return [sums_of(judged) for judged in judged_in_order(recipe, self.judges, recipe.draft.spec.draft_tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--judges", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="of the judges")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    with open_draft(options.draft, TARGET) as draft:
        study = Study(options, draft)
        if "before" not in found:
            found["before"] = study.judge(study.start)
        for seed in range(options.seeds):
            for way in options.only:
                key = f"{way}, seed {seed}"
                if key not in found:
                    found[key] = study.run(way, seed)
                    options.out.write_text(json.dumps(found))
                    print(f"{key}: {length_over_prompts(found[key]['sums']).mean:.3f}", flush=True)
    Console(width=150).print(table(found, options))


def table(found: dict[str, Any], options: argparse.Namespace) -> Table:
    shown = Table("way", "steps", "CPU s", "length", "of each seed", "without selector", "against dflash")
    shown.add_row("as it was", "0", "", _length(found["before"]))
    first: list[tuple[int, int]] = []
    for way in options.only:
        runs = [found[f"{way}, seed {seed}"] for seed in range(options.seeds)]
        sums = pool([run["sums"] for run in runs])
        won = gain(first, sums, comparisons=1) if first else None
        first = first or sums
        shown.add_row(
            way,
            f"{sum(run['steps'] for run in runs) / len(runs):.0f}",
            f"{sum(run['seconds'] for run in runs) / len(runs):.0f}",
            _length(sums),
            ", ".join(f"{length_over_prompts(run['sums']).mean:.3f}" for run in runs),
            f"{length_over_prompts(pool([run['without'] for run in runs])).mean:.3f}" if "without" in runs[0] else "",
            "" if won is None else f"{won.mean:+.3f} [{won.low:+.3f}, {won.high:+.3f}]",
        )
    return shown


def _length(sums: list[tuple[int, int]]) -> str:
    length = length_over_prompts(sums)
    return f"{length.mean:.3f} [{length.low:.3f}, {length.high:.3f}]"


if __name__ == "__main__":
    main()
