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

app = typer.Typer(
    help="Convert, measure and explain draft models for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DESTINATIONS = ("unified", "vllm", "sglang", "speculators", "eagle", "mlp-speculator", "pard", "hf")

SourceArgument = Annotated[str, typer.Argument(help="A folder, org/name[@revision], hf://org/name or zoo:NAME.")]
TargetOption = Annotated[
    str | None, typer.Option(help="The target model: a folder, org/name[@revision] or zoo:target.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")]
FormatOption = Annotated[
    str | None, typer.Option("--from", help="The format of the source, a name that `draftkit formats` lists.")
]


@app.command()
def convert(
    source: SourceArgument,
    out: Annotated[
        Path | None, typer.Argument(help="The folder to write; default: the source's name-draftkit.")
    ] = None,
    target: TargetOption = None,
    revision: RevisionOption = None,
    to: Annotated[str, typer.Option(help="The layout to write: " + ", ".join(DESTINATIONS) + ".")] = "unified",
    format: FormatOption = None,
    facts: Annotated[
        list[str] | None, typer.Option("--set", help="FACT=VALUE instead of what was found; repeatable.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Read every tensor first and refuse NaN and inf.")] = False,
    digest: Annotated[
        bool, typer.Option("--digest", help="Record the SHA-256 of large local files too, which takes reading them.")
    ] = False,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Write what the destination can hold, and record what it cannot.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a draft checkpoint of any known format into the unified layout, or into another."""
    from draftkit.convert.api import default_output, plan_conversion

    overrides = _parse_facts(facts or [])
    conversion = plan_conversion(
        source, to=to, target=target, revision=revision, format=format, overrides=overrides, digest=digest
    )
    if check:
        conversion.check_finite()
    if not dry_run:
        out = out or default_output(conversion)
        with _byte_progress(conversion.output_bytes) as on_bytes:
            conversion.write(out, force=force, allow_lossy=allow_lossy, on_bytes=on_bytes)
    _report_conversion(conversion, None if dry_run else out, as_json)


@app.command()
def inspect(
    source: SourceArgument,
    target: TargetOption = None,
    revision: RevisionOption = None,
    format: FormatOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint is: format, tensors, every fact that is stated, assumed or missing, and known defects."""
    from draftkit.convert.api import Reading, inspect_checkpoint
    from draftkit.report.conversion import draft_json, reading_json, show_draft, show_reading

    found = inspect_checkpoint(source, target=target, revision=revision, format=format)
    if isinstance(found, Reading):
        _print_json(reading_json(found)) if as_json else show_reading(_console(), found)
    else:
        _print_json(draft_json(found)) if as_json else show_draft(_console(), found)


@app.command()
def formats() -> None:
    """List the checkpoint formats that can be read, and the destinations that can be written."""
    from draftkit.report.conversion import formats_table

    _console().print(formats_table())


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Option(help="The target model: a folder, org/name[@revision] or zoo:target.")],
    draft: Annotated[list[str], typer.Option(help="A draft of any format, or ngram[:MIN-MAX]; repeat to compare.")],
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
    temperature: Annotated[float, typer.Option(min=0, help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set with this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens with this share of the best one's probability.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first request; the others count on.")] = 0,
    draft_sampling: Annotated[
        Literal["auto", "greedy", "probabilistic"], typer.Option(help="How drafts are drawn; all are lossless.")
    ] = "auto",
    draft_greedy_below: Annotated[
        float, typer.Option(help="auto drafts greedily for requests below this temperature.")
    ] = 0.75,
    draft_temperature: Annotated[
        float | None, typer.Option(help="For sampled drafts, instead of the request's temperature.")
    ] = None,
    verification: Annotated[
        Literal["rejection", "block", "coupled", "synthetic"],
        typer.Option(help="rejection and block keep the distribution, coupled the very tokens of plain decoding."),
    ] = "rejection",
    acceptance_rates: Annotated[
        str | None, typer.Option(help="Of synthetic verification: a rate for each position, or one mean length.")
    ] = None,
    disable_above_batch: Annotated[
        int | None, typer.Option(min=1, help="Draft nothing while more sequences than this are decoded together.")
    ] = None,
    k_by_batch: Annotated[
        str | None, typer.Option(help="Largest batch:K pairs, as 4:6,16:3; beyond the last nothing is drafted.")
    ] = None,
    min_acceptance_length: Annotated[
        float | None, typer.Option(help="Exit with code 3 when a draft's acceptance length is lower.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure drafts against their target: acceptance length, latency, speed, equality with plain decoding."""
    _quiet_transformers()
    from draftkit.evaluate.evaluate import Settings, evaluate_draft
    from draftkit.evaluate.options import parse_rates, parse_schedule
    from draftkit.report.tables import evaluation_table
    from draftkit.runtime.sampling.parameters import DraftSampling, SamplingParameters

    settings = Settings(
        num_speculative_tokens=k,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        prompts=prompts,
        limit=limit,
        device=device,
        dtype=dtype,
        sampling=SamplingParameters(temperature, top_k, top_p, min_p, seed),
        draft_sampling=DraftSampling(draft_sampling, draft_greedy_below, draft_temperature),
        verification=verification,
        acceptance_rates=parse_rates(acceptance_rates, k),
        k_by_batch=parse_schedule(k_by_batch, disable_above_batch, k),
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


def _parse_facts(texts: list[str]) -> dict[str, str]:
    """`FACT=VALUE` arguments by fact. Raises `DraftkitError` for one without a name or a value."""
    facts = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise DraftkitError(f"--set {text} names no fact and value", expected="--set FACT=VALUE")
        facts[name] = value
    return facts


def _report_conversion(conversion: Conversion, out: Path | None, as_json: bool) -> None:
    """The plan, or, where there is an output, what was written and the next command."""
    from draftkit.report.conversion import conversion_json, report_conversion, show_conversion

    if as_json:
        _print_json(conversion_json(conversion) | ({} if out is None else {"out": str(out)}))
    elif out is None:
        show_conversion(_console(), conversion)
    else:
        report_conversion(_console(), conversion, out)
        if conversion.export is None:
            target = conversion.target.name if conversion.target else "TARGET"
            print(f"next: draftkit eval --target {target} --draft {out}", file=sys.stderr)


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
