"""Does the ceiling of a pruned draft vocabulary tell what acceptance becomes? Predicted against measured, size by size.

`python -m scripts.check.pruning [--draft zoo:eagle3]… [--data SAMPLES.jsonl] [--sizes 64,128] [--limit 16]`

Without `--data`, the embedded target first answers training questions, and what it says is counted. The ceiling is that
of a draft without mistakes: on those samples, as the command prints it, and on the very answers that acceptance is
then measured on, greedily, where nothing can be above it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.data.vocabulary import ceiling, token_counts
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import load_prompts
from draftkit.layout.folder import read_draft
from draftkit.loading import load_model
from draftkit.prepare.head import open_head
from draftkit.prepare.prune import Pruning, plan_pruning
from draftkit.results import metrics
from draftkit.results.settings import Settings
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target
from scripts.zoo import _samples as zoo_samples

TARGET = "zoo:target"
K = 4


def write_answers(path: Path, count: int) -> Path:
    """Samples of the target's greedy answers."""
    served = load_tokenizer(TARGET)
    answers = zoo_samples.greedy_answers(served.tokenizer, count, seed=0, device="cpu")
    write_samples(path, answers, SamplesOrigin(TARGET, served.sha256, served.template_sha256))
    return path


def answers_to_prompts(settings: Settings) -> list[Sample]:
    """What the target answers to the prompts that acceptance is measured on."""
    model, tokenizer = load_model(TARGET, device="cpu", dtype=torch.float32)
    asked = Conversations(load_prompts(settings.prompts, settings.limit), tokenizer, settings)
    engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=settings.concurrency)
    return [
        Sample.of(g.request.id, [*g.request.prompt, *g.tokens], [(len(g.request.prompt), g.length)])
        for g in engine.generate(asked.first_requests)
    ]


def check(
    draft: str, data: Path, sizes: Sequence[int], settings: Settings, answers: Sequence[Sample], scratch: Path
) -> Table:
    """A row for each size that is smaller than the draft's, and one for the draft as it is."""
    plan = plan_pruning(draft, data, target=TARGET, k=K, sizes=sizes)
    pruned = [_pruned(plan, data, c.size, scratch) for c in plan.ceilings[:-1]]
    drafts = [draft, *(str(out) for out in pruned)]
    measured = {cell.draft: cell for cell in evaluate_draft(TARGET, drafts, settings).cells}
    table = Table(
        "tokens", "coverage", "ceiling", "ceiling on the answers", "measured", "kept of drafting", "output as without",
        title=f"{draft}: acceptance length at K={K}, {settings.limit} prompts of {settings.max_new_tokens} tokens",
    )  # fmt: skip
    counts = token_counts(answers, range(len(answers)), plan.owner.size)
    whole = measured[draft].acceptance_length
    assert whole is not None
    for predicted, source in zip(plan.ceilings, [*drafts[1:], draft], strict=True):
        ids = open_head(read_draft(Path(source)), plan.owner).ids if source != draft else plan.head.ids
        length = measured[source].acceptance_length
        assert length is not None
        table.add_row(
            f"{predicted.size:,}",
            f"{predicted.coverage:.1%}",
            f"{predicted.acceptance_length:.2f}",
            f"{ceiling(answers, counts, ids, K).acceptance_length:.2f}",
            metrics.length(length),
            f"{(length.mean - 1) / (whole.mean - 1):.0%}",
            "yes" if measured[source].matches_greedy else "NO",
        )
    return table


def _pruned(plan: Pruning, data: Path, size: int, scratch: Path) -> Path:
    out = scratch / plan.name.removeprefix("zoo:").replace("/", "_") / str(size)
    return plan_pruning(plan.name, data, target=TARGET, size=size, sizes=()).write(out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="append")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--sizes", default="64,128,256,512,1024")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = Settings(
        num_speculative_tokens=K,
        max_new_tokens=options.max_new_tokens,
        limit=options.limit,
        concurrency=8,
        device="cpu",
    )
    with TemporaryDirectory() as scratch:
        data = options.data or write_answers(Path(scratch) / "answers.jsonl", options.answers)
        sizes = [int(size) for size in options.sizes.split(",")]
        answers = answers_to_prompts(settings)
        for draft in options.draft or ["zoo:eagle3", "zoo:draft-model"]:
            Console(width=120).print(check(draft, data, sizes, settings, answers, Path(scratch)))


if __name__ == "__main__":
    main()
