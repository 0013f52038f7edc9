"""Does counting rejected drafts more (`train --on-policy`) train better than going on as before, at equal compute?

`python -m scripts.check.on_policy --work DIR [--draft zoo:eagle3] [--seconds 40] [--seeds 3] [--weight 4]
[--rounds decoded simulated]`

Needs DIR/samples.jsonl, the embedded target's own greedy answers, prepared. From a trained draft, each way of going on
gets the same processor time of steps: how many steps that are is found by a short run of each. All drafts are judged by
simulated rounds over the target's greedy answers to the 80 embedded prompts, which at temperature 0 is what decoding
measures, round for round. Lengths are over all seeds; intervals resample prompts, the same ones on both sides of a
difference. Results are kept in DIR and not measured again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from draftkit import zoo
from draftkit.data.loss_mask import Renderer
from draftkit.data.prepare import prepare
from draftkit.data.regenerate import regenerate
from draftkit.data.responses import EngineResponder, ResponseFile, Sampling
from draftkit.data.rows import read_rows
from draftkit.data.tokenizer import load_tokenizer
from draftkit.layout.folder import read_draft
from draftkit.loading import load_model, open_draft
from draftkit.requests import SamplingParameters
from draftkit.results.statistics import gain, length_over_prompts
from draftkit.train.config import TrainConfig
from draftkit.train.run import train_draft
from draftkit.train.settings import OnPolicy, Optimization, Validation
from draftkit.train.tuner import recipe_of, simulate_acceptance

TARGET = "zoo:target"
K = 4
NEW_TOKENS = 96
TRIED = 12  # steps of the run that finds out how long one takes
COLD = 2  # of them that do not count
AS_BEFORE = "as before"


class Clock(TrainerCallback):
    """The processor time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.process_time())


def judges(work: Path) -> Path:
    """The target's greedy answers to the embedded prompts."""
    out = work / "judges.jsonl"
    if not out.exists():
        served = load_tokenizer(TARGET)
        renderer = Renderer(served)
        model, _ = load_model(TARGET, device="cpu", dtype=torch.float32)
        responder = EngineResponder(model, Sampling(SamplingParameters(), NEW_TOKENS, served.end_ids), 16)
        answers = ResponseFile(work / "judges-answers.jsonl", {"tokenizer_sha256": served.sha256})
        regenerate(read_rows(str(zoo.prompts_path())), renderer, responder, answers)
        prepare(read_rows(str(answers.path)), renderer, out)
    return out


def train(options: argparse.Namespace, way: OnPolicy | None, steps: int, seed: int) -> tuple[Path, list[float]]:
    out = options.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    with open_draft(options.draft, TARGET) as draft:
        recipe = recipe_of(draft.spec.method)
    clock = Clock()
    config = TrainConfig(
        recipe=recipe,
        target=TARGET,
        data=str(options.work / "samples.jsonl"),
        out=str(out),
        draft=options.draft,
        seed=seed,
        tokens_per_row=1024,
        on_policy=way,
        options={"steps": K} if recipe == "eagle3" else {},
        optimization=Optimization(lr=options.lr, max_steps=steps, warmup=0.05),
        validation=Validation(share=0.0, k=K),
    )
    trained = train_draft(config, callbacks=(clock,))
    assert trained.draft is not None
    return trained.draft, clock.ends


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--draft", default="zoo:eagle3")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--weight", type=float, default=4.0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--rounds", nargs="+", choices=("decoded", "simulated"), default=["decoded", "simulated"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    held_out = judges(options.work)
    share, weight = options.share, options.weight
    ways = {AS_BEFORE: None} | {
        f"on-policy, {rounds}": OnPolicy(share=share, weight=weight, rounds=rounds) for rounds in options.rounds
    }
    kept = options.work / f"{options.draft.strip('/').replace('/', '-').replace(':', '-')}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}

    def once(name: str, measure: Any) -> Any:
        if name not in found:
            found[name] = measure()
            kept.write_text(json.dumps(found))
        return found[name]

    def seconds_of_step(way: OnPolicy | None) -> float:
        ends = train(options, way, TRIED, seed=99)[1]
        return (ends[-1] - ends[COLD - 1]) / (TRIED - COLD)

    def judged(draft: str | Path) -> list[tuple[int, int]]:
        found = simulate_acceptance(draft, TARGET, held_out, k=K)
        return [found.sums[number] for number in sorted(found.sums)]

    def trained(way: OnPolicy | None, steps: int, seed: int) -> dict[str, Any]:
        draft, ends = train(options, way, steps, seed)
        assert read_draft(draft)
        took = (ends[-1] - ends[0]) * len(ends) / (len(ends) - 1)
        return {"seconds": took, "steps": steps, "sums": judged(draft)}

    before = once("before", lambda: judged(options.draft))
    runs: dict[str, list[dict[str, Any]]] = {}
    times = {name: once(f"time, {name}", lambda way=way: seconds_of_step(way)) for name, way in ways.items()}
    for seed in range(options.seeds):  # seed by seed, so that what is there can be compared
        for name, way in ways.items():
            steps = max(round(options.seconds / times[name]), 1)
            measure = lambda way=way, steps=steps, seed=seed: trained(way, steps, seed)  # noqa: E731
            runs.setdefault(name, []).append(once(f"{name}, seed {seed}", measure))

    table = Table(
        "way", "steps", "CPU s", "acceptance length", "of each seed", "against going on as before",
        title=f"{options.draft} on {TARGET}, K={K}, T=0, {options.seeds} seeds, weight {options.weight:g}",
    )  # fmt: skip
    length = length_over_prompts(before)
    table.add_row("the draft as it was", "0", "", f"{length.mean:.3f} [{length.low:.3f}, {length.high:.3f}]", "", "")
    pooled = {name: pool([run["sums"] for run in of]) for name, of in runs.items()}
    for name, of in runs.items():
        length = length_over_prompts(pooled[name])
        each = ", ".join(f"{length_over_prompts(run['sums']).mean:.3f}" for run in of)
        won = gain(pooled[AS_BEFORE], pooled[name], comparisons=1)
        table.add_row(
            name, str(of[0]["steps"]), f"{sum(run['seconds'] for run in of) / len(of):.0f}",
            f"{length.mean:.3f} [{length.low:.3f}, {length.high:.3f}]", each,
            "" if name == AS_BEFORE else f"{won.mean:+.3f} [{won.low:+.3f}, {won.high:+.3f}]",
        )  # fmt: skip
    Console(width=150).print(table)


def pool(seeds: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, int]]:
    """The sums over all seeds, for each prompt."""
    return [(sum(s[0] for s in sums), sum(s[1] for s in sums)) for sums in zip(*seeds, strict=True)]


if __name__ == "__main__":
    main()
