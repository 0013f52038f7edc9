"""`draftkit train` and `draftkit adapt`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftkit.cli.options import (
    ConcurrencyOption,
    DeviceMapOption,
    DeviceOption,
    EndpointOption,
    JsonOption,
    LoraOption,
    MaxLengthOption,
    MediaRootOption,
    OptionalTargetOption,
    ServedModelOption,
    StrictOption,
    TargetAdapterOption,
    TargetOption,
    TrainingSetOption,
    TrustOption,
    models,
)
from draftkit.cli.output import console, print_json, quiet_transformers, say_next, say_written, stopping
from draftkit.cli.settings import SettingsOption
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
    settings: TrainingSetOption = None,
    list_settings: SettingsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in OUT.")] = False,
    plan_vocab: Annotated[
        bool, typer.Option("--plan-vocab", help="Print what draft vocabularies allow, and train nothing.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print the resolved run and its size, train nothing."),
    ] = False,
    dry_run_step: Annotated[
        bool,
        typer.Option("--dry-run-step", help="Train the longest row alone, print peak memory and speed, keep nothing."),
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
    }  # fmt: skip
    run = read_config(config, settings or [], flags)
    if dry_run:
        _check(run, resume)
    elif dry_run_step:
        _try_step(run, as_json)
    elif plan_vocab:
        _plan_vocabulary(run, as_json)
    else:
        _train(run, resume, as_json)


def _check(run: TrainConfig, resume: bool) -> None:
    from draftkit.report.terminal.data import run_size
    from draftkit.train.dry_run import check_run

    size = check_run(run, resume=resume)
    print(run.to_yaml(), end="")
    for line in run_size(size):
        print(line, file=sys.stderr)


def _try_step(run: TrainConfig, as_json: bool) -> None:
    from draftkit.io.records import to_dict
    from draftkit.report.terminal.data import step_size
    from draftkit.train.dry_run import measure_step

    size = measure_step(run)
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(to_dict(size))
    else:
        print(step_size(size))


def _plan_vocabulary(run: TrainConfig, as_json: bool) -> None:
    from draftkit.report.terminal.prepare import vocabulary_table
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
    from draftkit.train.log import validated

    if as_json:
        print_json(trained.to_dict())
        return
    if trained.draft is None:
        print(f"stopped; draftkit train goes on from {trained.checkpoint} with --resume", file=sys.stderr)
        return
    judged = "eval_acceptance_length" in trained.metrics
    length = (
        f"acceptance length {validated(trained.metrics)}, held out, at K={run.validation.k}" if judged else "not judged"
    )
    say_written(trained.draft, f"{run.recipe}, {length}")
    if run.validation.every:
        from draftkit.train.log import read_curve

        print(read_curve(Path(run.out)).summary, file=sys.stderr)
    for line in serving_notes(read_draft(trained.draft), run.target):
        print(line, file=sys.stderr)
    say_next("eval", "--target", run.target, "--draft", trained.draft)


def adapt(
    draft: Annotated[str, typer.Option(autocompletion=models, help="The draft to go on with, of any format.")],
    target: TargetOption,
    traffic: Annotated[
        str, typer.Option(help="Logs of requests: OpenAI chat or completion records, or rows as `data` takes them.")
    ],
    out: Annotated[str, typer.Option(help="A folder for all that is made; one that was begun is continued.")],
    target_adapter: TargetAdapterOption = None,
    own: Annotated[
        list[str] | None,
        typer.Option(help="A model name in the log whose answers are this target's own; repeatable. Default: none is."),
    ] = None,
    replay: Annotated[
        str,
        typer.Option(help="General prompts, so that nothing is lost elsewhere: rows, `synthesized` or `none`."),
    ] = "synthesized",
    replay_share: Annotated[float, typer.Option(help="Their share of all answers.")] = 0.25,
    held_out: Annotated[float, typer.Option(help="The share of all answers that judges.")] = 0.1,
    limit: Annotated[int | None, typer.Option(min=1, help="Take this many requests from the beginning.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="The one that is served at; 0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    max_length: MaxLengthOption = 4096,
    k: Annotated[int, typer.Option(min=1, help="Draft tokens a round.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of answers, prompts and training.")] = 0,
    lora: LoraOption = None,
    settings: TrainingSetOption = None,
    concurrency: ConcurrencyOption = 16,
    endpoint: EndpointOption = None,
    served_model: ServedModelOption = None,
    strict: StrictOption = False,
    media_root: MediaRootOption = None,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Adapt a draft to a target or to traffic that has changed. Says what was lost, and what is regained."""
    quiet_transformers()
    from draftkit.layout.target import adapted_name
    from draftkit.report.terminal.data import adaptation_table
    from draftkit.train.adapt import AdaptSettings, adapt_draft
    from draftkit.train.config import parse_lora

    asked = AdaptSettings(
        draft=draft,
        target=adapted_name(target, target_adapter),
        traffic=traffic,
        out=out,
        own=tuple(own or ()),
        replay=replay,
        replay_share=replay_share,
        held_out=held_out,
        limit=limit,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        k=k,
        seed=seed,
        lora=None if lora is None else parse_lora(lora),
        training=tuple(settings or ()),
        endpoints=tuple(endpoint or ()),
        served_model=served_model,
        concurrency=concurrency,
        device=device,
        media_root=None if media_root is None else str(media_root),
    )
    stopping.kept = lambda: f"what is done is kept in {out}; the same command goes on"
    adapted = adapt_draft(asked, said=lambda text: print(text, file=sys.stderr, flush=True))
    if adapted.draft is None:
        print(f"stopped; the same command goes on from {out}", file=sys.stderr)
    elif as_json:
        print_json(adapted.to_dict())
    else:
        say_written(adapted.draft, f"adapted, trained on {adapted.answers:,} answers")
        console().print(adaptation_table(adapted, k))
        say_next("eval", "--target", target, "--draft", adapted.draft)
    if adapted.stopped_by is not None:
        raise typer.Exit(128 + adapted.stopped_by)
