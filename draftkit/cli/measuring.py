"""What the commands that measure share: their options, and what these and `--set` ask together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftkit.cli.completion import drafts, evaluation_settings, models
from draftkit.cli.shared import MACHINE, DtypeName, ProgressLines, prompt_sets, settled_dtype

if TYPE_CHECKING:
    from draftkit.engines.vllm.settings import VllmSettings
    from draftkit.evaluate.measure import Progress
    from draftkit.evaluate.options import LlamaCppSettings
    from draftkit.io.settings import Setting
    from draftkit.results.settings import Sweep

PROMPTS, ENGINES, SPEED = "Prompts", "Engines", "What is told of it"
EngineName = Literal["draftkit", "vllm", "llama.cpp"]

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
    EngineName | None,
    typer.Option(
        rich_help_panel=ENGINES,
        help="vllm runs the prompts through vLLM too, and compares; llama.cpp in its server alone, from GGUF files; "
        "default: vllm with any setting of it, else draftkit, or vLLM where that does not run the target and vLLM is "
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
    """What a command is asked to measure. `vllm` and `llama_cpp`: None where these do not take part."""

    target: str | None
    drafts: list[str]
    sweep: Sweep
    engine: EngineName | None
    vllm: VllmSettings | None
    llama_cpp: LlamaCppSettings | None
    server: str | None = None
    server_baseline: str | None = None

    @property
    def served(self) -> bool:
        """Whether a server answers, be it started elsewhere or here."""
        return self.server is not None or self.llama_cpp is not None

    def refuse(self, beyond: dict[str, bool]) -> None:
        """A usage error for what a server is not asked: the options of `beyond` that were given."""
        given = ", ".join(name for name, there in beyond.items() if there)
        if given and self.served:
            by = "--server" if self.server is not None else "--engine llama.cpp"
            raise typer.BadParameter(f"{given} with {by}, which runs as it was started: leave it out.")


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
    engine: EngineName | None = None,
    vllm_python: str | None = None,
    server: str | None = None,
    server_baseline: str | None = None,
    settings: Sequence[str] | None = None,
    **flags: object,
) -> Measurement:
    """What options and `--set` ask together; `flags` are settings by their names, those that are None left out.

    What is wrong is said before torch is imported, which takes seconds. Raises `SettingError`, or a usage error.
    """
    from draftkit.engines.vllm.settings import VllmSettings
    from draftkit.evaluate.options import LlamaCppSettings, parse_contexts, parse_floats, parse_integers
    from draftkit.io.settings import assignments, read_settings, settings_of, with_values
    from draftkit.results.settings import Settings

    ks, batches = parse_integers("num_speculative_tokens", k), parse_integers("concurrency", concurrency)
    temperatures = parse_floats("temperature", temperature)
    flags |= {"num_speculative_tokens": ks[-1], "concurrency": batches[0], "temperature": temperatures[0]}
    flags |= {"device": device, "dtype": settled_dtype(dtype, device), "vllm_python": vllm_python}
    given = {name: value for name, value in flags.items() if value is not None}
    texts = assignments(settings or ())
    for name in texts.keys() & OPTIONS.keys():
        raise typer.BadParameter(f"{name} has an option of its own: {OPTIONS[name]}.")
    given |= read_settings(settable_settings(), texts)
    of_vllm = given.keys() & {one.name for one in settings_of(VllmSettings)}
    if of_vllm and engine not in (None, "vllm"):
        raise typer.BadParameter(f"{', '.join(of_vllm)} for --engine {engine}: leave out --engine, or the settings.")
    if "llama_server" in given and engine != "llama.cpp":
        raise typer.BadParameter("llama_server without --engine llama.cpp: add it.")
    asked = Measurement(
        target,
        list(drafts or ()),
        with_values(Settings, given).sweep(
            k=ks, concurrency=batches, temperature=temperatures, context=parse_contexts(context)
        ),
        engine,
        with_values(VllmSettings, given) if engine == "vllm" or of_vllm else None,
        with_values(LlamaCppSettings, given) if engine == "llama.cpp" else None,
        server,
        server_baseline,
    )
    _check_server(asked)
    return asked


def _check_server(asked: Measurement) -> None:
    """A usage error for options that do not go with a server, or that lack one."""
    if asked.server is None and asked.server_baseline is not None:
        raise typer.BadParameter("--server-baseline without --server: add --server, the one with the draft.")
    if asked.server is not None and asked.llama_cpp is not None:
        raise typer.BadParameter("--server with --engine llama.cpp, which starts its own: leave one of them out.")
    asked.refuse({"--engine": asked.server is not None and (asked.engine is not None or asked.vllm is not None)})
    if asked.server is not None and len(asked.drafts) > 1:
        raise typer.BadParameter(f"{len(asked.drafts)} drafts for one server: give one --draft, its name, or none.")
    if asked.server is None and (asked.target is None or not asked.drafts):
        missing = "--target" if asked.target is None else "--draft"
        raise typer.BadParameter(f"Missing option '{missing}' (or --server).")


def known_settings() -> list[Setting]:
    """All settings of a measurement and of the engines that it runs in."""
    from draftkit.engines.vllm.settings import VllmSettings
    from draftkit.evaluate.options import LlamaCppSettings
    from draftkit.io.settings import settings_of
    from draftkit.results.settings import Settings

    return [one for cls in (Settings, VllmSettings, LlamaCppSettings) for one in settings_of(cls) if one.help]


# The settings that have an option of their own, by its name.
OPTIONS = {
    "num_speculative_tokens": "--k", "max_new_tokens": "--max-new-tokens", "concurrency": "--concurrency",
    "prompts": "--dataset", "limit": "--limit", "context": "--context", "slices": "--slice", "device": "--device",
    "dtype": "--dtype", "temperature": "--temperature", "vllm_python": "--vllm-python",
}  # fmt: skip


def settable_settings() -> list[Setting]:
    """What `--set` takes: the settings without an option of their own."""
    return [one for one in known_settings() if one.name not in OPTIONS]


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


def log_beside(out: Path | None) -> Path:
    """The file that what llama.cpp's server prints goes to."""
    return Path("llama-server.log") if out is None else out.with_suffix(".llama-server.log")
