"""Are predictions of `eval --predict` and `eval --advise` right? Predicted against measured on the embedded models.

`python -m scripts.check.predictions [--draft zoo:eagle3] [--prompts 80] [--max-new-tokens 96] [--k 4] [--threads 1]`

One greedy run predicts acceptance lengths at other temperatures, for greedy and sampled drafts, and at other K; each is
then measured. Round times predict speed-ups for K and batch sizes, which are then measured too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

import draftkit
from draftkit.report.terminal.tables import show_speed_model
from draftkit.requests import DraftSampling, DraftSamplingMode
from draftkit.results.cell import Cell
from draftkit.results.metrics import length
from draftkit.results.settings import Settings

TEMPERATURES = (0.3, 0.7, 1.0)
MODES: tuple[DraftSamplingMode, ...] = ("greedy", "probabilistic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="zoo:eagle3")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=160)
    settings = Settings(
        num_speculative_tokens=options.k,
        max_new_tokens=options.max_new_tokens,
        limit=options.prompts,
        concurrency=8,
        ignore_eos=True,
    )
    predict_acceptance(options.draft, settings, console)
    predict_speed(options.draft, settings, console)


def predict_acceptance(draft: str, settings: Settings, console: Console) -> None:
    ks = sorted({1, 2, settings.num_speculative_tokens, 2 * settings.num_speculative_tokens})
    (greedy,) = draftkit.evaluate_draft("zoo:target", [draft], settings, predict=True).cells
    predicted = {
        (p.temperature, p.draft_sampling, p.num_speculative_tokens): p.acceptance_length for p in greedy.predicted or ()
    }
    table = Table("T", "drafts", "K", "predicted", "measured", "off by", title=f"{draft}: acceptance length")
    errors = []
    for temperature in TEMPERATURES:
        for mode in MODES:
            cells = measured(draft, settings, ks, temperature, mode)
            for cell in cells:
                k, interval = cell.num_speculative_tokens, cell.acceptance_length
                assert interval is not None
                said = predicted[temperature, mode, k]
                errors.append(abs(said / interval.mean - 1))
                table.add_row(
                    f"{temperature:g}",
                    mode,
                    str(k) + ("*" if k > settings.num_speculative_tokens else ""),
                    f"{said:.2f}",
                    length(interval),
                    f"{100 * (said / interval.mean - 1):+.0f} %",
                )
    console.print(table)
    console.print(f"off by {100 * fmean(errors):.1f} % on average, {100 * max(errors):.0f} % at most")


def measured(
    draft: str, settings: Settings, ks: Sequence[int], temperature: float, mode: DraftSamplingMode
) -> Sequence[Cell]:
    drawn = replace(settings, draft_sampling=DraftSampling(mode)).sweep(k=ks, temperature=[temperature])
    return draftkit.evaluate_draft("zoo:target", [draft], drawn).cells


def predict_speed(draft: str, settings: Settings, console: Console) -> None:
    sweep = settings.sweep(k=(2, 4, 8), concurrency=(1, 4, 16))
    (model,) = draftkit.evaluate_draft("zoo:target", [draft], sweep, advise=True).speed_models
    show_speed_model(console, model)


if __name__ == "__main__":
    main()
