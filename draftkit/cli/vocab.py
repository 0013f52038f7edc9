"""`draftkit vocab`: vocabularies of drafts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftkit.cli.options import JsonOption, ReplaceFolderOption, SourceArgument, TrustOption, models
from draftkit.cli.output import console, print_json, quiet_transformers, say_next, say_written
from draftkit.cli.panels import PanelCommand
from draftkit.errors import DraftkitError
from draftkit.io.cache import local_file

app = typer.Typer(help="Change the vocabulary of a draft.", no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=PanelCommand)
def transplant(
    donor: Annotated[
        str, typer.Argument(autocompletion=models, help="A small causal LM: a folder, org/name[@revision] or zoo:NAME.")
    ],
    tokenizer_of: Annotated[
        str,
        typer.Option(
            autocompletion=models,
            help="The model whose tokenizer it gets: a folder, org/name[@revision] or zoo:target.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    weighting: Annotated[
        Literal["mean", "length"],
        typer.Option(help="How tokens that the donor writes as several are put together: equally, or by bytes."),
    ] = "mean",
    layers: Annotated[
        str | None, typer.Option(help="Layers to keep: a number, evenly spread, or a list, as 0,1,5.")
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=1, help="MLP channels to keep: those with the largest product of weight norms.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="A text file: report how much of it the copied tokens are.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report, and write nothing.")] = False,
    force: ReplaceFolderOption = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give a small causal LM the tokenizer of a target. It can then draft for it."""
    quiet_transformers()
    from draftkit.prepare.causal_lm_transplant import plan_transplant
    from draftkit.prepare.matching import measure_coverage
    from draftkit.report.terminal.prepare import show_transplant

    plan = plan_transplant(donor, tokenizer_of, weighting=weighting, layers=layers, intermediate=intermediate)
    coverage = None if corpus is None else measure_coverage(corpus, plan.target, plan.matches)
    result = plan.to_dict() | {
        "coverage": None if coverage is None else coverage.to_dict(),
        "out": None if dry_run else str(out),
    }
    if not dry_run:
        plan.write(out, force=force)
    if as_json:
        print_json(result)
        return
    if not dry_run:
        say_written(out, f"{donor} with the tokenizer of {tokenizer_of}")
    show_transplant(console(), result)
    if not dry_run:
        say_next(
            "train", "--recipe", "draft-model", "--draft", out, "--target", tokenizer_of, "--data", "SAMPLES",
            "--out", "RUN",
        )  # fmt: skip


@app.command(cls=PanelCommand)
def prune(
    draft: SourceArgument,
    data: Annotated[
        Path,
        typer.Option(
            parser=local_file,
            metavar="SAMPLES",
            help="Samples that `draftkit data prepare` wrote: what the target says.",
        ),
    ],
    size: Annotated[int | None, typer.Option(min=1, help="Tokens that the draft shall propose, as 32000.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    target: Annotated[
        str | None,
        typer.Option(autocompletion=models, help="The target model, whose head a draft without one gets rows of."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A token to keep, by id or by text, beside those that end a turn; repeatable."),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Draft tokens a round, for the acceptance lengths.")] = 4,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what several sizes allow and save; write nothing.")
    ] = False,
    force: ReplaceFolderOption = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let a draft propose the most frequent tokens only. Each of its steps is cheaper then."""
    quiet_transformers()
    from draftkit.engines.vllm.serve import method_note
    from draftkit.prepare.prune import plan_pruning
    from draftkit.report.terminal.prepare import show_pruning

    if not plan and (size is None or out is None):
        raise DraftkitError("pruning takes --size and --out", hint="--plan shows what sizes allow")
    pruning = plan_pruning(draft, data, size=size, target=target, keep=keep or [], k=k)
    if out is not None and not plan:
        pruning.write(out, force=force)
    result = pruning.to_dict() | {"out": None if plan else str(out)}
    if as_json:
        print_json(result)
        return
    if not plan:
        say_written(out, f"{draft} over {size:,} tokens")
    show_pruning(console(), result)
    if not plan:
        for note in method_note(pruning.source.spec):
            print(note, file=sys.stderr)
        named = target or pruning.source.provenance.target or "TARGET"
        say_next("eval", "--target", named, "--draft", out)
