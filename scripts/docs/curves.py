"""How drafts of SmolLM2 learn: acceptance length by tokens and by processor time, kept, drawn, and as a table.

    python -m scripts.docs.curves [RUN … [--on-gpu]]

takes the validations of training runs into `benchmarks/data/smollm2-curves.jsonl`, in the place of those of runs of the
same name. `scripts/smollm2.py train` makes such runs in its cache's `drafts`. Then it draws all runs that are kept, and
prints their table. Runs may come from several machines, one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from draftkit.report.page.svg import svg_file
from draftkit.report.page.training import by_processor_time, by_tokens, drawn_runs
from draftkit.results.cell import Interval
from draftkit.results.metrics import length
from draftkit.train.log import TrainingCurve, ValidatedStep, read_curve
from scripts._bench import ROOT, arguments

KEPT = ROOT / "benchmarks" / "data" / "smollm2-curves.jsonl"
PICTURES = ROOT / "docs" / "pictures"


def kept(file: Path) -> list[TrainingCurve]:
    """The curves of a file, by the names of their runs."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [
        TrainingCurve(Path(run), tuple(_step(row) for row in steps))
        for run, steps in groupby(rows, key=lambda row: str(row.pop("run")))
    ]


def _step(row: dict[str, Any]) -> ValidatedStep:
    return ValidatedStep(**row | {"length": Interval(**row["length"])})


def keep(curves: Iterable[TrainingCurve], file: Path) -> None:
    """Write curves as `kept` reads them, one validation a line."""
    rows = [{"run": curve.run.name} | asdict(step) for curve in curves for step in curve.steps]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def without_processor_time(curve: TrainingCurve) -> TrainingCurve:
    return replace(curve, steps=tuple(replace(step, processor_seconds=None) for step in curve.steps))


def table(curves: Iterable[TrainingCurve]) -> Iterator[str]:
    """The lines of a table in Markdown: a run in each row, tokens in the columns."""
    runs = {curve.run.name: {round(step.tokens or 0, -4): step for step in curve.steps} for curve in curves}
    columns = sorted({tokens for steps in runs.values() for tokens in steps})
    yield "| run | processor time | " + " | ".join(f"{tokens:,.0f} tokens" for tokens in columns) + " |"
    yield "|---" * (len(columns) + 2) + "|"
    for run, steps in runs.items():
        seconds = max(step.processor_seconds or 0 for step in steps.values())
        cells = [length(steps[tokens].length, 3) if tokens in steps else "" for tokens in columns]
        yield f"| {run} | {f'{seconds:,.0f} s' if seconds else ''} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--on-gpu", action="store_true", help="the runs were on a GPU")
    options = parser.parse_args()
    new = {run.name: read_curve(run.resolve()) for run in options.runs}
    if options.on_gpu:
        new = {name: without_processor_time(curve) for name, curve in new.items()}
    curves = list(({curve.run.name: curve for curve in kept(KEPT)} | new).values())
    if not curves:
        raise SystemExit(f"{KEPT} has no runs yet: name some")
    keep(curves, KEPT)
    drawn = drawn_runs(curves)
    for name, chart in (("tokens", by_tokens(drawn)), ("processor-time", by_processor_time(drawn))):
        if chart is not None:
            (PICTURES / f"smollm2-acceptance-by-{name}.svg").write_bytes(svg_file(chart))
    print("\n".join(table(curves)))


if __name__ == "__main__":
    main()
