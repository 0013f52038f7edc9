"""`draftkit gate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftkit.cli.options import (
    OUTPUT,
    DeviceOption,
    DraftsOption,
    EngineOption,
    JsonOption,
    ServerOption,
    TargetNameOption,
    TrustOption,
    VllmPythonOption,
)
from draftkit.cli.output import console, print_json, prompt_progress, quiet_transformers, refuse_inputs
from draftkit.errors import DraftkitError, SettingError

if TYPE_CHECKING:
    from draftkit.results.gate import Gate
    from draftkit.results.record import Result


def gate(
    against: Annotated[
        Path,
        typer.Option(metavar="OLD", help="The result that it is held against."),
    ],
    new: Annotated[
        Path | None, typer.Argument(metavar="NEW", help="A result of draftkit eval; without it, one is measured.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="The loss of length that nobody minds, as a share.")] = 0.02,
    undecided: Annotated[
        Literal["report", "pass", "fail"],
        typer.Option(help="Where these prompts cannot tell: exit with 4 (report), 0 (pass) or 3 (fail)."),
    ] = "report",
    target: TargetNameOption = None,
    draft: DraftsOption = None,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    engine: EngineOption = None,
    vllm_python: VllmPythonOption = None,
    server: ServerOption = None,
    out: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Keep what was measured in this JSON file.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write the verdict as JUnit XML.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=OUTPUT,
            help="Append the verdict as Markdown, as to $GITHUB_STEP_SUMMARY.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a draft accepts less than it did. Exit code 0: not worse than the tolerance; 3: worse; 4: these
    prompts cannot tell."""
    measured = [target, draft, engine, vllm_python, server, device, out]
    if new is not None and any(measured):
        raise typer.BadParameter("NEW is measured already: leave out --target, --draft, --server and what they need.")
    if not 0 <= tolerance < 1:
        raise SettingError(f"tolerance is {tolerance:g}", "tolerance", expected="a share, from 0 to below 1")
    from draftkit.results.matching import gate_results
    from draftkit.results.record import read_result

    for path in (junit, summary):
        if path is not None:
            refuse_inputs(path, [against] if new is None else [new, against])
    if new is not None:
        result = read_result(new).named()
    else:
        result = _measured(against, target, draft or [], device, engine, vllm_python, server, out)
    found = gate_results(result, read_result(against).named(), tolerance)
    _show(found, as_json)
    _write(found, undecided, junit, summary)
    if code := found.exit_code(undecided):
        raise typer.Exit(code)


def _measured(
    against: Path,
    target: str | None,
    drafts: list[str],
    device: str | None,
    engine: str | None,
    vllm_python: str | None,
    server: str | None,
    out: Path | None,
) -> Result:
    """A new result, measured as the one in a file was."""
    from draftkit.evaluate.again import settings_again
    from draftkit.evaluate.engines import engine_class
    from draftkit.results.record import read_result
    from draftkit.results.saved import ResultFile

    sweep = settings_again(read_result(against), against.parent, device)
    name = engine or ("server" if server else "vllm" if vllm_python else None)
    values = {"server": server, "one_by_one": True} if server else {"vllm_python": vllm_python} if vllm_python else {}
    if (target is None or not drafts) and not server:
        missing = "--target" if target is None else "--draft"
        raise typer.BadParameter(f"Missing option '{missing}' (or NEW, or --server).")
    quiet_transformers()
    engines = [] if name is None else [engine_class(name).of(values, out)]
    saved = None if out is None else ResultFile(out, resume=False)
    from draftkit.evaluate.evaluate import evaluate_draft

    with prompt_progress() as on_progress:
        found = evaluate_draft(target, drafts, sweep, on_progress, engines=engines, saved=saved, weigh=not server)
    return found.named() if out is None else read_result(out).named()


def _show(found: Gate, as_json: bool) -> None:
    if as_json:
        print_json(found.to_dict())
        return
    shown = console()
    if len(found.cells) > 1:
        alike = sum(cell.judgement.verdict == found.verdict for cell in found.cells)
        shown.print(f"{found.verdict}: {alike} of {len(found.cells)} settings", style="bold")
    for cell in found.cells:
        shown.print(cell.sentence, style="bold" if len(found.cells) == 1 else "")
    for note in (*found.notes, found.nightly):
        shown.print(f"note: {note}")


def _write(
    found: Gate,
    undecided: Literal["report", "pass", "fail"],
    junit: Path | None,
    summary: Path | None,
) -> None:
    from draftkit.io.atomic import write_file
    from draftkit.report.ci import junit_xml, markdown_summary

    if junit is not None:
        write_file(junit, junit_xml(found, undecided).encode())
    if summary is not None:
        try:
            with summary.open("a", encoding="utf-8") as file:
                file.write(markdown_summary(found))
        except OSError as error:
            raise DraftkitError(f"the summary cannot be written: {error.strerror}", where=summary) from error
