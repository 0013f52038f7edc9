"""How should a block drafter begin? Fresh drafts that differ in their first weights, trained and judged alike.

`python -m scripts.study.block_start --samples FILE --judges FILE --out FILE.json [--target zoo:target]
[--recipe dflash] [--options JSON] [--vocabulary-of DRAFT] [--steps 60] [--lr 2e-3] [--seeds 1] [--only NAME …]`

Every way sees the same rows of 512 tokens of the target's own answers in the same order, one a step, with a learning
rate that rises for a tenth of the steps and falls to a tenth along a cosine. It is judged by simulated rounds over
`--judges`, answers of the same target that are not trained on, which at temperature 0 is what decoding accepts. What is
in FILE.json is not done again. Prints the loss of the first step and the mean of the last ten, lengths with 95 %
intervals by resampling samples, differences from the first way on the same samples, and processor seconds of the steps.

Answered at 17cef1a (`benchmarks/training.md`): a DFlash is ahead at first as the target's last layers, DSpark gains
nothing by it. Longer runs (`benchmarks/smollm2.md`) end no worse at random, which is the default since then.
Nobody has to keep this running.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftkit.data.sample_files import read_training_samples
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.io.records import from_dict, to_dict
from draftkit.loading import open_draft
from draftkit.models.dflash import DFlashModel
from draftkit.results.statistics import gain, length_over_prompts
from draftkit.train.recipes import recipe_class
from draftkit.train.recipes.bases.dflash import BlockRecipe, fresh_block_draft
from draftkit.train.recipes.bases.initialization import begin_as_target
from draftkit.train.recipes.recipe import Origin
from scripts.check.on_policy import pool
from scripts.study.p_eagle import Rows, judged_in_order, sums_of

State = dict[str, Tensor]


def random_norm(scale: float) -> Callable[[State, State], State]:
    """All at random, the final norm so much shorter, so that the first loss is about that of no opinion."""
    return lambda fresh, theirs: fresh | {"norm.weight": torch.full_like(fresh["norm.weight"], scale)}


def without(*names: str) -> Callable[[State, State], State]:
    """The target's layers, but for tensors that are as in a fresh draft."""
    return lambda fresh, theirs: theirs | {name: fresh[name] for name in names}


WAYS: dict[str, Callable[[State, State], State]] = {
    "all at random": lambda fresh, theirs: fresh,
    "at random, final norm 0.3": random_norm(0.3),
    "at random, final norm 0.1": random_norm(0.1),
    "at random, context of the last state": lambda fresh, theirs: fresh | {"fc.weight": theirs["fc.weight"]},
    "the target's last layers": lambda fresh, theirs: theirs,
    "last layers, fc at random": without("fc.weight"),
    "last layers, final norm 1": without("norm.weight"),
}


class Study:
    """The target, what drafts are trained on and what judges them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.target = load_training_target(options.target, device="cpu", dtype=torch.float32)
        self.recipe = recipe_class(options.recipe)
        settings: dict[str, object] = {**to_dict(self.recipe.options_type()), **json.loads(options.options)}
        self.settings: Any = from_dict(self.recipe.options_type, settings, "--options")
        self.d2t_ids = None
        if options.vocabulary_of is not None:
            with open_draft(options.vocabulary_of, options.target) as draft:
                d2t = draft.tensors["d2t"].load()
                self.d2t_ids = d2t + torch.arange(len(d2t))
        states = OnlineStates(self.target, self.begun("all at random", 0).aux_layers)
        self.rows = Rows(read_training_samples(options.samples), states)
        self.judges = Rows(read_training_samples(options.judges)[: options.limit], states)

    def begun(self, way: str, seed: int) -> BlockRecipe:
        torch.manual_seed(seed)
        origin = Origin(self.target, d2t_ids=self.d2t_ids)
        recipe = self.recipe.start(origin, self.settings)
        assert isinstance(recipe, BlockRecipe)
        fresh, theirs = (self._state(recipe, origin, seed, taken) for taken in (False, True))
        recipe.draft.load_state_dict(WAYS[way](fresh, theirs))
        return recipe

    def _state(self, recipe: BlockRecipe, origin: Origin, seed: int, taken: bool) -> State:
        torch.manual_seed(seed)
        draft: DFlashModel = fresh_block_draft(recipe.draft.spec, origin)
        assert not taken or begin_as_target(draft, self.target), "the target's layers are of another kind"
        return dict(draft.state_dict())

    def run(self, way: str, seed: int) -> dict[str, Any]:
        recipe, steps = self.begun(way, seed), self.options.steps
        parameters = [parameter for parameter in recipe.draft.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.options.lr, betas=(0.9, 0.95), weight_decay=0.0)
        warm = max(steps // 10, 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * max(step - warm, 0) / (steps - warm))),
        )
        count = len(self.rows.packed)
        order = random.Random(seed).sample(range(count), count)
        losses, seconds = [], 0.0
        for step in range(steps):
            batch = self.rows.batch(order[step % count])
            began = time.process_time()
            loss = recipe(batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            seconds += time.process_time() - began
            losses.append(float(loss.detach()))
        return {"losses": losses, "seconds": seconds, "sums": self.judge(recipe)}

    def judge(self, recipe: BlockRecipe) -> list[tuple[int, int]]:
        """Accepted drafts and rounds of each sample."""
        return [sums_of(judged) for judged in judged_in_order(recipe, self.judges, recipe.draft.spec.draft_tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--judges", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="of the judges")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="dflash", choices=("dflash", "dspark"))
    parser.add_argument("--options", default="{}")
    parser.add_argument("--vocabulary-of", help="a draft whose reduced vocabulary is taken")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    study = Study(options)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed in range(options.seeds):
        for way in options.only:
            key = f"{way}, seed {seed}"
            if key not in found:
                found[key] = study.run(way, seed)
                options.out.write_text(json.dumps(found))
                print(f"{key}: {length_over_prompts(found[key]['sums']).mean:.3f}", flush=True)
    Console(width=150).print(table(found, options.only, options.seeds))


def table(found: dict[str, Any], ways: Sequence[str], seeds: int) -> Table:
    shown = Table("way", "first loss", "last ten", "length", "of each seed", "against the first", "CPU s")
    first: list[tuple[int, int]] = []
    for way in ways:
        runs = [found[f"{way}, seed {seed}"] for seed in range(seeds)]
        sums = pool([run["sums"] for run in runs])
        length, won = length_over_prompts(sums), gain(first, sums, comparisons=1) if first else None
        first = first or sums
        shown.add_row(
            way,
            f"{sum(run['losses'][0] for run in runs) / seeds:.1f}",
            f"{sum(sum(run['losses'][-10:]) for run in runs) / seeds / 10:.2f}",
            f"{length.mean:.3f} [{length.low:.3f}, {length.high:.3f}]",
            ", ".join(f"{length_over_prompts(run['sums']).mean:.3f}" for run in runs),
            "" if won is None else f"{won.mean:+.3f} [{won.low:+.3f}, {won.high:+.3f}]",
            f"{sum(run['seconds'] for run in runs) / seeds:.0f}",
        )
    return shown


if __name__ == "__main__":
    main()
