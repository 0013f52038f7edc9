"""What `draftkit adapt` regains on a target that was fine-tuned, per 1,000 answers, and what is lost elsewhere.

`python -m scripts.check.adapt --work DIR [--requests 160] [--new-tokens 48] [--tune-steps 80] [--replay synthesized]`

The embedded target is fine-tuned as in `scripts/check/lora.py`. Training questions are the log, as an older target's
server has written it, so that all are answered anew; general prompts are those that the fine-tuned target writes
itself. The old slice is the embedded target as it was, with its own greedy answers to the embedded prompts. Everything
is kept in DIR.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from draftkit import AdaptSettings, adapt_draft, simulate_acceptance
from draftkit.report.terminal.data import adaptation_table
from draftkit.results.metrics import length
from draftkit.results.statistics import gain
from scripts.bench.train import training_questions
from scripts.check.lora import tune_target
from scripts.check.on_policy import judges

DRAFT, OLD_TARGET = "zoo:eagle3", "zoo:target"
K = 4


def write_log(out: Path, requests: int) -> None:
    """Chat records of OpenAI's interface, whose answers are not the target's."""
    records = [
        {
            "request": {"messages": [{"role": "user", "content": text}]},
            "response": {"model": "older", "choices": [{"message": {"role": "assistant", "content": "…"}}]},
        }
        for _, text in training_questions(requests)
    ]
    out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--tune-steps", type=int, default=80)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--replay", default="synthesized")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "target").exists():
        tune_target(work / "target", options.tune_steps, 1e-3, 0)
    log = work / "log.jsonl"
    write_log(log, options.requests)
    began = time.process_time()
    settings = AdaptSettings(
        draft=DRAFT,
        target=str(work / "target"),
        traffic=str(log),
        out=str(work / f"adapted-{options.replay}"),
        replay=options.replay,
        held_out=0.25,
        k=K,
        max_new_tokens=options.new_tokens,
        training=(
            f"optimization.max_steps={options.steps}", f"optimization.lr={options.lr}", "tokens_per_row=1024",
            f"options.steps={K}", f"validation.every={options.steps // 2}",
        ),
    )  # fmt: skip
    adapted = adapt_draft(settings, said=lambda text: print(text, flush=True))
    took = time.process_time() - began
    assert adapted.draft is not None
    console = Console(width=150)
    console.print(adaptation_table(adapted, K))
    traffic = next(found for found in adapted.slices if found.name == "traffic")
    per_thousand = 1000 * traffic.gained.mean / adapted.answers
    old = judges(work)
    before, after = (simulate_acceptance(draft, OLD_TARGET, old, k=K) for draft in (DRAFT, adapted.draft))
    one, other = ([found.sums[n] for n in sorted(before.sums)] for found in (before, after))
    lost = gain(one, other, comparisons=1)
    console.print(f"regained {traffic.gained.mean:+.3f} from {adapted.answers} answers, {per_thousand:+.2f} per 1,000")
    console.print(
        f"the old target, {len(before.sums)} prompts: {length(before.length)} before, {length(after.length)} after, "
        f"{length(lost, signed=True)}"
    )
    console.print(f"{took:.0f} s of one core")


if __name__ == "__main__":
    main()
