"""Block drafts of the embedded target, trained and saved by the speculators library's own command, on a CPU.

`python -m scripts.zoo.speculators_blocks --work DIR --speculators-python ENV/bin/python [--only NAME] [--epochs 2]`

All drafts read the samples that the embedded drafts are trained on, and the same stored states. DIR/NAME is each draft
as the library publishes it, with weights in bfloat16. Finished drafts are not made again. An interrupted training
continues from its last checkpoint in DIR/runs/NAME. Losses are the library's defaults for each kind.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftkit import zoo
from draftkit.data.sample_files import read_training_samples
from scripts._bench import arguments
from scripts.bench._speculators import CPU, decoder_config, run_speculators, stored_states, write_data
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
    """A draft: the library's name of its kind, its decoder layers, and other arguments (None: a switch).

    `mlp`: inner width of a layer. `reduced`: whether the draft has its own, smaller vocabulary.
    """

    kind: str
    block_size: int
    layer_types: tuple[str, ...] = (FULL, FULL)
    mlp: int = 128
    arguments: Mapping[str, object] = field(default_factory=dict)
    reduced: bool = False


MARKOV = {"markov-rank": 32}
DRAFTS = {
    # The library writes `sliding_window_non_causal: false` by default, by which vLLM would run full layers causally.
    "dflash": Made("dflash", 8, mlp=256, arguments={"sliding-window-non-causal": None}),
    "dflash-sliding": Made("dflash", 8, layer_types=(SLIDING, FULL), mlp=256),
    "dspark": Made("dspark", 7, arguments=MARKOV),
    "dspark-fill-in": Made("dspark", 8, arguments=MARKOV | {"no-sample-from-anchor": None}),
    "dspark-reduced": Made("dspark", 7, arguments=MARKOV, reduced=True),
    "dflash2": Made("dflash2", 8, arguments={"selector-rank": 32, "selector-top-k": 8}),
}


def write_inputs(data: Path) -> None:
    """Samples, states and vocabulary, as far as they are missing."""
    data.mkdir(parents=True, exist_ok=True)
    samples = data / "samples-of-draftkit.jsonl"
    if not samples.exists():
        write_training_samples(samples, answers=ANSWERS, seed=SEED, device="cpu")
    if not (data / "t2d.npy").exists():
        read = read_training_samples(samples)
        every, size = range(len(read)), AutoConfig.from_pretrained(zoo.path("target")).vocab_size
        states = stored_states(data / "states", samples, TARGET, LAYERS)
        write_data(data, read, every, every, states, (DRAFT_VOCABULARY, size))


def train(made: Made, run: Path, data: Path, options: argparse.Namespace) -> None:
    run.mkdir(parents=True, exist_ok=True)
    target = AutoConfig.from_pretrained(zoo.path("target"))
    windows = {"sliding_window": 32, "use_sliding_window": SLIDING in made.layer_types}
    decoder = decoder_config(target, made.layer_types, intermediate_size=made.mlp, **windows)
    (run / "decoder.json").write_text(json.dumps(decoder, indent=2))
    settings: dict[str, object] = {
        **made.arguments,
        **CPU,
        "verifier-name-or-path": zoo.path("target"),
        "speculator-type": made.kind,
        "draft-config": run / "decoder.json",
        "block-size": made.block_size,
        "mask-token-id": mask_token(),
        "data-path": data / "data",
        "save-path": run / "checkpoints",
        "log-dir": run / "logs",
        "total-seq-len": 512,
        "max-anchors": 64,
        "train-data-ratio": 1 - HELD_OUT,
        "num-workers": 0,
        "on-missing": "raise",
        "optimizer": "adamw",
        "lr": 2e-3,
        "scheduler-type": "linear",
        "scheduler-warmup-ratio": 0.05,
        "epochs": options.epochs,
        "checkpoint-freq": 0.25,
        "seed": 0,
    }
    if made.reduced:
        settings |= {
            "draft-vocab-size": DRAFT_VOCABULARY,
            "d2t-path": data / "d2t.npy",
            "t2d-path": data / "t2d.npy",
        }
    python, threads = options.speculators_python, options.threads
    run_speculators(python, data, LAYERS, settings, run / "result.json", threads=threads, device="cpu")


def publish(checkpoint: Path, out: Path) -> None:
    """The library's checkpoint without the state of training, its weights rounded to bfloat16."""
    tensors = load_file(checkpoint / "model.safetensors")
    rounded = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    out.mkdir()
    (out / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, checkpoints and drafts")
    parser.add_argument("--speculators-python", required=True, help="the Python of an environment with speculators 0.9")
    parser.add_argument("--only", choices=DRAFTS, help="train this draft alone")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    work: Path = options.work.resolve()
    write_inputs(work / "data")
    for name, made in DRAFTS.items():
        if options.only in (None, name) and not (work / name).exists():
            run = work / "runs" / name
            train(made, run, work / "data", options)
            publish(run / "checkpoints" / str(options.epochs - 1), work / name)


if __name__ == "__main__":
    main()
