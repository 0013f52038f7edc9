"""What the commands that measure share: their options, and what these and `--set` ask together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftkit.cli.completion import drafts, engines, evaluation_settings, models
from draftkit.cli.shared import MACHINE, DtypeName, ProgressLines, prompt_sets, settled_dtype

if TYPE_CHECKING:
    from draftkit.evaluate.engine import BaseEngine
    from draftkit.evaluate.measure import Progress
    from draftkit.results.settings import Sweep

PROMPTS, ENGINES, SPEED = "Prompts", "Engines", "What is told of it"

TargetNameOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        autocompletion=models,
        help="The target model: a folder, org/name[@revision] or zoo:target. With --server only its tokenizer, or "
        "none: the server renders messages.",
    ),
]
DraftsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        autocompletion=drafts,
        help="A draft of any format, ngram[:MIN-MAX] or suffix; repeat to compare. With --server only its name.",
    ),
]
TokensOption = Annotated[
    str, typer.Option("--k", help="Draft tokens a round (num_speculative_tokens), as 4 or 1-8,12.")
]
DatasetOption = Annotated[
    str,
    typer.Option(
        "--dataset",
        "--prompts",
        autocompletion=prompt_sets,
        rich_help_panel=PROMPTS,
        help="zoo (bundled), mt-bench, humaneval, …, a JSONL file, a .txt file with a prompt in each line, or a Hub "
        "dataset. A row has messages, conversations, turns, prompt, data or question; or text, gone on with as it is.",
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(rich_help_panel=PROMPTS, help="Use this many prompts, spread over the set.")
]
NewTokensOption = Annotated[int, typer.Option(rich_help_panel=PROMPTS, help="Tokens to generate per prompt, at most.")]
ContextOption = Annotated[
    str | None,
    typer.Option(rich_help_panel=PROMPTS, help="Pad prompts to as many tokens with text of the set, as 1k,4k,16k."),
]
ConcurrenciesOption = Annotated[
    str, typer.Option(rich_help_panel=MACHINE, help="Sequences decoded together, as 1 or 1,8,100.")
]
TemperaturesOption = Annotated[
    str, typer.Option(help="How random the output is: 0 decodes greedily; several as 0,0.7,1.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=ENGINES,
        autocompletion=engines,
        metavar="NAME",
        help="vllm runs the prompts through vLLM too, and compares; llama.cpp in its server alone, from GGUF files; "
        "default: the one that a setting is of, else draftkit, or vLLM where that does not run the target and vLLM is "
        "installed.",
    ),
]
VllmPythonOption = Annotated[
    str | None, typer.Option(rich_help_panel=ENGINES, help="Python of an environment with vLLM; default: this one.")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=ENGINES,
        help="Measure the server at this address, as http://host:8000, with the draft that it runs with.",
    ),
]
ServerBaselineOption = Annotated[
    str | None,
    typer.Option(rich_help_panel=ENGINES, help="A server with the same target and no draft, to compare with."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        autocompletion=evaluation_settings,
        help="A rarer setting, as top_p=0.9 or verification=block; repeatable. `draftkit settings eval` lists all.",
    ),
]


@dataclass(frozen=True)
class Measurement:
    """What a command is asked to measure. `engine` None leaves it to the evaluation; `values`: settings by name."""

    target: str | None
    drafts: list[str]
    sweep: Sweep
    engine: str | None
    values: Mapping[str, object]

    def engines(self, out: Path | None = None) -> list[BaseEngine]:
        """The engines that run the prompts, one after another; none where the evaluation is to choose. `out`: where the
        result is kept. Raises `SettingError`."""
        if self.engine is None:
            return []
        from draftkit.evaluate.engines import engine_class
        from draftkit.evaluate.engines.own import OwnEngine

        asked = engine_class(self.engine).of(self.values, out)
        return [OwnEngine(), asked] if asked.compared else [asked]


def asked_of(
    target: str | None,
    drafts: Sequence[str] | None,
    *,
    k: str = "4",
    concurrency: str = "1",
    temperature: str = "0",
    context: str | None = None,
    dtype: DtypeName | None = None,
    device: str | None = None,
    engine: str | None = None,
    settings: Sequence[str] | None = None,
    **flags: object,
) -> Measurement:
    """What options and `--set` ask together; `flags` are settings by their names, those that are None left out.

    What is wrong is said before torch is imported, which takes seconds. Raises `SettingError`, or a usage error.
    """
    from draftkit.evaluate.engines import engine_class
    from draftkit.evaluate.options import (
        ENGINE_SETTINGS,
        OPTIONS,
        parse_contexts,
        parse_floats,
        parse_integers,
        settable_settings,
    )
    from draftkit.io.settings import assignments, read_settings, settings_of, with_values
    from draftkit.results.settings import Settings

    ks, batches = parse_integers("num_speculative_tokens", k), parse_integers("concurrency", concurrency)
    temperatures = parse_floats("temperature", temperature)
    flags |= {"num_speculative_tokens": ks[-1], "concurrency": batches[0], "temperature": temperatures[0]}
    flags |= {"device": device, "dtype": settled_dtype(dtype, device)}
    given = {name: value for name, value in flags.items() if value is not None}
    texts = assignments(settings or ())
    for name in texts.keys() & OPTIONS.keys():
        raise typer.BadParameter(f"{name} has an option of its own: {OPTIONS[name]}.")
    by_engine: dict[str, type] = {cls.engine: cls for cls in ENGINE_SETTINGS}
    if engine is not None and engine not in by_engine and (own := engine_class(engine).settings_type) is not None:
        by_engine[engine] = own
    given |= read_settings(settable_settings(*by_engine.values()), texts)
    for name, cls in by_engine.items():
        theirs = given.keys() & {one.name for one in settings_of(cls)}
        if theirs and name != (engine := engine or name):
            words = ", ".join(OPTIONS.get(one, one) for one in sorted(theirs))
            raise typer.BadParameter(f"{words} of {name} with the engine {engine}: leave out one of them.")
    if engine in by_engine:
        with_values(by_engine[engine], given)
    sweep = with_values(Settings, given).sweep(
        k=ks, concurrency=batches, temperature=temperatures, context=parse_contexts(context)
    )
    if (target is None or not drafts) and (engine is None or engine_class(engine).sees_weights):
        missing = "--target" if target is None else "--draft"
        raise typer.BadParameter(f"Missing option '{missing}' (or --server).")
    return Measurement(target, list(drafts or ()), sweep, engine, given)


def _so_far(name: str, length: float) -> str:
    """The acceptance length of a run, where it has one."""
    return "" if isnan(length) or name.endswith("no draft") else f", acceptance length {length:.2f}"


@contextmanager
def prompt_progress() -> Iterator[Progress]:
    """A bar for each run with the acceptance length so far, on stderr; lines where that is no terminal."""
    if not sys.stderr.isatty():
        lines = ProgressLines()
        yield lambda name, done, total, length: lines(name, done, total, _so_far(name, length))
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
            bars.update(tasks[name], completed=done, description=name + _so_far(name, length))

        yield on_progress
