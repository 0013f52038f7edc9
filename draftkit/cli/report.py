"""`draftkit report`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftkit.cli.output import counted, refuse_inputs, say_next, say_written
from draftkit.errors import DraftkitError, command

if TYPE_CHECKING:
    from draftkit.report.page.chart import Chart


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...",
            help="Files that eval --json wrote, two to compare; or the OUTs of training runs, side by side.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Also write the figures as SVG files into this folder.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a page that draftkit has not written, or that was edited.")
    ] = False,
) -> None:
    """Show measurements as one HTML page. It needs no network; two results are compared."""
    from draftkit.io.atomic import atomic_file
    from draftkit.io.html import is_as_written
    from draftkit.report.page.figures import all_figures
    from draftkit.report.page.page import page
    from draftkit.report.page.series import join
    from draftkit.results.comparison import compare, summary
    from draftkit.results.record import read_result

    refuse_inputs(out, results)
    if any(path.is_dir() for path in results):
        _report_training(results, out, figures, force)
        return
    read = [read_result(path).named() for path in results]
    series = join(read)
    drawn = all_figures(series)
    with ExitStack() as stack:
        file = stack.enter_context(atomic_file(out, force or is_as_written(out)))
        if figures is not None:
            _write_figures(stack, figures, drawn)
        file.write(page(read, series, drawn).encode())
    cells = sum(len(result.cells) for result in read)
    beside = [] if figures is None else [f"{len(drawn)} figures in {figures}"]
    say_written(out, ", ".join([counted(len(read), "result"), counted(cells, "cell"), *beside]))
    if len(read) == 2:
        print(summary(compare(*read)), file=sys.stderr)
    else:
        for verdict in (verdict for result in read for verdict in result.judged):
            print(verdict.sentence, file=sys.stderr)
    if doubts := sum(len(result.warned) for result in read):
        print(f"{counted(doubts, 'kind')} of doubt about these figures: after the page's summary", file=sys.stderr)
    say_next("push", "DRAFT", "ORG/NAME", "--dry-run", *(word for path in results for word in ("--results", path)))


def _write_figures(stack: ExitStack, out: Path, figures: Mapping[str, Chart]) -> None:
    """Write into a folder that is kept only if the whole command succeeds."""
    from draftkit.io.atomic import atomic_folder
    from draftkit.report.page.figures import figure_files, holds_figures

    folder = stack.enter_context(atomic_folder(out, holds_figures))
    for name, content in figure_files(figures).items():
        (folder / name).write_bytes(content)


def _report_training(runs: list[Path], out: Path, figures: Path | None, force: bool) -> None:
    from draftkit.io.atomic import atomic_file
    from draftkit.io.html import is_as_written
    from draftkit.layout.folder import is_unified
    from draftkit.report.page.training import summary as summary_of_runs
    from draftkit.report.page.training import training_figures, training_page
    from draftkit.train.log import read_curve

    for folder in runs:
        if is_unified(folder):
            measured = sorted((folder / "eval").glob("*.json"))
            measure = command("draftkit", "eval", "--target", "TARGET", "--draft", folder, "--out", "result.json")
            raise DraftkitError(
                "this is the folder of a draft, not of a training run",
                where=folder,
                expected="files that eval --json wrote, or the OUT of a run",
                hint=command("draftkit", "report", *measured) if measured else f"{measure}, and report that file",
            )
    curves = [read_curve(folder) for folder in runs]
    with ExitStack() as stack:
        file = stack.enter_context(atomic_file(out, force or is_as_written(out)))
        if figures is not None:
            _write_figures(stack, figures, training_figures(curves))
        file.write(training_page(curves).encode())
    say_written(out, counted(len(curves), "training run"))
    print(summary_of_runs(curves), file=sys.stderr)
