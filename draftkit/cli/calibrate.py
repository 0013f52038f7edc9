"""`draftkit calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftkit.cli.options import JsonOption
from draftkit.cli.output import console, print_json

if TYPE_CHECKING:
    from draftkit.evaluate.calibrate import Calibration


def calibrate(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS...", help="Files that eval --records wrote.")],
    estimate: Annotated[
        Literal["head", "draft"] | None,
        typer.Option(
            "--of",
            help="Whose word is judged: the confidence head's, or the draft's own probability of its token; default: "
            "the head's where there is one.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write page, JSON and the files that SGLang reads, as far as they help, into this folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge what a draft says of its chances of acceptance. Said against survived by position, temperature and
    slice."""
    from draftkit.evaluate.calibrate import calibrate_records

    found = calibrate_records(records, estimate=estimate)
    written = [] if out is None else _write(out, found)
    if as_json:
        print_json({"schema": 1, "calibrations": [one.to_dict() for one in found]})
        return
    from draftkit.report.terminal.calibration import show_calibration

    for one in found:
        show_calibration(console(), one)
    for path in written:
        print(path)


def _write(out: Path, found: Sequence[Calibration]) -> list[Path]:
    """Write the folder; what is in it."""
    from draftkit.io.atomic import atomic_folder
    from draftkit.report.page.calibration import calibration_files

    files = calibration_files(found)
    with atomic_folder(out) as folder:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    return [out / name for name in files]
