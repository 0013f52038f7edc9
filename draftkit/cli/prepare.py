"""`draftkit prepare`: making and finding models that can draft for a target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftkit.cli.completion import models
from draftkit.cli.panels import PanelCommand
from draftkit.cli.shared import JsonOption, TargetOption, TrustOption, console, print_json, quiet_transformers, say_next

app = typer.Typer(help="Make and find models that can draft.", no_args_is_help=True, rich_markup_mode=None)


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
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that draftkit has written.")] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give a small causal LM the tokenizer of a target. It can then draft for it."""
    quiet_transformers()
    from draftkit.prepare.causal_lm_transplant import plan_transplant
    from draftkit.prepare.coverage import measure_coverage
    from draftkit.report.prepare import show_transplant

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
    show_transplant(console(), result)
    if not dry_run:
        say_next("train", "--recipe", "draft-model", "--draft", out, "--target", tokenizer_of)


@app.command(cls=PanelCommand)
def candidates(
    target: TargetOption,
    folders: Annotated[
        list[Path] | None,
        typer.Option("--dir", help="A folder with models anywhere below it; repeatable; default: the Hub's cache."),
    ] = None,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            autocompletion=models,
            help="A model to judge: org/name[@revision], a folder or zoo:NAME; repeatable.",
        ),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(help="The chance that a draft token is accepted, for the expected speed-up.")
    ] = 0.7,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the models that could draft for a target. Tokenizers compared token by token, sizes, speed-ups."""
    quiet_transformers()
    from huggingface_hub import constants

    from draftkit.prepare.candidates import find_candidates
    from draftkit.report.prepare import survey_table

    if not folders and not sources:
        folders = [Path(constants.HF_HUB_CACHE)]
    survey = find_candidates(target, sources or [], folders or [], acceptance=acceptance)
    result = survey.to_dict()
    if as_json:
        print_json(result)
        return
    console().print(survey_table(result))
    for model in survey.left_out:
        print(f"left out: {model.name}: {model.reason}", file=sys.stderr)
