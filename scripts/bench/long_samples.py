"""The memory that a step takes with samples of so many tokens, by recipe: the peak of a process over a short one's.

    python -m scripts.bench.long_samples --tokens 2048 4096 8192 16384 --recipes eagle3 dflash

Each line is a process of its own, which trains two steps on one sample of a tiny target (4 layers of 32 numbers), so
that what grows with the tokens is seen beside little else. Divide by the tokens to see whether it grows with them.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

OPTIONS = {
    "eagle3": {"steps": 3, "layers": [0, 1, 2]},
    "dflash": {"block_size": 8, "mask_token_id": 255, "layers": [0, 1]},
}
BASE = 256  # tokens of the sample that the others are compared with


def train(recipe: str, tokens: int) -> None:
    """Train two steps, and print the peak of this process in MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftkit.data.sample_files import write_samples
    from draftkit.data.samples import Sample, SamplesOrigin
    from draftkit.train.config import read_config
    from draftkit.train.run import train_draft

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1 << 16}
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(f"{folder}/target")
        drawn = np.random.default_rng(0).integers(0, 256, tokens, dtype=np.int32)
        samples = [Sample.of(f"row-{number}", drawn, [(tokens // 2, tokens)]) for number in range(2)]
        write_samples(Path(folder, "data.jsonl"), samples, SamplesOrigin("tiny", "0" * 64))
        given = {
            "recipe": recipe, "target": f"{folder}/target", "data": f"{folder}/data.jsonl", "out": f"{folder}/run",
            "tokens_per_row": tokens, "device": "cpu", "options": OPTIONS[recipe], "optimization": {"max_steps": 2},
            "validation": {"share": 0.0},
        }  # fmt: skip
        train_draft(read_config(None, [], given))
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def peak(recipe: str, tokens: int) -> int:
    command = [sys.executable, "-m", "scripts.bench.long_samples", "--train", recipe, str(tokens)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(next(line for line in ran.stdout.splitlines() if line.startswith("peak")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--recipes", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train[0], int(options.train[1]))
        return
    print("| recipe | tokens of the sample | MB | KB a token |", "|---|---|---|---|", sep="\n", flush=True)
    for recipe in options.recipes:
        base = peak(recipe, BASE)
        for tokens in options.tokens:
            more = peak(recipe, tokens) - base
            print(f"| {recipe} | {tokens:,} | {more:,} | {1024 * more / tokens:.0f} |", flush=True)


if __name__ == "__main__":
    main()
