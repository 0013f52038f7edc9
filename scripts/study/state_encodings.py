"""What it costs in acceptance to train on stored states that are rounded: EAGLE-3 of the embedded target.

`python -m scripts.study.state_encodings --work DIR --data SAMPLES [--steps 150] [--seeds 3] [--row 1024] [--draft D]`

The states of the samples are stored in float32 and rounded to each encoding, and a draft is trained on each, from the
same seeds, on the same rows. Every draft is judged on the states as the target computes them, by simulating rounds of
the samples that were held out: with the interval over samples, and its difference from the draft of bf16
states over the same samples. Everything is kept in DIR, and what is there is not made again.

Answered at fd6429e (`benchmarks/training.md`): nothing that two seeds show.
Nobody has to keep this running.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftkit.data.packing import PackedRows
from draftkit.data.sample_files import held_out, read_training_samples
from draftkit.data.samples import Sample
from draftkit.data.states import ENCODINGS, Encoding
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.data.states.write import StatesSettings, open_states_job, write_states
from draftkit.data.vocabulary import token_counts
from draftkit.layout.folder import read_draft
from draftkit.results.statistics import gain, length_over_prompts
from draftkit.targets.states import AuxLayers
from draftkit.train.batch import TrainingBatch
from draftkit.train.config import TrainConfig
from draftkit.train.run import train_draft
from draftkit.train.settings import Optimization, Validation
from draftkit.train.setup import start_recipe
from draftkit.train.validation import judge

TARGET = "zoo:target"
DRAFT_VOCABULARY = 2048
SHARE = 0.1  # of the samples, held out
TRAINED: tuple[Encoding, ...] = tuple(encoding for encoding in ENCODINGS if encoding != "float32")
Sums = list[tuple[float, int]]


def store(work: Path, data: Path) -> None:
    """The states of all samples in every encoding."""
    exact = work / "states-float32"
    with open_states_job(data, exact, StatesSettings(target=TARGET, encoding="float32", device="cpu")) as job:
        manifest = job.write()
    samples = read_training_samples(data)
    numbers = {sample.id: number for number, sample in enumerate(samples)}
    source = OfflineStates(exact, data=data, target=None, aux_layers=AuxLayers(manifest.layers), dtype=torch.float32)

    def stored(wanted: Sequence[Sample]) -> Iterator[tuple[int, torch.Tensor]]:
        for place, sample in enumerate(wanted):
            features, last = source.states_of([numbers[sample.id]], len(sample))
            assert features is not None
            yield place, torch.cat((features[0].unflatten(1, (-1, manifest.hidden_size)), last[0, :, None]), dim=1)

    for encoding in ENCODINGS:
        out = work / f"states-{encoding}"
        if encoding != "float32" and not out.exists():
            write_states(out, replace(manifest, encoding=encoding, shards=()), samples, stored)


def run_of(work: Path, data: Path, encoding: Encoding, seed: int, steps: int, row: int, draft: str) -> TrainConfig:
    return TrainConfig(
        recipe="eagle3",
        target=TARGET,
        data=str(data),
        out=str(work / _name(encoding, seed, draft)),
        states=str(work / f"states-{encoding}"),
        tokens_per_row=row,
        device="cpu",
        seed=seed,
        draft=draft,
        draft_vocab_size=0 if draft else DRAFT_VOCABULARY,
        optimization=Optimization(lr=2e-4 if draft else 1e-3, max_steps=steps),
        validation=Validation(share=SHARE, limit=4),
    )


def simulated(config: TrainConfig, draft: Path, k: int) -> Sums:
    """The accepted draft tokens and the rounds of each held-out sample, on states that the target computes."""
    target = load_training_target(TARGET, device="cpu", dtype=torch.float32)
    samples = read_training_samples(Path(config.data))
    training, judging = held_out(samples, SHARE)
    recipe = start_recipe(config, target, read_draft(draft), token_counts(samples, training, 4096)).eval()
    source = OnlineStates(target, recipe.aux_layers)
    found = {}
    rows = PackedRows(samples, judging, config.tokens_per_row)
    for row in map(rows.__getitem__, range(len(rows))):
        states = source.states(row["tokens"], row["positions"], row["sample_ids"])
        batch = TrainingBatch(
            row["tokens"], row["positions"], row["sample_ids"], row["loss_mask"], states.features, states.last
        )
        for judged in judge(recipe, batch, row["numbers"], k, "greedy"):
            found[judged.number] = (float(sum(r.accepted for r in judged.rounds)), len(judged.rounds))
    return [found[number] for number in judging]


def errors(work: Path, data: Path, encoding: Encoding) -> str:
    """How far the stored states lie from those in float32: the norm of the difference over theirs."""
    states = []
    samples = read_training_samples(data)[:100]
    for name in (encoding, "float32"):
        source = OfflineStates(
            work / f"states-{name}", data=data, target=None, aux_layers=AuxLayers((2, 5, 7)), dtype=torch.float32
        )
        found = source.states_of(range(len(samples)), sum(map(len, samples)))
        assert found.features is not None
        states.append(torch.cat((found.features, found.last), dim=-1))
    return f"{float((states[0] - states[1]).norm() / states[1].norm()):.5f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--row", type=int, default=1024, help="tokens")
    parser.add_argument("--draft", default="", help="one to go on with; none is a new one")
    parser.add_argument("--k", type=int, default=4)
    arguments = parser.parse_args()
    work, data = arguments.work, arguments.data
    work.mkdir(exist_ok=True)
    store(work, data)
    for seed, encoding in product(range(arguments.seeds), TRAINED):
        config = run_of(work, data, encoding, seed, arguments.steps, arguments.row, arguments.draft)
        out = Path(config.out)
        if not (out / "draft").exists():
            train_draft(config, resume=True)
        if not (out / "simulated.json").exists():
            (out / "simulated.json").write_text(json.dumps(simulated(config, out / "draft", arguments.k)))
    show(work, data, arguments.seeds, arguments.draft)


def _name(encoding: Encoding, seed: int, draft: str) -> str:
    return f"{encoding}-{seed}-gone-on" if draft else f"{encoding}-{seed}"


def show(work: Path, data: Path, seeds: int, draft: str) -> None:
    """The table of what there is."""

    def sums(encoding: Encoding, seed: int) -> Sums:
        return [
            tuple(pair) for pair in json.loads((work / _name(encoding, seed, draft) / "simulated.json").read_text())
        ]

    size = {e: sum(path.stat().st_size for path in (work / f"states-{e}").iterdir()) for e in ENCODINGS}
    exact = [pair for seed in range(seeds) for pair in sums("bf16", seed)]
    table = Table("states", "MB", "error", *(f"seed {seed}" for seed in range(seeds)), "all seeds", "against bf16")
    for encoding in TRAINED:
        alone = [length_over_prompts(sums(encoding, seed)) for seed in range(seeds)]
        together = [pair for seed in range(seeds) for pair in sums(encoding, seed)]
        whole, more = length_over_prompts(together), gain(exact, together, 1)
        table.add_row(
            encoding,
            f"{size[encoding] / 1e6:.1f}",
            errors(work, data, encoding),
            *(f"{length.mean:.3f}" for length in alone),
            f"{whole.mean:.3f} [{whole.low:.3f}, {whole.high:.3f}]",
            f"{more.mean:+.3f} [{more.low:+.3f}, {more.high:+.3f}]",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
