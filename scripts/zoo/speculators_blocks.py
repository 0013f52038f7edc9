"""Block drafts of the embedded target, trained and saved by the speculators library's own command, on a CPU.

`python -m scripts.zoo.speculators_blocks --work DIR --speculators-python ENV/bin/python [--only NAME] [--epochs 2]`

All drafts read the same samples, those that the embedded drafts are trained on (the target's own greedy answers and
source text), and the same states of the target from files. DIR/NAME is each draft as the library publishes it: its
`config.json` and `model.safetensors`, weights in bfloat16. What is there is not made again, and an interrupted training
goes on from its last checkpoint in DIR/runs/NAME. Losses are the library's defaults for each kind.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftkit import zoo
from draftkit.data.sample_files import read_training_samples
from draftkit.data.vocabulary import choose_vocabulary, token_counts
from scripts.bench._speculators_data import (
    run_worker,
    stored_states,
    write_speculators_data,
    write_speculators_vocabulary,
)
from scripts.zoo._drafts import mask_token
from scripts.zoo._samples import TARGET, write_training_samples

LAYERS = (2, 5, 7)  # of the target, by their inputs
ANSWERS = 1200
DRAFT_VOCABULARY = 1024
HELD_OUT = 0.02  # the share of the samples that the library validates on
SEED = 20261121  # of the embedded models
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Made:
    """A draft: the library's name of its kind, its decoder layers, and the other arguments of the command.

    `mlp`: inner width of a layer. `reduced`: whether the draft has its own, smaller vocabulary.
    """

    kind: str
    block_size: int
    layer_types: tuple[str, ...] = (FULL, FULL)
    sliding_window: int = 32
    mlp: int = 256
    arguments: Mapping[str, object] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    reduced: bool = False


MARKOV = {"markov-rank": 32}
DRAFTS = {
    # The library writes `sliding_window_non_causal: false` by default, by which vLLM would run full layers causally.
    "dflash": Made("dflash", 8, switches=("sliding-window-non-causal",)),
    "dflash-sliding": Made("dflash", 8, layer_types=(SLIDING, FULL)),
    "dspark": Made("dspark", 7, mlp=128, arguments=MARKOV),
    "dspark-fill-in": Made("dspark", 8, mlp=128, arguments=MARKOV, switches=("no-sample-from-anchor",)),
    "dspark-reduced": Made("dspark", 7, mlp=128, arguments=MARKOV, reduced=True),
    "dflash2": Made("dflash2", 8, mlp=128, arguments={"selector-rank": 32, "selector-top-k": 8}),
}


class Training:
    """Everything in one folder; each method makes what is not there yet."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.work: Path = options.work.resolve()
        self.data = self.work / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        self.target = AutoConfig.from_pretrained(zoo.path("target"))
        samples_of_draftkit = self.data / "samples-of-draftkit.jsonl"
        if not samples_of_draftkit.exists():
            write_training_samples(samples_of_draftkit, answers=ANSWERS, seed=SEED, device="cpu")
        finished = self.data / "t2d.npy"
        if not finished.exists():
            samples = read_training_samples(samples_of_draftkit)
            every = range(len(samples))
            states = stored_states(self.data / "states", samples_of_draftkit, TARGET, LAYERS)
            write_speculators_data(self.data, samples, every, states)
            counts = token_counts(samples, every, self.target.vocab_size)
            write_speculators_vocabulary(self.data, choose_vocabulary(counts, DRAFT_VOCABULARY), self.target.vocab_size)

    def draft(self, name: str) -> None:
        out, run = self.work / name, self.work / "runs" / name
        if out.exists():
            return
        run.mkdir(parents=True, exist_ok=True)
        (run / "decoder.json").write_text(json.dumps(self._decoder(DRAFTS[name]), indent=2))
        job = {
            "samples": str(self.data / "samples.jsonl"),
            "data": str(self.data / "data"),
            "arguments": [str(argument) for argument in self._arguments(DRAFTS[name], run)],
            "threads": self.options.threads,
            "device": "cpu",
        }
        run_worker(self.options.speculators_python, "scripts.bench._speculators_train", job, run / "result.json")
        publish(run / "checkpoints" / str(self.options.epochs - 1), out)

    def _decoder(self, made: Made) -> dict[str, object]:
        """The config of the draft's decoder layers: the target's sizes but for the inner width of the MLP."""
        copied = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        return {name: getattr(self.target, name) for name in copied} | {
            "model_type": "qwen3",
            "intermediate_size": made.mlp,
            "num_hidden_layers": len(made.layer_types),
            "layer_types": list(made.layer_types),
            "sliding_window": made.sliding_window,
            "use_sliding_window": SLIDING in made.layer_types,
            "max_position_embeddings": self.target.max_position_embeddings,
            "rope_parameters": self.target.rope_parameters,
            "tie_word_embeddings": False,
        }

    def _arguments(self, made: Made, run: Path) -> Iterator[object]:
        settings: dict[str, object] = {
            **made.arguments,
            "verifier-name-or-path": zoo.path("target"),
            "speculator-type": made.kind,
            "draft-config": run / "decoder.json",
            "block-size": made.block_size,
            "mask-token-id": mask_token(),
            "data-path": self.data / "data",
            "save-path": run / "checkpoints",
            "log-dir": run / "logs",
            "draft-attn-impl": "sdpa",
            "loss-implementation": "eager",
            "hidden-states-dtype": "float32",
            "total-seq-len": self.options.tokens_per_row,
            "max-anchors": self.options.anchors,
            "train-data-ratio": 1 - HELD_OUT,
            "num-workers": 0,
            "on-missing": "raise",
            "optimizer": "adamw",
            "lr": self.options.lr,
            "scheduler-type": "linear",
            "scheduler-warmup-ratio": 0.05,
            "epochs": self.options.epochs,
            "checkpoint-freq": 0.25,
            "seed": 0,
        }
        if made.reduced:
            settings |= {
                "draft-vocab-size": DRAFT_VOCABULARY,
                "d2t-path": self.data / "d2t.npy",
                "t2d-path": self.data / "t2d.npy",
            }
        for name, value in settings.items():
            yield f"--{name}"
            yield value
        yield "--target-layer-ids"
        yield from LAYERS
        yield from (f"--{switch}" for switch in made.switches)


def publish(checkpoint: Path, out: Path) -> None:
    """The library's checkpoint without the state of training, its weights rounded to bfloat16."""
    tensors = load_file(checkpoint / "model.safetensors")
    rounded = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    out.mkdir()
    (out / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, checkpoints and drafts")
    parser.add_argument("--speculators-python", required=True, help="the Python of an environment with speculators 0.9")
    parser.add_argument("--only", choices=DRAFTS, help="train this draft alone")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens-per-row", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64, help="blocks of a row at most")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    training = Training(options)
    for name in DRAFTS:
        if options.only in (None, name):
            training.draft(name)


if __name__ == "__main__":
    main()
