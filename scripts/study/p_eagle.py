"""What decides how much P-EAGLE accepts: drafts that differ in one choice, trained alike, judged by the same answers.

`python -m scripts.study.p_eagle --work DIR [--start zoo:p-eagle] [--steps 200] [--lr 2e-3] [--seeds 1] [--only NAME …]`

Every variant goes on from the same draft and sees the same rows of 512 tokens in the same order, a row a step: the
embedded target's own greedy answers to the questions that the embedded drafts were trained on. It is judged at K = 8 by
simulated rounds over the target's greedy answers to the 80 embedded prompts, which at temperature 0 is what decoding
accepts. What is in DIR is not done again. Prints lengths over all seeds with 95 % intervals by resampling prompts,
differences from the first variant on the same prompts, the share of rounds in which each draft stood, and processor
seconds.

Answered at ea3d3b4 (`benchmarks/training.md`): drafts are counted by the chance that serving gets to them.
Nobody has to keep this running.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from draftkit.data.packing import PackedRows
from draftkit.data.sample_files import read_training_samples
from draftkit.data.samples import Sample
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.io.records import from_dict, to_dict
from draftkit.loading import open_draft
from draftkit.results.statistics import gain, length_over_prompts
from draftkit.train.attention import ChainSteps
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.linear import linear_loss
from draftkit.train.losses.teacher import OutputHead, TargetHead, Teacher
from draftkit.train.parallel import ParallelRows, row_weights
from draftkit.train.recipes.bases.chain import ChainRows
from draftkit.train.recipes.bases.eagle import EagleFamily
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.eagle_p_eagle import PEagle, PEagleOptions
from draftkit.train.recipes.recipe import Origin, Recipe, StepOutcome
from draftkit.train.validation import Judged, judge
from scripts.check.on_policy import judges, pool
from scripts.zoo._drafts import mask_token
from scripts.zoo._samples import TARGET, write_training_samples

SEED = 20261121  # of the embedded models
K = 8
ROW = 512  # tokens of a step
PARENT = "zoo:eagle3"
AUTOREGRESSIVE, BEFORE = f"{PARENT}, {K} passes", "the draft as it starts"


@dataclass(frozen=True)
class Variant:
    """A choice: other options of the recipe, learning rates, first values, or another loss.

    - `lr`: times that of the study. `mask_state`: what it begins as, of that and of target states [M, F].
    - `parent`: taught by the EAGLE-3 that it starts from, on the true tokens or on those of its own choice.
    - `growing`: chains are one draft long at first, and whole after half of the steps.
    - `source`: every other sample is source text, as for the embedded drafts.
    """

    options: dict[str, object] = field(default_factory=dict)
    lr: float = 1.0
    mask_state: Callable[[Tensor, Tensor], Tensor] | None = None
    parent: str = ""
    growing: bool = False
    source: bool = False


VARIANTS = {
    "as it was": Variant(),
    "lr / 4": Variant(lr=0.25),
    "lr / 2": Variant(lr=0.5),
    "lr x 2": Variant(lr=2),
    "1 layer": Variant({"num_layers": 1}),
    "4 layers": Variant({"num_layers": 4}),
    "mask state 0": Variant(mask_state=lambda own, _: own * 0),
    "mask state: mean": Variant(mask_state=lambda _, states: states.mean(0)),
    "own embedding": Variant({"train_embeddings": True}),
    "depths weigh 0.8^d": Variant({"reduction": {"decay": 0.8}}),
    "weighed by prefix": Variant({"reached": 0.1}),
    "no drop": Variant({"drop": {"retention": 1.0}}),
    "64 anchors, no drop": Variant({"drop": {"retention": 1.0, "max_anchors": 64}}),
    "cross entropy": Variant({"loss": "ce"}),
    "0.1*ce + 0.9*tv": Variant({"loss": "0.1*ce + 0.9*tv"}),
    "parent, true tokens": Variant(parent="true"),
    "parent, own tokens": Variant(parent="own"),
    "growing chains": Variant(growing=True),
    "source text too": Variant(source=True),
}


class Studied(PEagle):
    """The recipe with what a variant does otherwise. `done`: the share of the steps that are over."""

    variant: Variant
    parent: Eagle3
    done = 0.0

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        variant = self.variant
        if not variant.parent and not variant.growing:
            return super().forward(batch)
        drafted = batch.drafted(K)
        if variant.growing:
            drafted[1 + int(2 * self.done * K) :] = False
        kept = self.options.drop.keep(drafted)
        inputs = ParallelRows(kept, batch)
        rows = ChainRows(*inputs.drafts, self.hidden(batch, inputs))
        weights = row_weights(kept, self.options.reduction)
        if not variant.parent:
            return StepOutcome(
                self.compare(batch, rows, self.head.teacher(batch.last[0]), weights, self.loss).value, {}
            )
        states = parent_states(self.parent, batch, own=variant.parent == "own")[rows.steps, rows.positions]
        taught = Teacher(TargetHead(head_of(self.parent)), states)
        value = linear_loss(rows.hidden, head_of(self), taught, weights[rows.steps, rows.positions], self.loss).value
        return StepOutcome(value, {})


Studied.name = PEagle.name  # by which a draft to go on with is known


def head_of(recipe: EagleFamily) -> OutputHead:
    layer = recipe.draft.lm_head
    assert isinstance(layer, nn.Linear)
    return OutputHead(layer.weight)


def features_of(batch: TrainingBatch) -> Tensor:
    assert batch.features is not None
    return batch.features


@torch.no_grad()
def parent_states(parent: Eagle3, batch: TrainingBatch, *, own: bool) -> Tensor:
    """What the parent's head reads at every step of a chain from every position: [K, N, H]."""
    draft, chain, found = parent.draft, ChainSteps(batch.sample_ids), []
    hidden, tokens = draft.fuse(features_of(batch)), shifted(batch.tokens, 1)
    for step in range(K):
        if step:
            chain.go_on()
        output = draft(tokens, hidden, batch.positions + step, chain=chain)
        found.append(output.head_input[0])
        hidden = output.feedback
        tokens = shifted(batch.tokens, 2 + step)
        if own:
            tokens = parent.head.to_target(draft.logits(output.head_input).argmax(-1))
    return torch.stack(found)


class Rows:
    """Packed samples with the target's states, which are computed once."""

    def __init__(self, samples: Sequence[Sample], states: OnlineStates):
        self.packed = PackedRows(samples, range(len(samples)), ROW)
        self._states = states
        self._batches: dict[int, TrainingBatch] = {}

    def batch(self, number: int) -> TrainingBatch:
        if number not in self._batches:
            row = self.packed[number]
            tokens, positions, sample_ids = row["tokens"], row["positions"], row["sample_ids"]
            found = self._states.states(tokens, positions, sample_ids)
            self._batches[number] = TrainingBatch(
                tokens, positions, sample_ids, row["loss_mask"], found.features, found.last
            )
        return self._batches[number]


def judged_in_order(recipe: Recipe, judges: Rows, k: int) -> list[Judged]:
    """What decoding with `k` greedy drafts would make of each sample."""
    found = []
    for number in range(len(judges.packed)):
        found += judge(recipe, judges.batch(number), judges.packed[number]["numbers"], k, "greedy")
    return sorted(found, key=lambda judged: judged.number)


def sums_of(judged: Judged) -> tuple[int, int]:
    """Accepted drafts and rounds of a sample."""
    return sum(r.accepted for r in judged.rounds), len(judged.rounds)


class Study:
    """The target, what drafts are trained on and what judges them."""

    def __init__(self, work: Path, start: str, lr: float):
        self.start, self.lr = start, lr
        data = work / "samples.jsonl"
        if not data.exists():
            work.mkdir(parents=True, exist_ok=True)
            write_training_samples(data, answers=1200, seed=SEED, device="cpu")
        self.target = load_training_target(TARGET, device="cpu", dtype=torch.float32)
        self.states = OnlineStates(self.target, self.parent.aux_layers)
        samples = read_training_samples(data)
        self.both = Rows(samples, self.states)
        self.answers = Rows([sample for sample in samples if sample.id.startswith("answer")], self.states)
        self.judges = Rows(read_training_samples(judges(work)), self.states)

    @cached_property
    def parent(self) -> Eagle3:
        with open_draft(PARENT, TARGET) as draft:
            return Eagle3.start(Origin(self.target, draft), Eagle3Options())

    def begun(self, variant: Variant) -> Studied:
        common = {
            "steps": K, "num_layers": 2, "train_embeddings": False, "mask_token_id": mask_token(), "reached": None
        }  # fmt: skip
        options = from_dict(PEagleOptions, merged(to_dict(PEagleOptions()), common | variant.options), "the variant")
        with open_draft(self.start, TARGET) as draft:
            recipe = Studied.start(Origin(self.target, draft), options)
        recipe.variant = variant
        recipe.__dict__["parent"] = self.parent  # no module of the draft's
        if variant.mask_state is not None:
            some = [self.answers.batch(number) for number in range(4)]
            states = torch.cat([features_of(batch)[batch.sample_ids >= 0] for batch in some])
            mask = recipe.draft.mask_hidden.data
            mask.copy_(variant.mask_state(mask, states).view_as(mask))
        return recipe

    def train(self, variant: Variant, steps: int, seed: int) -> tuple[Studied, float]:
        """The draft of a variant, and the processor time of its steps."""
        torch.manual_seed(seed)
        recipe, rows = self.begun(variant), self.both if variant.source else self.answers
        parameters = [parameter for parameter in recipe.draft.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.lr * variant.lr, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = schedule_of(optimizer, steps)
        numbers: list[int] = []
        seconds = 0.0
        for step in range(steps):
            if not numbers:
                numbers = random.Random(f"{seed} {step}").sample(range(len(rows.packed)), len(rows.packed))
            batch = rows.batch(numbers.pop())
            began = time.process_time()
            recipe.done = step / steps
            recipe(batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            seconds += time.process_time() - began
        return recipe, seconds

    def judge(self, recipe: EagleFamily) -> dict[str, Any]:
        """Accepted drafts and rounds of each prompt, and the share of rounds in which each draft stood."""
        found = judged_in_order(recipe, self.judges, K)
        accepted = [r.accepted for judged in found for r in judged.rounds]
        return {
            "sums": [sums_of(judged) for judged in found],
            "accepted": [sum(a > position for a in accepted) / len(accepted) for position in range(K)],
        }


def merged(options: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The options with others, those within an object one by one."""
    result = dict(options)
    for name, value in others.items():
        own = result.get(name)
        result[name] = merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return result


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear warm-up, which unlike transformers' begins above zero, and half a cosine."""
    warmup = max(steps // 20, 1)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, (1 + math.cos(math.pi * max(step - warmup, 0) / (steps - warmup))) / 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--start", choices=("zoo:eagle3", "zoo:p-eagle"), default=PARENT, help="what variants start from"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    study = Study(options.work, options.start, options.lr)
    kept = options.work / f"{options.start.partition(':')[2]}-{options.steps}-{options.lr:g}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for name, recipe in {AUTOREGRESSIVE: study.parent, BEFORE: study.begun(Variant())}.items():
        if name not in found:
            found[name] = study.judge(recipe)
    for seed in range(options.seeds):  # seed by seed, so that what is there can be compared
        for name in options.only:
            key = f"{name}, seed {seed}"
            if key not in found:
                recipe, seconds = study.train(VARIANTS[name], options.steps, seed)
                found[key] = study.judge(recipe) | {"seconds": seconds}
                kept.write_text(json.dumps(found))
                length = length_over_prompts(found[key]["sums"]).mean
                print(f"{key}: {length:.3f} in {seconds:.0f} s", flush=True)
    Console(width=150).print(table(found, options))


def table(found: dict[str, Any], options: argparse.Namespace) -> Table:
    shown = Table(
        "variant", "acceptance length", "of each seed", "against the first", "rounds in which each stood", "CPU s",
        title=f"P-EAGLE at K = {K} after {options.steps} steps of {ROW} tokens from {options.start}",
    )  # fmt: skip
    first: list[tuple[int, int]] = []
    for name in (AUTOREGRESSIVE, BEFORE, *options.only):
        trained = name in VARIANTS
        runs = [found[f"{name}, seed {seed}"] for seed in range(options.seeds)] if trained else [found[name]]
        sums = pool([run["sums"] for run in runs])
        if trained and not first:
            first = sums
        length, won = length_over_prompts(sums), gain(first, sums, comparisons=1) if first else None
        shown.add_row(
            name,
            f"{length.mean:.3f} [{length.low:.3f}, {length.high:.3f}]",
            ", ".join(f"{length_over_prompts(run['sums']).mean:.3f}" for run in runs) if trained else "",
            "" if won is None else f"{won.mean:+.3f} [{won.low:+.3f}, {won.high:+.3f}]",
            " ".join(f"{sum(run['accepted'][k] for run in runs) / len(runs):.2f}" for k in range(K)),
            f"{sum(run['seconds'] for run in runs) / len(runs):.0f}" if trained else "",
        )
    return shown


if __name__ == "__main__":
    main()
