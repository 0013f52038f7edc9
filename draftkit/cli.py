"""The command line: parse, call the public API, render.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 known failure, 2 usage, 3 measured but below the
required acceptance length, 130 interrupted. DRAFTKIT_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftkit.errors import DraftkitError
from draftkit.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from draftkit.convert.api import Conversion
    from draftkit.evaluate.evaluate import Progress
    from draftkit.layout.folder import Draft

app = typer.Typer(
    help="Convert, measure and explain draft models for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SourceArgument = Annotated[str, typer.Argument(help="A folder, org/name[@revision], hf://org/name or zoo:NAME.")]
TargetOption = Annotated[
    str | None, typer.Option(help="The target model: a folder, org/name[@revision] or zoo:target.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")]


@app.command()
def convert(
    source: SourceArgument,
    out: Annotated[
        Path | None, typer.Argument(help="The folder to write; default: the source's name-draftkit.")
    ] = None,
    target: TargetOption = None,
    revision: RevisionOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a draft checkpoint into the unified layout."""
    from draftkit.convert.api import default_output, plan_conversion

    conversion = plan_conversion(source, target=target, revision=revision)
    if dry_run:
        _show_plan(conversion, as_json)
        return
    out = out or default_output(conversion)
    with _byte_progress(conversion.output_bytes) as on_bytes:
        draft = conversion.write(out, force=force, on_bytes=on_bytes)
    if as_json:
        _print_json({"out": str(out), **_plan_json(conversion)})
        return
    _report_conversion(conversion, draft)


@app.command()
def inspect(
    source: SourceArgument, target: TargetOption = None, revision: RevisionOption = None, as_json: JsonOption = False
) -> None:
    """Show what a checkpoint is: format, tensors, and every fact that is stated, assumed or missing."""
    from draftkit.convert.api import Conversion, inspect_checkpoint
    from draftkit.report.tables import show_draft

    found = inspect_checkpoint(source, target=target, revision=revision)
    if isinstance(found, Conversion):
        _show_plan(found, as_json)
    elif as_json:
        _print_json(_draft_json(found))
    else:
        show_draft(_console(), found)


@app.command()
def formats() -> None:
    """List the checkpoint formats that can be read."""
    from draftkit.report.tables import formats_table

    _console().print(formats_table())


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Option(help="The target model: a folder, org/name[@revision] or zoo:target.")],
    draft: Annotated[list[str], typer.Option(help="A draft of any known format; repeat to compare several.")],
    k: Annotated[int, typer.Option("--k", min=1, max=16, help="Draft tokens a round (num_speculative_tokens).")] = 4,
    prompts: Annotated[
        str, typer.Option(help="zoo (bundled), or a JSONL file with turns, messages or prompt.")
    ] = "zoo",
    limit: Annotated[int | None, typer.Option(min=1, help="Use this many prompts, spread over the file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate per prompt, at most.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: bfloat16 on a GPU, float32 on the CPU."),
    ] = None,
    min_acceptance_length: Annotated[
        float | None, typer.Option(help="Exit with code 3 when a draft's acceptance length is lower.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure drafts against their target at temperature 0: acceptance length, speed, equality with plain decoding."""
    _quiet_transformers()
    from draftkit.evaluate.evaluate import Settings, evaluate_draft
    from draftkit.report.tables import evaluation_table

    settings = Settings(
        num_speculative_tokens=k,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        prompts=prompts,
        limit=limit,
        device=device,
        dtype=dtype,
    )
    with _prompt_progress() as on_progress:
        result: dict[str, Any] = evaluate_draft(target, draft, settings, on_progress)
    if as_json:
        _print_json(result)
    else:
        _console().print(evaluation_table(result))
    if min_acceptance_length is not None:
        _require_acceptance(result, min_acceptance_length)


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `draftkit` command."""
    try:
        app()
    except DraftkitError as error:
        if os.environ.get("DRAFTKIT_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _require_acceptance(result: dict[str, Any], floor: float) -> None:
    for cell in result["cells"]:
        measured = cell["acceptance_length"]["mean"]
        if not measured >= floor:
            print(f"{cell['draft']}: acceptance length {measured:.2f} is below {floor:g}", file=sys.stderr)
            raise typer.Exit(3)


def _report_conversion(conversion: Conversion, draft: Draft) -> None:
    """What was written, what had to be assumed, and the next command."""
    from draftkit.layout.config import refusal_by_vllm
    from draftkit.report.tables import facts_table

    plan, source = conversion.plan, conversion.checkpoint.source
    console = _console()
    console.print(f"{source.name} ({plan.format}) → {draft.path}: {draft.spec.method}, {len(draft.tensors)} tensors")
    assumed = [fact for fact in plan.facts if fact.origin != "stated"]
    console.print(facts_table(assumed, "facts that the config does not state"))
    if reason := refusal_by_vllm(draft.spec):
        console.print(
            f"vLLM would run this draft wrongly ({reason}), so the folder is marked: vLLM refuses to load it."
        )
    target = conversion.target.name if conversion.target else "TARGET"
    print(f"next: draftkit eval --target {target} --draft {draft.path}", file=sys.stderr)


def _show_plan(conversion: Conversion, as_json: bool) -> None:
    from draftkit.report.tables import show_conversion

    if as_json:
        _print_json(_plan_json(conversion))
    else:
        show_conversion(_console(), conversion)


def _plan_json(conversion: Conversion) -> dict[str, object]:
    from draftkit.layout.records import to_dict

    plan = conversion.plan
    return {
        "schema": 1,
        "source": conversion.checkpoint.source.name,
        "revision": conversion.checkpoint.source.revision,
        "format": plan.format,
        "spec": plan.spec.to_dict() if plan.spec else None,
        "facts": [to_dict(fact) for fact in plan.facts],
        "missing": [{"fact": fact, "next": hint} for fact, hint in plan.missing],
        "dropped_keys": plan.dropped_keys,
        "moves": [to_dict(move) for move in plan.moves],
    }


def _draft_json(draft: Draft) -> dict[str, object]:
    from draftkit.layout.records import to_dict

    return {
        "schema": 1,
        "source": str(draft.path),
        "format": "unified",
        "spec": draft.spec.to_dict(),
        "provenance": to_dict(draft.provenance),
        "tensors": {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in draft.tensors.items()},
    }


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _console() -> Console:
    """Stdout, text as it is. Off a terminal, tables get the width they need instead of being cut to 80 columns."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, markup=False, emoji=False, width=width)


@contextmanager
def _byte_progress(total: int) -> Iterator[Any]:
    """A bar with bytes and rate on stderr where that is a terminal; yields what to call with each write's size."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("convert", total=total)
        yield lambda size: progress.advance(task, size)


@contextmanager
def _prompt_progress() -> Iterator[Progress]:
    """A bar for each run with the acceptance length so far, on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(name: str, done: int, total: int, length: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, description=f"{name}, acceptance length {length:.2f}")

        yield on_progress


def _quiet_transformers() -> None:
    """No loading bars off a terminal, and no advice meant for people who call transformers themselves."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
