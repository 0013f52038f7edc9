"""`draftkit calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftkit.cli.options import (
    ConcurrencyOption,
    DatasetOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LimitOption,
    NewTokensOption,
    TargetNameOption,
    TrustOption,
    drafts,
    prompts_of,
    settled_dtype,
)
from draftkit.cli.output import console, print_json, prompt_progress, quiet_transformers

if TYPE_CHECKING:
    from draftkit.evaluate.calibrate import Calibration

CHECK = "Checking the best threshold"


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
    times: Annotated[
        Path | None,
        typer.Option(metavar="RESULT", help="A result of eval --advise: tell what thresholds would gain by its times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write page, JSON and the files that SGLang reads, as far as they help, into this folder."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", rich_help_panel=CHECK, help="Run it for real, beside the best fixed K.")
    ] = False,
    target: TargetNameOption = None,
    draft: Annotated[
        str | None, typer.Option(autocompletion=drafts, rich_help_panel=CHECK, help="The draft of the records.")
    ] = None,
    concurrency: ConcurrencyOption = 1,
    prompts: DatasetOption = None,
    limit: LimitOption = None,
    max_new_tokens: NewTokensOption = 128,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge what a draft says of its chances of acceptance. Said against survived by position, temperature and slice;
    decodes nothing but with --check."""
    if check and (target is None or draft is None or times is None):
        raise typer.BadParameter("--check runs the draft: it needs --target, --draft and --times.")
    from draftkit.evaluate.calibrate import calibrate_records

    found = calibrate_records(records, estimate=estimate, times=times)
    written = [] if out is None else _write(out, found)
    checked = []
    if check:
        quiet_transformers()
        from draftkit.evaluate.threshold_check import check_threshold
        from draftkit.results.settings import Settings

        assert target is not None
        assert draft is not None
        settings = Settings(
            prompts=prompts_of(prompts, target), limit=limit, max_new_tokens=max_new_tokens, concurrency=concurrency,
            device=device, dtype=settled_dtype(dtype, device),
        )  # fmt: skip
        with prompt_progress() as on_progress:
            checked = [check_threshold(target, draft, one, settings, on_progress) for one in found]
    if as_json:
        from dataclasses import asdict

        from draftkit.io.jsonfile import finite

        found_json = {"schema": 1, "calibrations": [one.to_dict() for one in found]}
        print_json(finite(found_json | {"checked": [asdict(one) for one in checked]}))
        return
    from draftkit.report.terminal.calibration import show_calibration

    for one in found:
        show_calibration(console(), one)
    for result in checked:
        console().print(result.sentence, style="bold")
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
