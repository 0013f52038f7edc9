"""What does training a target's own head for several steps (`train --recipe mtp`) gain, on a hybrid target?

`python -m scripts.check.mtp --work DIR [--seeds 3] [--steps 120] [--ways unrolled one-step]`

The target (`parts/mtp_hybrid.py`) comes with a head that was trained for one step ahead; serving uses it for K of them.
It is trained on the target's own greedy answers to questions of the training files. Judged by decoding the embedded
prompts, which neither was trained on, greedily: the share of rounds in which the drafts at 1, 2 and 3 were accepted.
Shares are over all seeds; intervals resample prompts, the same ones on both sides of a difference, and hold for the
positions together. `--ways`: K unrolled steps (FastMTP), and for comparison one step, as the head was made; both learn
the target's distribution. Everything is kept in DIR and not made again; what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from draftkit.convert.api import convert_checkpoint
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter, load_model
from draftkit.requests import Request
from draftkit.results.statistics import gain, is_looping, mean_length, repetition
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target
from draftkit.train.config import TrainConfig
from draftkit.train.run import train_draft
from draftkit.train.settings import Optimization, Validation
from scripts.check.parts.mtp_hybrid import train_hybrid
from scripts.zoo._samples import questions

K = 3
SEED = 20261122
SLOTS = 32
BEFORE = "as it came with the target"
WAYS: dict[str, dict[str, Any]] = {
    "unrolled": {"steps": K},
    "one-step": {"steps": 1},
}
Counts = list[list[int]]  # of each prompt: rounds, and those in which the draft at 1, 2, … was accepted


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def write_answers(model: PreTrainedModel, target: Path, out: Path, count: int, new_tokens: int) -> None:
    """The target's greedy answers to questions of the training files; the answers alone are in the loss mask."""
    served = load_tokenizer(str(target))
    prompts = islice(questions(served.tokenizer, SEED), count)
    requests = [Request(f"answer-{n}", tuple(prompt), new_tokens) for n, prompt in enumerate(prompts)]
    engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=SLOTS)
    samples = []
    for g in engine.generate(requests):
        tokens = [*g.request.prompt, *g.tokens]
        samples.append(Sample.of(g.request.id, tokens, [(len(g.request.prompt), len(tokens))]))
    write_samples(out, samples, SamplesOrigin(str(target), served.sha256, served.template_sha256))


def decoded(model: PreTrainedModel, target: Path, draft: Path, new_tokens: int) -> dict[str, Any]:
    """What decoding the embedded prompts with a draft accepts, and the texts."""
    tokenizer = load_tokenizer(str(target)).tokenizer
    encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", None)]
    drafter = load_drafter(read_draft(draft), model)
    engine = Engine(Target(model, drafter.aux_layers), drafter, num_speculative_tokens=K, num_slots=SLOTS)
    counts, texts = {}, {}
    for g in engine.generate([Request(str(n), prompt, new_tokens) for n, prompt in enumerate(encoded)]):
        hits = [r.accepted for r in g.rounds if r.drafted]
        counts[int(g.request.id)] = [len(hits), *(sum(hit > position for hit in hits) for position in range(K))]
        texts[int(g.request.id)] = list(g.tokens)
    return {"counts": [counts[n] for n in sorted(counts)], "texts": [texts[n] for n in sorted(texts)]}


def trained(options: argparse.Namespace, target: Path, way: str, seed: int) -> tuple[Path, float]:
    """The head after training, and the processor time that this took."""
    config = TrainConfig(
        recipe="mtp",
        target=str(target),
        data=str(options.work / "samples.jsonl"),
        out=str(options.work / f"{way}-{seed}"),
        seed=seed,
        tokens_per_row=1024,
        save_every=40,
        device="cpu",
        optimization=Optimization(lr=options.lr, max_steps=options.steps, warmup=0.05, precision="float32"),
        validation=Validation(share=0.0),
        options=WAYS[way],
    )
    began = cpu_seconds()
    draft = train_draft(config, resume=any((options.work / f"{way}-{seed}").glob("checkpoint-*"))).draft
    assert draft is not None
    return draft, cpu_seconds() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target-steps", type=int, default=200, help="of the target's training, 2,048 tokens each")
    parser.add_argument("--answers", type=int, default=480)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of the head's training, 1,024 tokens each")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    target, head, samples = (options.work / name for name in ("target", "head", "samples.jsonl"))
    train_hybrid(target, steps=options.target_steps, batch=4, lr=2e-3, seed=SEED)
    model, _ = load_model(str(target), device="cpu", dtype=torch.float32)
    if not head.exists():
        convert_checkpoint(str(target), head, format="mtp")
    if not samples.exists():
        write_answers(model, target, samples, options.answers, options.new_tokens)
    kept = options.work / "found.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}

    def once(name: str, measure: Callable[[], dict[str, Any]]) -> Any:
        if name not in found:
            found[name] = measure()
            kept.write_text(json.dumps(found))
        return found[name]

    def run(way: str, seed: int) -> dict[str, Any]:
        draft, seconds = trained(options, target, way, seed)
        return decoded(model, target, draft, options.new_tokens) | {"seconds": seconds}

    before = once(BEFORE, lambda: decoded(model, target, head, options.new_tokens))
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for seed in range(options.seeds):  # seed by seed, so that what is there can be compared
        for way in options.ways:
            runs[way].append(once(f"{way}, seed {seed}", partial(run, way, seed)))
            show(before, runs, options)


def show(before: dict[str, Any], runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    """All prompts together, and those alone whose texts do not go round in a loop, which is easily drafted."""
    everyone = range(len(before["texts"]))
    lively = [n for n in everyone if not is_looping(repetition(before["texts"][n]))]
    accepted = (f"accepted at {position + 1}" for position in range(K))
    table = Table(
        "head", "seeds", "CPU s of a run", "prompts", *accepted, "acceptance length", "texts",
        title=f"K={K}, T=0, {options.steps} steps",
    )  # fmt: skip
    for chosen in (everyone, lively):
        own = [before["counts"][n] for n in chosen]
        table.add_row(BEFORE, "", "", str(len(own)), *shares(own), "")
        pooled: dict[str, Counts] = {}
        for way, of in runs.items():
            if not of:
                continue
            each = [[one["counts"][n] for one in of] for n in chosen]
            pooled[way] = [[sum(numbers) for numbers in zip(*prompt, strict=True)] for prompt in each]
            seconds = f"{sum(one['seconds'] for one in of) / len(of):.0f}"
            found = map(": ".join, zip(shares(pooled[way]), gains(own, pooled[way]), strict=True))
            same = all(one["texts"] == before["texts"] for one in of)
            table.add_row(way, str(len(of)), seconds, str(len(own)), *found, "the same" if same else "DIFFER")
        for one, other in combinations(pooled, 2):
            table.add_row(f"{one} against {other}", "", "", str(len(own)), *gains(pooled[other], pooled[one]), "")
    Console(width=240).print(table)


def shares(counts: Counts) -> list[str]:
    """The shares of rounds in which each draft was accepted, and the acceptance length."""
    accepted = [mean_length(column(counts, at)) - 1 for at in range(1, K + 1)]
    return [f"{number:.3f}" for number in (*accepted, mean_length(lengths(counts)))]


def gains(before: Counts, after: Counts) -> list[str]:
    """What each of them has gained."""
    accepted = [gain(column(before, at), column(after, at), comparisons=K) for at in range(1, K + 1)]
    length = gain(lengths(before), lengths(after), comparisons=1)
    return [f"{won.mean:+.3f} [{won.low:+.3f}, {won.high:+.3f}]" for won in (*accepted, length)]


def column(counts: Counts, at: int) -> list[tuple[int, int]]:
    return [(prompt[at], prompt[0]) for prompt in counts]


def lengths(counts: Counts) -> list[tuple[int, int]]:
    return [(sum(prompt[1:]), prompt[0]) for prompt in counts]


if __name__ == "__main__":
    main()
