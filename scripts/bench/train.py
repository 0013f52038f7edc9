"""Drafts of one target trained by draftkit and by speculators: speed, memory, and acceptance by two engines.

`python -m scripts.bench.train --work DIR --speculators-python ENV/bin/python [--vllm-python ENV/bin/python]
[--recipe eagle3 | dflash | dspark] [--samples 1000] [--epochs 2] [--tokens-per-row 1024] [--threads 1] [--prompts 80]
[--defaults] [--seed 0]
[--target TARGET --data SAMPLES --tokens N --layers 2,15,27 --vocabulary 8192 --dataset FILE … --temperature 0,1]`

Without `--data`, the embedded target answers training questions greedily. Both trainers get the same samples, stored
states, architecture, loss, optimizer, schedule and number of steps, in float32 (bfloat16 on a GPU). They run one after
the other, each in its own process with the same number of threads. speculators packs the samples itself. draftkit would
need fewer rows, so it gets shorter ones: both read each sample equally often. Tokens are those of samples, not padding.
Times are of steps, from fetching a row to the optimizer; the median counts. Peak memory is the whole process's, or the
GPU's. What DIR has is not made again.

EAGLE-3: each begins with its own random weights, and neither trains the draft's head. DFlash and DSpark: both begin
with the weights of `speculators train --dry-run`. speculators divides a block's weighted loss by the number of rows,
draftkit by the sum of their weights. draftkit's clipping and speculators' printed loss are scaled accordingly.

`--defaults`: each trainer uses its own loss, optimizer, schedule and start. Steps, rows, layers, vocabulary, epochs,
precision and block sizes stay the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoConfig

from draftkit.convert.api import convert_checkpoint
from draftkit.data.packing import pack
from draftkit.data.sample_files import held_out, read_training_samples
from draftkit.data.states.online import load_training_target
from draftkit.engines.vllm.serve import speculative_config
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.layout.folder import read_draft
from draftkit.loading import open_target
from draftkit.results.cell import Interval
from draftkit.results.metrics import length
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.target import Target
from draftkit.train.parallel import default_mask_token
from scripts import _bench
from scripts._bench import kept, show, stamp
from scripts.bench._speculators import CPU, decoder_config, run_speculators, run_worker, stored_states, write_data
from scripts.check.vllm import run_vllm
from scripts.zoo import _corpus as zoo_corpus

TARGET = "zoo:target"
STEPS = 3  # of the training-time test
DECAY = 4.0  # of the weights of a block's drafts
BLOCK_LAYERS = ("full_attention",) * 2  # of block drafters
MARKOV_RANK = 64
HELD_OUT = 0.05
MAX_QUESTION = 700  # characters
OPTIMIZATION = {  # of draftkit
    "optimizer": "adamw", "lr": 1e-3, "schedule": "linear", "warmup": 0.02, "beta2": 0.999,
}  # fmt: skip
THEIR_OPTIMIZATION = {  # of speculators: the same
    "optimizer": "adamw", "lr": 1e-3, "weight-decay": 0, "scheduler-type": "linear", "scheduler-warmup-ratio": 0.02,
}  # fmt: skip
COLD = 5  # steps whose times do not count
LAST = 50  # steps whose losses are averaged
COLUMNS = ("trainer", "steps", "tokens", "tokens/s", "tokens/CPU s", "peak MB", "loss")


@dataclass(frozen=True)
class Recipe:
    """A recipe that both trainers have, and what makes their runs alike.

    - `arguments` of speculators' command; `options` of draftkit's recipe.
    - `shape`: arguments of the draft that both begin with, empty if each begins with its own; `sizes`: the same as
      options of draftkit.
    - `scale`: draftkit's loss divided by that of speculators.
    - `k`: drafts a round in all measurements. `v2`: whether vLLM takes its V2 model runner.
    """

    title: str
    k: int
    arguments: Mapping[str, object]
    options: Mapping[str, object]
    sizes: Mapping[str, object]
    shape: Mapping[str, object] = field(default_factory=dict)
    scale: float = 1.0
    v2: bool = False

    @property
    def by_default(self) -> Recipe:
        """The same draft, each trainer with its own loss, optimizer and start."""
        return replace(self, arguments=self.shape, options=self.sizes, shape={}, scale=1.0)


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe that was asked for. Blocks draft `--drafted` tokens from `--anchors` places of a row."""
    drafted, anchors = options.drafted, options.anchors
    weights = [math.exp(-step / DECAY) for step in range(drafted)]
    blocks: dict[str, object] = {"layers": options.layers, "num_layers": len(BLOCK_LAYERS), "max_anchors": anchors}
    theirs = {"per-position-loss-weight": "fixed-exp-decay", "dflash-decay-gamma": DECAY, "max-anchors": anchors}
    ours = {"dpace": None, "decay_length": DECAY, "max_anchors": anchors}
    scale = len(weights) / sum(weights)
    if options.recipe == "dflash":
        # Without the switch its config would let vLLM run full layers causally.
        shape = {"block-size": drafted + 1, "sliding-window-non-causal": None, "max-anchors": anchors}
        sizes = blocks | {"block_size": drafted + 1}
        arguments = theirs | {"loss-fn": "kl_div"}
        return Recipe("DFlash", drafted, arguments, ours | {"loss": "kl"}, sizes, shape, scale)
    if options.recipe == "dspark":
        shape = {"block-size": drafted, "markov-rank": MARKOV_RANK, "max-anchors": anchors}
        sizes = blocks | {"block_size": drafted, "markov_rank": MARKOV_RANK}
        arguments = theirs | {"loss-fn": '{"ce": 0.1, "tv": 1.8}'}
        return Recipe("DSpark", drafted, arguments, ours | {"loss": "0.1*ce + 1.8*tv"}, sizes, shape, scale, v2=True)
    return Recipe(
        "EAGLE-3",
        k=4,
        arguments={"full-attention-indices": 0, "loss-fn": "kl_div", "ttt-steps": STEPS},
        options={
            "steps": STEPS,
            "loss": "kl",
            "reduction": {"decay": 1.0, "normalized": False},
            "layers": options.layers,
            "norm_before_residual": True,
            "feature_norm": "joint",
            "norm_output": True,
            "train_head": False,
        },
        sizes={"layers": options.layers},
    )


@dataclass(frozen=True)
class Run:
    """A finished training: numbers for each step, the tokens of all, and the draft's acceptance by what was measured.

    `vllm`: the acceptance length that vLLM counts.
    """

    losses: list[float]
    seconds: list[float]
    cpu_seconds: list[float]
    tokens: float
    peak_bytes: int
    acceptance: dict[str, Interval]
    vllm: float | None

    def figures(self) -> list[float]:
        """The columns that are compared, but for acceptance."""
        steps = len(self.losses)
        speeds = (self.tokens / steps / median(each[COLD:]) for each in (self.seconds, self.cpu_seconds))
        return [steps, self.tokens, *speeds, self.peak_bytes / 1e6, fmean(self.losses[-LAST:])]

    def cells(self, name: str) -> list[str]:
        numbers = [f"{figure:,.{digits}f}" for figure, digits in zip(self.figures(), (0, 0, 0, 0, 0, 3), strict=True)]
        lengths = [length(found, 3) for found in self.acceptance.values()]
        return [name, *numbers, *lengths, "" if self.vllm is None else f"{self.vllm:.3f}"]

    def ratios(self, other: Run) -> list[str]:
        own, others = ([*run.figures(), *(each.mean for each in run.acceptance.values())] for run in (self, other))
        by_vllm = "" if self.vllm is None or other.vllm is None else f"{self.vllm / other.vllm:.3f}"
        ratios = [f"{a / b:.3f}" for a, b in zip(own, others, strict=True)]
        return ["draftkit ÷ speculators", *ratios, by_vllm]


class Comparison:
    """One recipe by both trainers, in a folder of its own; each method makes what is not there yet."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.work = options, options.work.resolve()
        self.target = open_target(options.target).folder
        self.config = AutoConfig.from_pretrained(self.target)
        self.recipe = recipe_of(options).by_default if options.defaults else recipe_of(options)
        self.folder = self.work / options.recipe / f"{'defaults' if options.defaults else 'alike'}-seed-{options.seed}"
        self.folder.mkdir(exist_ok=True, parents=True)
        self.samples_file = self._samples()
        self.samples = read_training_samples(self.samples_file)
        self.training, judging = held_out(self.samples, HELD_OUT)
        self.states, self.data = self.work / "states", self.work / "speculators-data"
        stored = stored_states(self.states, self.samples_file, options.target, options.layers)
        if not self.data.exists():  # the held-out samples are last
            vocabulary = options.vocabulary, self.config.vocab_size
            write_data(self.data, self.samples, [*self.training, *judging], self.training, stored, vocabulary)

    def _samples(self) -> Path:
        """The first samples of `--data`, as far as `--tokens` reach; else the embedded target's own answers."""
        prompts, responses, samples = (self.work / f"{name}.jsonl" for name in ("prompts", "responses", "samples"))
        target = ("--target", self.options.target)
        if samples.exists():
            return samples
        if self.options.data is not None:
            ends = accumulate(len(sample) for sample in read_training_samples(self.options.data))
            count = sum(end <= self.options.tokens for end in ends)
            draftkit("data", "prepare", self.options.data, samples, *target, "--limit", count)
            return samples
        questions = training_questions(self.options.samples)
        prompts.write_text("".join(json.dumps({"id": f"q{i:05}", "prompt": q}) + "\n" for i, q in questions))
        draftkit("data", "regenerate", prompts, responses, *target, "--max-new-tokens", 96, "--concurrency", 32)
        draftkit("data", "prepare", responses, samples, *target, "--max-length", 512)
        return samples

    def speculators(self) -> Run:
        """Train with speculators, and convert its last checkpoint with draftkit."""
        out, result = self.folder / "speculators", self.folder / "speculators.json"
        draft, checkpoints = out / "draft", out / "checkpoints"
        if not result.exists():
            begin = {"from-pretrained": self._initial()} if self.recipe.shape else {}
            self._run_speculators({**self._arguments(), **begin, "save-path": checkpoints}, result)
        if not draft.exists():
            convert_checkpoint(str(checkpoints / str(self.options.epochs - 1)), draft, target=self.options.target)
        tokens = sum(step["tokens"] for step in json.loads(result.read_text())["steps"])
        return self._run(result, tokens, draft, self.recipe.scale)

    def draftkit(self, steps: int) -> Run:
        """Train with draftkit for as many steps, or fewer if the longest sample needs longer rows."""
        out, result, epochs = self.folder / "draftkit", self.folder / "draftkit.json", self.options.epochs
        if not result.exists():
            row_size, rows = self._rows(steps // epochs)
            optimization: dict[str, object] = {"max_steps": min(steps, rows * epochs)}
            if not self.options.defaults:
                optimization |= OPTIMIZATION | {"clip": self.recipe.scale}
            begin = {"draft": str(self._initial())} if self.recipe.shape else {}
            settings = {
                "recipe": self.options.recipe,
                "target": self.options.target,
                "data": str(self.samples_file),
                "states": str(self.states),
                "out": str(out),
                "tokens_per_row": row_size,
                "device": self.options.device,
                "log_every": 1,
                "seed": self.options.seed,
                "optimization": optimization,
                "options": dict(self.recipe.options),
                "validation": {"share": HELD_OUT},
                **(begin or {"draft_vocab_size": self.options.vocabulary}),
            }
            job = {"settings": settings, "threads": self.options.threads}
            run_worker(sys.executable, "scripts.bench._draftkit_train", job, result)
        tokens = sum(len(self.samples[number]) for number in self.training)
        return self._run(result, epochs * tokens, out / "draft")

    def _run(self, path: Path, tokens: float, draft: Path, scale: float = 1.0) -> Run:
        """`scale`: what the losses are multiplied by."""
        found = json.loads(path.read_text())
        columns = ([step[name] for step in found["steps"]] for name in ("loss", "seconds", "cpu_seconds"))
        losses, seconds, cpu_seconds = columns
        losses = [scale * loss for loss in losses]
        acceptance = self._acceptance(draft), self._by_vllm(draft)
        return Run(losses, seconds, cpu_seconds, tokens, found["peak_bytes"], *acceptance)

    def _initial(self) -> Path:
        """The draft that both begin with, as speculators writes it."""
        initial = self.folder / "initial"
        if not initial.exists():
            begin = {**self.recipe.shape, **self._decoder(), "save-path": initial, "dry-run": None}
            self._run_speculators(self._arguments() | begin, self.folder / "initial.json")
        return initial

    def _decoder(self) -> dict[str, object]:
        """The arguments that say what layers a block drafter has, and its mask token."""
        decoder = self.folder / "decoder.json"
        decoder.write_text(json.dumps(decoder_config(self.config, BLOCK_LAYERS)))
        return {"draft-config": decoder, "mask-token-id": default_mask_token(self.target, self.config.vocab_size)}

    def _run_speculators(self, arguments: Mapping[str, object], result: Path) -> None:
        options = self.options
        place = {"threads": options.threads, "device": options.device}
        run_speculators(options.speculators_python, self.data, options.layers, arguments, result, **place)

    def _rows(self, rows: int) -> tuple[int, int]:
        """The largest row size with which the samples fill `rows` rows or more, and how many rows they fill."""
        lengths = [len(self.samples[number]) for number in self.training]
        longest = max(lengths)
        for size in range(max(self.options.tokens_per_row, longest), longest - 1, -1):
            found = len(pack(lengths, size))
            if found >= rows:
                break
        return size, found

    def _acceptance(self, draft: Path) -> dict[str, Interval]:
        """Acceptance lengths on each prompt set at each temperature."""

        def measured() -> dict[str, dict[str, Any]]:
            found = {}
            for dataset in self.options.dataset:
                printed = draftkit(
                    "eval", "--target", self.options.target, "--draft", draft, "--dataset", dataset,
                    "--limit", self.options.prompts, "--k", self.recipe.k, "--temperature", self.options.temperature,
                    "--concurrency", 8, "--set", "repeats=0", "--json",
                )  # fmt: skip
                for cell in json.loads(printed)["cells"]:
                    found[f"{Path(dataset).stem}, T={cell['temperature']:g}"] = cell["acceptance_length"]
            return found

        lengths = kept(draft.parent / "acceptance.json", measured)
        return {name: Interval(**found) for name, found in lengths.items()}

    def _by_vllm(self, draft: Path) -> float | None:
        """The acceptance length that vLLM counts on the first prompt set."""
        if self.options.vllm_python is None:
            return None

        def counted() -> dict[str, int]:
            tokenizer = load_tokenizer(self.target, "target")
            prompts = load_prompts(self.options.dataset[0], self.options.prompts)
            model = load_training_target(self.options.target, device="cpu", dtype=torch.float32)
            job = {
                "target": str(self.target),
                "speculative": speculative_config(read_draft(draft).spec, draft, self.recipe.k),
                "prompts": [{"tokens": encode_prompt(prompt, tokenizer)} for prompt in prompts],
                "max_new_tokens": 128,
                "v2": self.recipe.v2,
                "eos_token_ids": sorted(Target(model).eos_token_ids),
            }
            found = run_vllm(self.options.vllm_python, job)
            assert found is not None, "vLLM refused the draft"
            counters: dict[str, int] = found["counters"]
            return counters

        counters = kept(draft.parent / "acceptance-by-vllm.json", counted)
        return 1 + counters["num_accepted_tokens"] / counters["num_drafts"]

    def _arguments(self) -> dict[str, object]:
        """Arguments of all runs of speculators."""
        options = self.options
        settings: dict[str, object] = {
            "verifier-name-or-path": self.target,
            "data-path": self.data / "data",
            "log-dir": self.folder / "speculators" / "logs",
            "speculator-type": options.recipe,
            "total-seq-len": options.tokens_per_row,
            "train-data-ratio": (len(self.training) + 0.5) / len(self.samples),
            "num-workers": 0,
            "on-missing": "raise",
            "epochs": options.epochs,
            "checkpoint-freq": options.epochs,
            "seed": options.seed,
            **self.recipe.arguments,
            **(CPU if options.device == "cpu" else {}),
        }
        if not options.defaults:
            settings |= THEIR_OPTIMIZATION
        elif options.recipe != "eagle3":
            settings |= self._decoder()
        if not self.recipe.shape:
            settings |= {"d2t-path": self.data / "d2t.npy", "t2d-path": self.data / "t2d.npy"}
            settings |= {"draft-vocab-size": options.vocabulary}
        return settings


def training_questions(count: int) -> Iterator[tuple[int, str]]:
    """Numbered questions about sources that are not held out."""
    files = [path for path in zoo_corpus.source_files() if not zoo_corpus.is_held_out(path)]
    found = dict.fromkeys(e.question for path in files for e in zoo_corpus.examples_of_file(path))
    questions = [question for question in found if len(question) <= MAX_QUESTION]
    random.Random(0).shuffle(questions)
    return enumerate(questions[:count])


def draftkit(*arguments: object) -> str:
    """What a command of draftkit prints."""
    command = [sys.executable, "-m", "draftkit", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def arguments() -> argparse.Namespace:
    parser = _bench.arguments(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, states, drafts and results")
    parser.add_argument("--speculators-python", required=True, help="the Python of an environment with speculators")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM; without it vLLM is left out")
    parser.add_argument("--recipe", choices=("eagle3", "dflash", "dspark"), default="eagle3")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--data", type=Path, help="prepared samples; default: answers of the embedded target")
    parser.add_argument("--tokens", type=int, default=sys.maxsize, help="of these, at most")
    parser.add_argument("--samples", type=int, default=1000, help="answers of the embedded target")
    parser.add_argument("--layers", default="2,5,7", help="of the target, which drafts read")
    parser.add_argument("--vocabulary", type=int, default=2048, help="of drafts with one of their own")
    parser.add_argument("--dataset", nargs="+", default=["zoo"], help="prompt sets to measure acceptance on")
    parser.add_argument("--prompts", type=int, default=80, help="of each of them")
    parser.add_argument("--temperature", default="0", help="to measure acceptance at, as 0,1")
    parser.add_argument("--defaults", action="store_true", help="let each trainer use its own defaults")
    parser.add_argument("--seed", type=int, default=0, help="each has folders of its own")
    parser.add_argument("--epochs", type=int, default=2, help="of speculators; draftkit takes as many steps")
    parser.add_argument("--tokens-per-row", type=int, default=1024)
    parser.add_argument("--drafted", type=int, default=7, help="tokens of a block")
    parser.add_argument("--anchors", type=int, default=128, help="blocks of a row, for block drafters")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, the same for both")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, where each trains in bfloat16")
    options = parser.parse_args()
    options.layers = [int(layer) for layer in options.layers.split(",")]
    return options


def main() -> None:
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    both = Comparison(options)
    theirs = both.speculators()
    ours = both.draftkit(len(theirs.losses))
    sizes = f"{len(both.training)} samples, rows of {options.tokens_per_row} tokens"
    sizes += f" and {options.anchors} blocks" if both.recipe.shape else ""
    sizes += f", {options.threads} threads, K={both.recipe.k}" + (", its own defaults each" if options.defaults else "")
    title = f"{both.recipe.title} on {options.target}, seed {options.seed}\n{stamp()}\n{sizes}"
    columns = (*COLUMNS, *(f"AL {name}" for name in theirs.acceptance), "AL by vLLM")
    show(title, columns, [theirs.cells("speculators"), ours.cells("draftkit"), ours.ratios(theirs)])


if __name__ == "__main__":
    main()
