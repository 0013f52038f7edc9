"""What does a transplant gain? A model with another tokenizer drafts for the embedded target, before and after.

`python -m scripts.check.transplant --work DIR [--steps 200] [--samples FILE] [--vllm-python ENV/bin/python]`

A donor is trained (scripts/zoo/make.py) and drafts with the tokens that it shares with the target. `prepare transplant`
gives it the target's tokenizer, and the recipe `draft-model` distils it on the target's answers and source text. A new
model of the same size is trained with the same data, steps and settings, to show what the transplant is worth. With
`--vllm-python` the drafts that have the target's tokenizer run in vLLM too: tokens, proposals and counts must be the
same, else the exit code is 1. Every stage is kept in DIR, so that a run can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from scripts.check.lora import draftkit
from scripts.check.vllm import Comparison
from scripts.zoo import _corpus as zoo_corpus
from scripts.zoo._samples import TARGET, write_training_samples
from scripts.zoo.make import SEED, make_donor

K = 4
# Those of the zoo's drafts. A step's 2048 tokens are in four rows: attention over shorter ones is cheaper.
SETTINGS = (
    "optimization.warmup=0.05",
    "optimization.weight_decay=0.1",
    "optimization.clip=1.0",
    "optimization.precision=float32",
    "optimization.accumulation=4",
    "tokens_per_row=512",
    "target_dtype=float32",
    "device=cpu",
    "validation.share=0.0",
    "log_every=20",
    "save_every=50",
)
# The recipe's names for the sizes of a new draft, and a config's.
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
}


def write_held_out(out: Path) -> None:
    """Text that neither model has seen."""
    texts = (zoo_corpus.read(path) for path in zoo_corpus.source_files() if zoo_corpus.is_held_out(path))
    out.write_text("".join(texts), encoding="utf-8")


def sizes_of(model: Path) -> list[str]:
    """The settings that make a new draft as large as a model."""
    config = json.loads((model / "config.json").read_text())
    return [f"options.{option}={config[key]}" for option, key in SIZES.items()]


def train(out: Path, samples: Path, steps: int, lr: float, *arguments: str, settings: Sequence[str] = ()) -> Path:
    """Train with the zoo's settings, or go on with it; returns the draft."""
    draft = out / "draft"
    if not draft.exists():
        given = (f"optimization.max_steps={steps}", f"optimization.lr={lr}", *SETTINGS, *settings)
        where = ("--recipe", "draft-model", "--target", TARGET, "--data", samples, "--out", out, "--resume")
        draftkit("train", *where, *arguments, *(part for setting in given for part in ("--set", setting)))
    return draft


def acceptance_table(drafts: dict[str, Path], prompts: int, title: str) -> Table:
    """One run for all drafts, so that their speeds compare."""
    sources = [part for draft in drafts.values() for part in ("--draft", draft)]
    asked = ("--k", K, "--limit", prompts, "--concurrency", 8, "--device", "cpu", "--json")
    result = json.loads(draftkit("eval", "--target", TARGET, *sources, *asked))
    cells = {cell["draft"]: cell for cell in result["cells"]}
    table = Table("draft", "acceptance length", f"accepted at 1…{K}", "tokens/s", "without", title=title)
    for name, draft in drafts.items():
        cell = cells[str(draft)]
        length = "{mean:.3f} [{low:.3f}, {high:.3f}]".format(**cell["acceptance_length"])
        positions = " ".join(f"{rate:.3f}" for rate in cell["acceptance_per_pos"])
        speeds = (f"{cell[key]:.0f}" for key in ("tokens_per_second", "baseline_tokens_per_second"))
        table.add_row(name, length.replace("[", r"\["), positions, *speeds)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--samples", type=Path, help="samples of the target; default: they are made")
    parser.add_argument("--answers", type=int, default=1200, help="answers of the target to make samples of")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    donor, transplanted, held_out = work / "donor", work / "transplanted", work / "held-out.txt"
    if not (donor / "config.json").exists():
        make_donor("cpu", donor)
    if not held_out.exists():
        write_held_out(held_out)
    where = ("prepare", "transplant", donor, "--tokenizer-of", TARGET, "--out", transplanted, "--corpus", held_out)
    print(draftkit(*where, "--force"), flush=True)
    samples: Path = options.samples or work / "samples.jsonl"
    if not samples.exists():
        write_training_samples(samples, answers=options.answers, seed=SEED, device="cpu")
    budget = (samples, options.steps, options.lr)
    drafts = {
        "before surgery: shared tokens": donor,
        "after surgery": transplanted,
        "after distillation": train(work / "distilled", *budget, "--draft", str(transplanted)),
        "control: new, same training": train(work / "control", *budget, settings=sizes_of(transplanted)),
    }
    title = f"a model with another tokenizer drafts for {TARGET}, {options.steps} steps of distillation"
    Console(width=120).print(acceptance_table(drafts, options.prompts, title))
    if options.vllm_python:
        comparison = Comparison(
            argparse.Namespace(vllm_python=options.vllm_python, prompts=8, k=K, max_new_tokens=128, only="")
        )
        for name in ("after surgery", "after distillation"):
            comparison.add_draft(name, drafts[name])
        Console(width=180).print(comparison.table)
        sys.exit(1 if comparison.differences else 0)


if __name__ == "__main__":
    main()
