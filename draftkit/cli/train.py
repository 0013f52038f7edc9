"""`draftkit train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftkit.cli.completion import models, training_settings
from draftkit.cli.shared import (
    DeviceMapOption,
    JsonOption,
    LoraOption,
    OptionalTargetOption,
    TrustOption,
    console,
    print_json,
    quiet_transformers,
    say_next,
)
from draftkit.train.recipes import recipe_names

if TYPE_CHECKING:
    from draftkit.train.config import TrainConfig
    from draftkit.train.run import Trained


def _known(recipe: str | None) -> str | None:
    if recipe not in (None, *recipe_names()):
        raise typer.BadParameter(f"{recipe!r} is not one of {', '.join(recipe_names())}.")
    return recipe


def train(
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; the flags go before it.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(recipe_names())}]", callback=_known, autocompletion=recipe_names, help="What to train."
        ),
    ] = None,
    target: OptionalTargetOption = None,
    data: Annotated[str | None, typer.Option(help="Samples that `draftkit data prepare` wrote.")] = None,
    out: Annotated[str | None, typer.Option(help="A folder for the checkpoints and the final draft.")] = None,
    draft: Annotated[
        str | None, typer.Option(autocompletion=models, help="A checkpoint to go on with, of any format.")
    ] = None,
    states: Annotated[str | None, typer.Option(help="Hidden states that `draftkit data states` wrote.")] = None,
    states_from: Annotated[
        Literal["vllm"] | None,
        typer.Option(help="Let vLLM compute the states while training uses them up; settings: stream.…"),
    ] = None,
    vllm_python: Annotated[
        str | None,
        typer.Option(help="The Python of an environment with vLLM, for --states-from; else `data stream` is started."),
    ] = None,
    lora: LoraOption = None,
    on_policy: Annotated[
        bool, typer.Option("--on-policy", help="In half of the steps, count the drafts more that serving rejects.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            autocompletion=training_settings,
            help="SETTING=VALUE, as optimization.lr=1e-4 or options.steps=3; repeatable.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in OUT.")] = False,
    plan_vocab: Annotated[
        bool, typer.Option("--plan-vocab", help="Print what draft vocabularies allow, and train nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved run, and train nothing.")
    ] = False,
    device_map: DeviceMapOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a draft for a target. Its acceptance length is measured while it trains."""
    quiet_transformers()
    from draftkit.train.config import parse_lora, read_config

    flags = {
        "recipe": recipe, "target": target, "data": data, "out": out, "draft": draft, "states": states,
        "stream": None if states_from is None else {"python": vllm_python or ""},
        "lora": None if lora is None else parse_lora(lora),
        "on_policy": {} if on_policy else None,
    }  # fmt: skip
    run = read_config(config, settings or [], flags)
    if dry_run:
        _check(run, resume)
    elif plan_vocab:
        _plan_vocabulary(run, as_json)
    else:
        _train(run, resume, as_json)


def _check(run: TrainConfig, resume: bool) -> None:
    from draftkit.io.records import to_dict
    from draftkit.report.data import ways_table
    from draftkit.train.run import check_run

    ways = check_run(run, resume=resume)
    print(run.to_yaml(), end="")
    console(stderr=True).print(ways_table(to_dict(ways)))


def _plan_vocabulary(run: TrainConfig, as_json: bool) -> None:
    from draftkit.report.vocabulary import vocabulary_table
    from draftkit.train.run import plan_draft_vocabulary

    ceilings = plan_draft_vocabulary(run)
    if as_json:
        print_json([ceiling.to_dict() for ceiling in ceilings])
    else:
        console().print(vocabulary_table(ceilings, run.validation.k))


def _train(run: TrainConfig, resume: bool, as_json: bool) -> None:
    from draftkit.train.run import train_draft

    trained = train_draft(run, resume=resume)
    if os.environ.get("RANK", "0") == "0":  # under torchrun the first process speaks
        _show(run, trained, as_json)
    if trained.stopped_by is not None:
        raise typer.Exit(128 + trained.stopped_by)


def _show(run: TrainConfig, trained: Trained, as_json: bool) -> None:
    from draftkit.engines.serving import serving_notes
    from draftkit.layout.folder import read_draft
    from draftkit.train.progress import validated

    if as_json:
        print_json(trained.to_dict())
        return
    if trained.draft is None:
        print(f"stopped; draftkit train goes on from {trained.checkpoint} with --resume", file=sys.stderr)
        return
    if "eval_acceptance_length" in trained.metrics:
        print(f"acceptance length {validated(trained.metrics)}, held out, at K={run.validation.k}")
    print(trained.draft)
    if run.validation.every:
        from draftkit.train.curve import read_curve

        print(read_curve(Path(run.out)).verdict, file=sys.stderr)
    for line in serving_notes(read_draft(trained.draft), run.target):
        print(line, file=sys.stderr)
    say_next("eval", "--target", run.target, "--draft", trained.draft)
