"""How much of full training's gain do adapters keep? The zoo's EAGLE-3 for a target that has been fine-tuned.

`python -m scripts.check.lora --work DIR [--tune-steps 80] [--steps 150] [--lora r=64,alpha=128]`

The embedded target is fine-tuned on the same sources with other words and tabs. Its own greedy answers to training
questions train the draft, all of it and as adapters, with the same data, steps and settings but the learning rate. What
each accepts on held-out prompts is compared with the draft as it was; the goal is 80 % of the gain. Every stage is kept
in DIR, so that a run can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftkit import zoo
from scripts.bench.train import training_questions
from scripts.zoo import _corpus as zoo_corpus
from scripts.zoo import _lm as zoo_lm

WORDS = {"self": "this", "None": "null", "return": "give", "    ": "\t", "import": "use"}
BATCH = 8


def other_words(text: str) -> str:
    for old, new in WORDS.items():
        text = text.replace(old, new)
    return text


def tune_target(out: Path, steps: int, lr: float, seed: int) -> None:
    """Fine-tune the embedded target."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("target"))
    model = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.float32)
    texts = zoo_corpus.training_texts(zoo_lm.chat_text(tokenizer), random.Random(seed))[:4000]
    rows = tokenizer.backend_tokenizer.encode_batch_fast([other_words(text) for text in texts])
    stream = torch.tensor([token for row in rows for token in row.ids])
    optimizer = zoo_lm.adamw(list(model.parameters()), lr)
    for step, tokens in enumerate(zoo_lm.windows(stream, BATCH, zoo_lm.WINDOW, seed)):
        if step >= steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * zoo_lm.cosine_schedule(step / steps)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"target, step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def draftkit(*arguments: object) -> str:
    """The output of a `draftkit` command."""
    command = [sys.executable, "-m", "draftkit", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def acceptance(target: Path, draft: Path | str) -> dict[str, float]:
    result = draftkit("eval", "--target", target, "--draft", draft, "--concurrency", 8, "--json")
    return json.loads(result)["cells"][0]["acceptance_length"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tune-steps", type=int, default=80)
    parser.add_argument("--tune-lr", type=float, default=1e-3)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora", default="r=64,alpha=128")
    parser.add_argument("--lora-lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    target, answers, samples = work / "target", work / "answers.jsonl", work / "samples.jsonl"
    if not target.exists():
        tune_target(target, options.tune_steps, options.tune_lr, options.seed)
    if not samples.exists():
        prompts = work / "prompts.jsonl"
        rows = [json.dumps({"id": f"q{i}", "prompt": text}) for i, text in training_questions(options.prompts)]
        prompts.write_text("\n".join(rows) + "\n", encoding="utf-8")
        regenerate = ("data", "regenerate", prompts, answers, "--target", target)
        draftkit(*regenerate, "--max-new-tokens", 96, "--concurrency", 16)
        draftkit("data", "prepare", answers, samples, "--target", target)
    lengths = {"as it was": acceptance(target, "zoo:eagle3")}
    runs = {"full": (options.lr, ()), f"LoRA {options.lora}": (options.lora_lr, ("--lora", options.lora))}
    for name, (lr, flags) in runs.items():
        out = work / name.replace(" ", "-").replace(",", "-").replace("=", "")
        if not (out / "draft").exists():
            where = ("--recipe", "eagle3", "--target", target, "--data", samples, "--out", out)
            settings = (f"optimization.max_steps={options.steps}", f"optimization.lr={lr}", "tokens_per_row=1024")
            chosen = (part for setting in settings for part in ("--set", setting))
            draftkit("train", *where, "--draft", "zoo:eagle3", *chosen, *flags)
        lengths[name] = acceptance(target, out / "draft")
    before, full, lora = (length["mean"] for length in lengths.values())
    table = Table(
        "draft", "acceptance length", title=f"zoo:eagle3 on a fine-tuned zoo:target, {options.steps} steps, K=4"
    )
    for name, length in lengths.items():
        table.add_row(name, f"{length['mean']:.3f} [{length['low']:.3f}, {length['high']:.3f}]")
    table.add_row("share of full training's gain", f"{100 * (lora - before) / (full - before):.0f} %")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
