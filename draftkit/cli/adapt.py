"""`draftkit adapt`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from draftkit.cli.completion import models, training_settings
from draftkit.cli.shared import (
    ConcurrencyOption,
    DeviceOption,
    EndpointOption,
    JsonOption,
    LoraOption,
    ServedModelOption,
    StrictOption,
    TargetOption,
    TrustOption,
    console,
    print_json,
    quiet_transformers,
    say_next,
)


def adapt(
    draft: Annotated[str, typer.Option(autocompletion=models, help="The draft to go on with, of any format.")],
    target: TargetOption,
    traffic: Annotated[
        str, typer.Option(help="Logs of requests: OpenAI chat or completion records, or rows as `data` takes them.")
    ],
    out: Annotated[str, typer.Option(help="A folder for all that is made; one that was begun is continued.")],
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
    max_length: Annotated[int, typer.Option(min=2, help="Cut samples at this many tokens.")] = 4096,
    k: Annotated[int, typer.Option(min=1, help="Draft tokens a round.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of answers, prompts and training.")] = 0,
    lora: LoraOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            autocompletion=training_settings,
            help="SETTING=VALUE of training, as optimization.lr=1e-4; repeatable.",
        ),
    ] = None,
    concurrency: ConcurrencyOption = 16,
    endpoint: EndpointOption = None,
    served_model: ServedModelOption = None,
    strict: StrictOption = False,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Adapt a draft to a target or to traffic that has changed. Says what was lost, and what is regained."""
    quiet_transformers()
    from draftkit.report.adapt import adaptation_table
    from draftkit.train.adapt import AdaptSettings, adapt_draft
    from draftkit.train.config import parse_lora

    asked = AdaptSettings(
        draft=draft,
        target=target,
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
        endpoint=endpoint,
        served_model=served_model,
        concurrency=concurrency,
        device=device,
    )
    adapted = adapt_draft(asked, said=lambda text: print(text, file=sys.stderr, flush=True))
    if adapted.draft is None:
        print(f"stopped; the same command goes on from {out}", file=sys.stderr)
    elif as_json:
        print_json(adapted.to_dict())
    else:
        console().print(adaptation_table(adapted, k))
        print(adapted.draft)
        say_next("eval", "--target", target, "--draft", adapted.draft)
    if adapted.stopped_by is not None:
        raise typer.Exit(128 + adapted.stopped_by)
