"""Drafts of the embedded target trained by draftkit and by speculators: speed, memory, and acceptance by two engines.

`python -m scripts.bench.train --work DIR --speculators-python ENV/bin/python [--vllm-python ENV/bin/python]
[--draftkit-python ENV/bin/python] [--recipe eagle3 | dflash | dspark | p-eagle | pard] [--samples 1000] [--epochs 2]
[--tokens-per-row 1024] [--threads 1] [--prompts 80] [--defaults] [--seed 0] [--vary NAME=VALUE …]
[--target TARGET --data SAMPLES --layers 2,15,27 --vocabulary 8192 --dataset FILE … --temperature 0,1]`

The target answers training questions greedily (`draftkit data regenerate`). Both trainers get the same samples, the
same states of the target from files, architecture, loss, optimiser, schedule, number of optimiser steps and of blocks
in a row, in float32 (on a GPU bfloat16) with the same number of threads, one after the other, each in a process of its
own. speculators packs the samples itself; draftkit, which would need fewer rows of this length, gets shorter ones, so
that both read every sample as often, and takes fewer steps where the longest sample needs a longer row. Tokens are
those of samples, not padding. Times are those of steps, from fetching a row to the optimiser; the median counts. The
peak of memory is that of the whole process, libraries included: Triton, which a CPU has no use for, takes 70 MB where
it is installed; on a GPU it is the GPU's.
Everything is kept in DIR, and what is there is not made again.

EAGLE-3: each begins with its own random weights. speculators keeps the draft's head frozen; so does draftkit in the run
that is compared, and trains it, its default, in another. DFlash and DSpark: both begin with the weights that
`speculators train --dry-run` writes. speculators divides the weighted sum by the number of rows, draftkit by the sum of
their weights: its loss is so many times larger, draftkit clips gradients that much later, and the table has
speculators' loss multiplied by it. vLLM runs DSpark in its V2 model runner, which is slow on a CPU.

`--target` and `--data`: another target, with samples that `draftkit data prepare` has written; `--tokens` takes the
first of them. `--defaults`: each trains as it does by itself, with its own loss, optimizer, schedule and start; the
number of optimizer steps stays the same, as do rows, layers, vocabulary, epochs, precision and the sizes of a block.
`--seed` has folders of its own. `--vary NAME=VALUE` is draftkit's run once more with one setting changed, as `train
--set` takes it, `--vary-speculators` theirs with an argument changed: what makes two trainers differ, one thing at a
time.

`--recipe p-eagle` and `pard`, which have no counterpart here, are trained by draftkit alone, with their own defaults:
`draftkit eval` at K=8 of the draft and of what it is made from and should be better than: P-EAGLE than draftkit's
EAGLE-3 of the first comparison, PARD than the autoregressive draft.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean, median
from typing import cast

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint
from draftkit.data.packing import pack
from draftkit.data.sample_files import held_out, read_training_samples
from draftkit.data.states.online import load_training_target
from draftkit.data.vocabulary import choose_vocabulary, token_counts
from draftkit.engines.vllm.serve import speculative_config
from draftkit.evaluate.job import processor
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.layout.folder import read_draft
from draftkit.loading import open_target
from draftkit.results.cell import Interval
from draftkit.results.metrics import length
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.target import Target
from draftkit.train.parallel import default_mask_token
from scripts.bench._speculators_data import (
    run_worker,
    stored_states,
    write_speculators_data,
    write_speculators_vocabulary,
)
from scripts.bench.runtime import commit
from scripts.check.vllm import run_vllm
from scripts.zoo import _corpus as zoo_corpus

TARGET = "zoo:target"
LAYERS = (2, 5, 7)
STEPS = 3  # of the training-time test
DRAFTED = 7  # tokens of a block
DECAY = 4.0  # of the weights of a block's drafts
BLOCK_LAYERS = 2  # of block drafters
MARKOV_RANK = 64
DRAFT_VOCABULARY = 2048
HELD_OUT = 0.05
MAX_QUESTION = 700  # characters
WARMUP = 0.02
LEARNING_RATE = 1e-3
OPTIMIZATION = {  # of speculators, as `Bench.settings` has it for draftkit
    "optimizer": "adamw",
    "lr": LEARNING_RATE,
    "weight-decay": 0,
    "scheduler-type": "linear",
    "scheduler-warmup-ratio": WARMUP,
}
COLD = 5  # steps whose times do not count
LAST = 50  # steps whose losses are averaged
TRAINED_HEAD = "draftkit, its head trained"
RECIPES = ("eagle3", "dflash", "dspark")  # that both train
PARALLEL_K = 8
PARENTS = {"p-eagle": "eagle3", "pard": "zoo:draft-model"}  # what these are made from
COLUMNS = ("trainer", "steps", "tokens", "tokens/s", "tokens/CPU s", "peak MB", "loss")


@dataclass(frozen=True)
class Subject:
    """What drafts are trained for: the target as commands take it, its folder, the layers that they read, and how many
    tokens a vocabulary of their own has."""

    target: str
    folder: Path
    layers: tuple[int, ...]
    vocabulary: int


ZOO = Subject(TARGET, zoo.path("target"), LAYERS, DRAFT_VOCABULARY)


@dataclass(frozen=True)
class Compared:
    """A recipe that both trainers have, and what makes their runs alike.

    - `arguments` of speculators' command; `shape`: those of a draft that both begin with, none where each begins with
      its own; `sizes`: the same as options of draftkit's recipe. `options` of the recipe, and `scale`: its loss by that
      of speculators.
    - `runs`: draftkit's by name, with the options that differ; the first one is compared.
    - `k`: drafts a round in all measurements. `v2`: whether vLLM takes its V2 model runner.
    """

    title: str
    k: int
    arguments: Mapping[str, object]
    options: Mapping[str, object]
    shape: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, object] = field(default_factory=dict)
    scale: float = 1.0
    runs: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"draftkit": {}})
    v2: bool = False

    @property
    def by_default(self) -> Compared:
        """The same draft, each trainer with its own loss, optimizer and start."""
        return replace(self, arguments=self.shape, options=self.sizes, shape={}, scale=1.0, runs={"draftkit": {}})


def blocks(
    title: str, shape: Mapping[str, object], sizes: Mapping[str, object], losses: tuple[str, str], drafted: int,
    anchors: int, *, v2: bool,
) -> Compared:  # fmt: skip
    """A recipe of block drafters of `BLOCK_LAYERS` layers that draft so many tokens; `losses`: as speculators and as
    draftkit call it."""
    theirs, ours = losses
    weights = [math.exp(-step / DECAY) for step in range(drafted)]
    return Compared(
        title,
        k=drafted,
        shape={**shape, "max-anchors": anchors},
        sizes={"num_layers": BLOCK_LAYERS, "max_anchors": anchors, **sizes},
        arguments={
            "loss-fn": theirs,
            "per-position-loss-weight": "fixed-exp-decay",
            "dflash-decay-gamma": DECAY,
            "max-anchors": anchors,
        },
        options={"loss": ours, "dpace": None, "decay_length": DECAY, "max_anchors": anchors},
        scale=len(weights) / sum(weights),
        v2=v2,
    )


def compared(recipe: str, layers: tuple[int, ...], drafted: int, anchors: int) -> Compared:
    """A recipe for drafts that read `layers`; blocks draft so many tokens from so many anchors of a row."""
    if recipe == "dflash":
        # Without the switch its config would let vLLM run full layers causally.
        shape = {"block-size": drafted + 1, "sliding-window-non-causal": None}
        sizes: dict[str, object] = {"block_size": drafted + 1, "layers": list(layers)}
        return blocks("DFlash", shape, sizes, ("kl_div", "kl"), drafted, anchors, v2=False)
    if recipe == "dspark":
        shape = {"block-size": drafted, "markov-rank": MARKOV_RANK}
        sizes = {"block_size": drafted, "layers": list(layers), "markov_rank": MARKOV_RANK}
        losses = ('{"ce": 0.1, "tv": 1.8}', "0.1*ce + 1.8*tv")
        return blocks("DSpark", shape, sizes, losses, drafted, anchors, v2=True)
    return Compared(
        "EAGLE-3",
        k=4,
        arguments={"full-attention-indices": 0, "loss-fn": "kl_div", "ttt-steps": STEPS},
        options={
            "steps": STEPS,
            "loss": "kl",
            "reduction": {"decay": 1.0, "normalized": False},
            "layers": list(layers),
            "norm_before_residual": True,
            "feature_norm": "joint",
            "norm_output": True,
        },
        sizes={"layers": list(layers)},
        runs={"draftkit": {"train_head": False}, TRAINED_HEAD: {"train_head": True}},
    )


@dataclass(frozen=True)
class Run:
    """A training that has ended, in numbers for each step; `tokens` of all of them."""

    losses: list[float]
    seconds: list[float]
    cpu_seconds: list[float]
    tokens: float
    peak_bytes: int

    def speed(self, seconds: list[float]) -> float:
        """Tokens per second of the median step."""
        return self.tokens / len(seconds) / median(seconds[COLD:])

    @property
    def loss(self) -> float:
        return fmean(self.losses[-LAST:])


@dataclass(frozen=True)
class Acceptance:
    """Acceptance lengths by what was measured: draftkit's with its interval, and vLLM's on `--vllm-prompts`."""

    lengths: dict[str, Interval]
    vllm: float | None


class Bench:
    """Everything in one folder; each method makes a file or folder that is not there yet."""

    def __init__(self, options: argparse.Namespace, subject: Subject = ZOO, data: Path | None = None):
        self.options, self.subject = options, subject
        self.work: Path = options.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.samples_file = self._samples() if data is None else self._first(data)
        self.samples = read_training_samples(self.samples_file)
        self.training, self.judging = held_out(self.samples, HELD_OUT)
        self.states = self.work / "states"
        self.stored = stored_states(self.states, self.samples_file, subject.target, subject.layers)

    def _samples(self) -> Path:
        prompts, responses, samples = (self.work / f"{name}.jsonl" for name in ("prompts", "responses", "samples"))
        if not samples.exists():
            questions = training_questions(self.options.samples)
            prompts.write_text("".join(json.dumps({"id": f"q{i:05}", "prompt": q}) + "\n" for i, q in questions))
            answering = ("--target", TARGET, "--max-new-tokens", 96, "--concurrency", 32)
            draftkit("data", "regenerate", prompts, responses, *answering)
            draftkit("data", "prepare", responses, samples, "--target", TARGET, "--max-length", 512)
        return samples

    def _first(self, data: Path) -> Path:
        """The first samples of a file, as far as `--tokens` reach."""
        samples = self.work / "samples.jsonl"
        if not samples.exists():
            ends = accumulate(len(sample) for sample in read_training_samples(data))
            count = sum(end <= self.options.tokens for end in ends)
            draftkit("data", "prepare", data, samples, "--target", self.subject.target, "--limit", count)
        return samples

    def settings(self, recipe: str, out: Path, row_size: int, optimization: Mapping[str, float]) -> dict[str, object]:
        """A run of draftkit that optimizes as speculators does; `optimization`: its steps or epochs, what differs."""
        return {
            "recipe": recipe,
            "target": self.subject.target,
            "data": str(self.samples_file),
            "states": str(self.states),
            "out": str(out),
            "tokens_per_row": row_size,
            "device": self.options.device,
            "log_every": 1,
            "optimization": {
                "optimizer": "adamw",
                "lr": LEARNING_RATE,
                "schedule": "linear",
                "warmup": WARMUP,
                "beta2": 0.999,
                "clip": 1.0,
                **optimization,
            },
            "validation": {"share": HELD_OUT},
        }

    def train(self, settings: Mapping[str, object], result: Path, changed: Sequence[str] = ()) -> None:
        """A run of draftkit, timed; `changed`: settings as `train --set` takes them."""
        job = {"settings": settings, "changed": changed, "threads": self.options.threads}
        run_worker(self.options.draftkit_python, "scripts.bench._draftkit_train", job, result)

    def parallel(self, recipe: str) -> tuple[str, Path]:
        """A draft that drafts all tokens at once, trained by draftkit; what it is to be compared with goes first."""
        parent = PARENTS[recipe]
        if parent == "eagle3":
            parent = str(self.work / parent / folder_name(TRAINED_HEAD) / "draft")
        out, result = self.work / recipe, self.work / f"{recipe}.json"
        if not result.exists():
            settings = self.settings(recipe, out, self.options.tokens_per_row, {"epochs": self.options.epochs})
            self.train(settings | {"draft": parent, "options": {"steps": PARALLEL_K}}, result)
        return parent, out / "draft"

    def evaluated(self, *arguments: object) -> str:
        """What `draftkit eval` prints, of the held-out prompts."""
        return draftkit("eval", "--target", self.subject.target, "--limit", self.options.prompts, *arguments)


class Comparison:
    """One recipe by both trainers, in a folder of its own."""

    def __init__(self, bench: Bench, recipe: str):
        self.bench, self.options, self.recipe, self.subject = bench, bench.options, recipe, bench.subject
        kind = compared(recipe, self.subject.layers, self.options.drafted, self.options.anchors)
        self.kind = kind.by_default if self.options.defaults else kind
        self.folder = bench.work / recipe
        if self.options.defaults or self.options.seed:
            self.folder /= f"{'defaults' if self.options.defaults else 'alike'}-seed-{self.options.seed}"
        self.folder.mkdir(exist_ok=True, parents=True)
        self.data = bench.work / "speculators-data"
        if not self.data.exists():
            self._write_speculators_data()

    def speculators(self, *changed: str) -> tuple[Run, Path]:
        """Train with speculators, and convert its last checkpoint with draftkit; `changed`: arguments that differ."""
        out = self.folder / "-".join(["speculators", *changed])
        result, draft, checkpoints = self.folder / f"{out.name}.json", out / "draft", out / "checkpoints"
        if not result.exists():
            begin = {"from-pretrained": self._initial()} if self.kind.shape else {}
            differing = dict(change.split("=", 1) for change in changed)
            self._run_speculators({**self._training(), **begin, "save-path": checkpoints, **differing}, result)
        if not draft.exists():
            convert_checkpoint(str(checkpoints / str(self.options.epochs - 1)), draft, target=self.subject.target)
        steps = json.loads(result.read_text())["steps"]
        return read_run(result, sum(step["tokens"] for step in steps), self.kind.scale), draft

    def draftkit(self, name: str, steps: int, *changed: str) -> tuple[Run, Path]:
        """A training by draftkit and its draft; `changed`: settings that differ."""
        out = self.folder / folder_name("-".join([name, *changed]))
        result = self.folder / f"{out.name}.json"
        if not result.exists():
            row_size, rows = self._rows(steps // self.options.epochs)
            steps = min(steps, rows * self.options.epochs)
            settings = self.bench.settings(self.recipe, out, row_size, {"max_steps": steps, "clip": self.kind.scale})
            if self.options.defaults:
                settings["optimization"] = {"max_steps": steps}
            settings["seed"] = self.options.seed
            settings["options"] = {**self.kind.options, **self.kind.runs[name]}
            if self.kind.shape:
                settings["draft"] = str(self._initial())
            else:
                settings["draft_vocab_size"] = self.subject.vocabulary
            self.bench.train(settings, result, changed)
        tokens = sum(len(self.bench.samples[number]) for number in self.bench.training)
        return read_run(result, self.options.epochs * tokens), out / "draft"

    def _initial(self) -> Path:
        """The draft that both begin with, as speculators writes it."""
        initial = self.folder / "initial"
        if not initial.exists():
            shape = {**self.kind.shape, **self._decoder()}
            self._run_speculators(
                self._training() | shape | {"save-path": initial, "dry-run": None}, self.folder / "initial.json"
            )
        return initial

    def _decoder(self) -> dict[str, object]:
        """The arguments that say what layers a block drafter has, and its mask token."""
        config = AutoConfig.from_pretrained(self.subject.folder)
        decoder = self.folder / "decoder.json"
        decoder.write_text(json.dumps(decoder_config(config)))
        mask = default_mask_token(self.subject.folder, config.vocab_size)
        return {"draft-config": decoder, "mask-token-id": mask}

    def _run_speculators(self, arguments: Mapping[str, object], result: Path) -> None:
        """Run a command of speculators; an argument of None is a switch."""
        words = [[f"--{name}"] if value is None else [f"--{name}", str(value)] for name, value in arguments.items()]
        job = {
            "samples": str(self.data / "samples.jsonl"),
            "data": str(self.data / "data"),
            "arguments": [*chain.from_iterable(words), "--target-layer-ids", *map(str, self.subject.layers)],
            "threads": self.options.threads,
            "device": self.options.device,
        }
        run_worker(self.options.speculators_python, "scripts.bench._speculators_train", job, result)

    def _rows(self, rows: int) -> tuple[int, int]:
        """The most tokens a row with which the samples fill as many rows, and how many they fill: fewer where the
        longest sample needs a longer row."""
        lengths = [len(self.bench.samples[number]) for number in self.bench.training]
        longest = max(lengths)
        for size in range(max(self.options.tokens_per_row, longest), longest - 1, -1):
            found = len(pack(lengths, size))
            if found >= rows:
                break
        return size, found

    def acceptance(self, draft: Path) -> Acceptance:
        """Acceptance lengths on each prompt set at each temperature."""
        result = draft.parent / "acceptance.json"
        found = json.loads(result.read_text()) if result.exists() else {}
        for dataset in self.options.dataset:
            name = Path(dataset).stem
            if not any(key.startswith(f"{name},") for key in found):
                asked = ("--dataset", dataset, "--k", self.kind.k, "--temperature", self.options.temperature)
                together = ("--concurrency", 8, "--set", "repeats=0")  # no speeds
                printed = self.bench.evaluated("--draft", draft, *asked, *together, "--json")
                cells = json.loads(printed)["cells"]
                found |= {f"{name}, T={cell['temperature']:g}": cell["acceptance_length"] for cell in cells}
                result.write_text(json.dumps(found))
        return Acceptance({name: Interval(**length) for name, length in found.items()}, self._by_vllm(draft))

    def _by_vllm(self, draft: Path) -> float | None:
        """The acceptance length that vLLM counts, of `--vllm-prompts`."""
        result = draft.parent / "acceptance-by-vllm.json"
        if self.options.vllm_python is None:
            return None
        if not result.exists():
            found = run_vllm(self.options.vllm_python, self._vllm_job(draft))
            assert found is not None, "vLLM refused the draft"
            result.write_text(json.dumps(found["counters"]))
        counters = cast("dict[str, int]", json.loads(result.read_text()))
        return 1 + counters["num_accepted_tokens"] / counters["num_drafts"]

    def _vllm_job(self, draft: Path) -> dict[str, object]:
        target = self.subject.folder
        tokenizer = load_tokenizer(target, "target")
        prompts = load_prompts(self.options.dataset[0], min(self.options.vllm_prompts, self.options.prompts))
        model = load_training_target(self.subject.target, device="cpu", dtype=torch.float32)
        return {
            "target": str(target),
            "speculative": speculative_config(read_draft(draft).spec, draft, self.kind.k),
            "prompts": [list(encode_prompt(prompt, tokenizer)) for prompt in prompts],
            "max_new_tokens": 128,
            "v2": self.kind.v2,
            "eos_token_ids": sorted(Target(model).eos_token_ids),
        }

    def _write_speculators_data(self) -> None:
        """Samples, the held-out ones last, and the vocabulary."""
        samples, training = self.bench.samples, self.bench.training
        write_speculators_data(self.data, samples, [*training, *self.bench.judging], self.bench.stored)
        size = AutoConfig.from_pretrained(self.subject.folder).vocab_size
        counts = token_counts(samples, training, size)
        write_speculators_vocabulary(self.data, choose_vocabulary(counts, self.subject.vocabulary), size)

    def _training(self) -> dict[str, object]:
        """Arguments of all its runs."""
        training, samples = self.bench.training, self.bench.samples
        settings: dict[str, object] = {
            "verifier-name-or-path": self.subject.folder,
            "data-path": self.data / "data",
            "log-dir": self.folder / "speculators" / "logs",
            "speculator-type": self.recipe,
            "total-seq-len": self.options.tokens_per_row,
            "train-data-ratio": (len(training) + 0.5) / len(samples),
            "num-workers": 0,
            "on-missing": "raise",
            "epochs": self.options.epochs,
            "checkpoint-freq": self.options.epochs,
            "seed": self.options.seed,
            **self.kind.arguments,
        }
        if self.options.device == "cpu":
            settings |= {"draft-attn-impl": "sdpa", "loss-implementation": "eager", "hidden-states-dtype": "float32"}
        if self.options.speculators_attention is not None:
            settings |= {"draft-attn-impl": self.options.speculators_attention, "loss-implementation": "eager"}
        if not self.options.defaults:
            settings |= OPTIMIZATION
        elif self.recipe != "eagle3":
            settings |= self._decoder()
        if not self.kind.shape:
            settings |= {"d2t-path": self.data / "d2t.npy", "t2d-path": self.data / "t2d.npy"}
            settings |= {"draft-vocab-size": self.subject.vocabulary}
        return settings


def decoder_config(target: PretrainedConfig) -> dict[str, object]:
    """The configuration of a block drafter's layers, like the target's."""
    copied = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "max_position_embeddings", "rope_parameters",
    )  # fmt: skip
    return {name: getattr(target, name) for name in copied} | {
        "model_type": "qwen3",
        "num_hidden_layers": BLOCK_LAYERS,
        "layer_types": ["full_attention"] * BLOCK_LAYERS,
        "tie_word_embeddings": False,
    }


def folder_name(run: str) -> str:
    return run.replace(",", "").replace(" ", "-")


def training_questions(count: int) -> Iterator[tuple[int, str]]:
    """Numbered questions about sources that are not held out."""
    files = [path for path in zoo_corpus.source_files() if not zoo_corpus.is_held_out(path)]
    found = dict.fromkeys(e.question for path in files for e in zoo_corpus.examples_of_file(path))
    questions = [question for question in found if len(question) <= MAX_QUESTION]
    random.Random(0).shuffle(questions)
    return enumerate(questions[:count])


def read_run(path: Path, tokens: float, scale: float = 1.0) -> Run:
    """`scale`: what the losses are multiplied by."""
    found = json.loads(path.read_text())
    losses, seconds, cpu_seconds = (
        [step[name] for step in found["steps"]] for name in ("loss", "seconds", "cpu_seconds")
    )
    return Run([scale * loss for loss in losses], seconds, cpu_seconds, tokens, found["peak_bytes"])


def draftkit(*arguments: object) -> str:
    """What a command of draftkit prints."""
    command = [sys.executable, "-m", "draftkit", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def cells(name: str, run: Run, acceptance: Acceptance) -> list[str]:
    return [
        name,
        str(len(run.losses)),
        f"{run.tokens:,.0f}",
        f"{run.speed(run.seconds):.0f}",
        f"{run.speed(run.cpu_seconds):.0f}",
        f"{run.peak_bytes / 1e6:.0f}",
        f"{run.loss:.3f}",
        *(length(found, 3) for found in acceptance.lengths.values()),
        "" if acceptance.vllm is None else f"{acceptance.vllm:.3f}",
    ]


def ratios(ours: Run, theirs: Run, our_acceptance: Acceptance, their_acceptance: Acceptance) -> list[str]:
    row = [
        "draftkit ÷ speculators",
        f"{len(ours.losses) / len(theirs.losses):.2f}",
        f"{ours.tokens / theirs.tokens:.2f}",
        f"{ours.speed(ours.seconds) / theirs.speed(theirs.seconds):.2f}",
        f"{ours.speed(ours.cpu_seconds) / theirs.speed(theirs.cpu_seconds):.2f}",
        f"{ours.peak_bytes / theirs.peak_bytes:.2f}",
        f"{ours.loss / theirs.loss:.2f}",
        *(
            f"{ours.mean / theirs.mean:.3f}"
            for ours, theirs in zip(
                *(acceptance.lengths.values() for acceptance in (our_acceptance, their_acceptance)), strict=True
            )
        ),
    ]
    by_vllm = our_acceptance.vllm, their_acceptance.vllm
    return row if by_vllm[0] is None or by_vllm[1] is None else [*row, f"{by_vllm[0] / by_vllm[1]:.3f}"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, states, drafts and results")
    parser.add_argument("--speculators-python", required=True, help="the Python of an environment with speculators")
    parser.add_argument("--draftkit-python", default=sys.executable, help="the Python that draftkit trains with")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM; without it vLLM is left out")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--data", type=Path, help="prepared samples; default: answers of the embedded target")
    parser.add_argument("--tokens", type=int, default=sys.maxsize, help="of these, at most")
    parser.add_argument("--layers", default=",".join(map(str, LAYERS)), help="of the target, which drafts read")
    parser.add_argument("--vocabulary", type=int, default=DRAFT_VOCABULARY, help="of drafts with one of their own")
    parser.add_argument("--dataset", nargs="+", default=["zoo"], help="prompt sets to measure acceptance on")
    parser.add_argument("--temperature", default="0", help="to measure acceptance at, as 0,1")
    parser.add_argument("--drafted", type=int, default=DRAFTED, help="tokens of a block")
    parser.add_argument("--defaults", action="store_true", help="let each train as it does by itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vary", nargs="+", default=[], metavar="NAME=VALUE", help="runs of draftkit that differ by it"
    )
    parser.add_argument("--vary-speculators", nargs="+", default=[], metavar="NAME=VALUE", help="more of speculators")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2, help="of speculators; draftkit takes as many steps")
    parser.add_argument("--tokens-per-row", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=80, help="held-out prompts, for all measurements of acceptance")
    parser.add_argument("--vllm-prompts", type=int, default=80, help="the first of them, those that vLLM decodes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, the same for both")
    parser.add_argument("--recipe", choices=(*RECIPES, *PARENTS), default="eagle3")
    parser.add_argument("--anchors", type=int, default=128, help="blocks of a row, for block drafters")
    parser.add_argument(
        "--speculators-attention", choices=("sdpa", "eager"), help="default: sdpa on a CPU, compiled on a GPU"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda, where each trains in bfloat16")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    layers = tuple(int(layer) for layer in options.layers.split(","))
    subject = Subject(options.target, open_target(options.target).folder, layers, options.vocabulary)
    bench = Bench(options, subject, options.data)
    if options.recipe in PARENTS:
        before, draft = bench.parallel(options.recipe)
        print(bench.evaluated("--draft", before, "--draft", draft, "--k", PARALLEL_K))
    else:
        Console(width=160).print(comparison(bench, options.recipe))


def comparison(bench: Bench, recipe: str) -> Table:
    """All runs of a recipe, and the first of draftkit's against that of speculators."""
    both = Comparison(bench, recipe)
    theirs, their_draft = both.speculators()
    steps = len(theirs.losses)
    runs = {name: both.draftkit(name, steps) for name in both.kind.runs}
    runs |= {f"draftkit, {change}": both.draftkit("draftkit", steps, change) for change in bench.options.vary}
    others = {f"speculators, {change}": both.speculators(change) for change in bench.options.vary_speculators}
    lengths = {name: both.acceptance(draft) for name, (_, draft) in (runs | others).items()}
    their_length = both.acceptance(their_draft)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    today = datetime.now(UTC).date().isoformat()
    options = bench.options
    sizes = f"{len(bench.training)} samples, rows of {options.tokens_per_row} tokens"
    if both.kind.shape:
        sizes += f" and {options.anchors} blocks"
    sizes += f", {options.threads} threads, K={both.kind.k}"
    if options.vllm_python is not None:
        sizes += f", vLLM: {options.vllm_prompts} of {options.prompts} prompts"
    if options.defaults:
        sizes += ", its own defaults each"
    title = f"{both.kind.title} on {bench.subject.target}, seed {options.seed}, {today}, commit {commit()}"
    title += f"\n{processor()}, {versions}; {sizes}"
    table = Table(*COLUMNS, *(f"AL {name}" for name in their_length.lengths), "AL by vLLM", title=title)
    table.add_row(*cells("speculators", theirs, their_length))
    for name, (run, _) in (others | runs).items():
        table.add_row(*cells(name, run, lengths[name]))
    table.add_row(*ratios(runs["draftkit"][0], theirs, lengths["draftkit"], their_length))
    return table


if __name__ == "__main__":
    main()
