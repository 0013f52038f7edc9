"""What the commands share: common options, and how results and progress reach the terminal."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from draftkit.cli.completion import models
from draftkit.errors import DraftkitError, command

if TYPE_CHECKING:
    from rich.console import Console

MACHINE, OUTPUT = "Machine", "Output"  # panels of the help
PROGRESS_SECONDS = 30.0  # between lines


def _formats() -> list[str]:
    from draftkit.convert.detect import all_formats

    return [format.NAME for format in all_formats()]


def prompt_sets() -> list[str]:
    """The prompt sets that have a name."""
    from draftkit.evaluate.datasets import BUNDLED, registry

    return [BUNDLED, *registry()]


SourceArgument = Annotated[
    str, typer.Argument(autocompletion=models, help="A folder, org/name[@revision], hf://org/name or zoo:NAME.")
]
TARGET = typer.Option(autocompletion=models, help="The target model: a folder, org/name[@revision] or zoo:target.")
TargetOption = Annotated[str, TARGET]
OptionalTargetOption = Annotated[str | None, TARGET]
DeviceOption = Annotated[
    str | None, typer.Option(rich_help_panel=MACHINE, help="cpu, cuda or cuda:N; default: cuda where there is one.")
]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DtypeOption = Annotated[
    DtypeName | None,
    typer.Option(
        rich_help_panel=MACHINE,
        help="Default: bfloat16 on a GPU, float32 on the CPU; auto: bfloat16 where the CPU is fast at it too.",
    ),
]
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Sequences decoded, or requests sent, together.")]
EndpointOption = Annotated[
    str | None,
    typer.Option(help="http://HOST:PORT/v1 of a vLLM server with the target, instead of loading it."),
]
ServedModelOption = Annotated[str | None, typer.Option(help="The target's name at an endpoint with several.")]
LoraOption = Annotated[
    str | None, typer.Option(help="Train adapters, as r=16,alpha=32,targets=q_proj+v_proj; `default` for all.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object on stdout and nothing else.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--from", autocompletion=_formats, help="The format of the source, a name that `draftkit formats` lists."
    ),
]


def settled_dtype(dtype: DtypeName | None, device: str | None) -> DtypeName | None:
    """The dtype that a user means on a device; of `auto`, it says which that is."""
    if dtype != "auto":
        return dtype
    from draftkit.targets.devices import device_named, fast_dtype

    name, reason = fast_dtype(device_named(device))
    print(f"dtype: {name}, as {reason}", file=sys.stderr)
    return name


def _trust(context: typer.Context, trusted: bool) -> bool:
    from draftkit.targets.remote_code import trust_remote_code

    context.with_resource(trust_remote_code(trusted))
    return trusted


# It holds while the command runs, wherever a model or tokenizer is loaded; the command itself has nothing to pass on.
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_trust,
        rich_help_panel=MACHINE,
        help="Run Python code that a model brings with it; else none ever runs.",
    ),
]


def _refuse_media(context: typer.Context, strict: bool) -> bool:
    if strict:
        from draftkit.data.rows import strict_rows

        context.with_resource(strict_rows())
    return strict


# As the one above.
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        callback=_refuse_media,
        help="Refuse rows with images or other parts that are not text; else they are left out and counted.",
    ),
]


def _spread(context: typer.Context, kind: str | None) -> str | None:
    from draftkit.targets.spreading import spread_targets

    context.with_resource(spread_targets(kind is not None))
    return kind


# As the one above.
DeviceMapOption = Annotated[
    Literal["auto"] | None,
    typer.Option(
        callback=_spread,
        rich_help_panel=MACHINE,
        help="Spread a target that one device cannot hold over the GPUs from --device on, then the host's memory and "
        "the disk.",
    ),
]


def refuse_inputs(out: Path, inputs: Iterable[str | Path]) -> None:
    """Raise `DraftkitError` when the file to write is one of those that are read."""
    for path in inputs:
        if out.exists() and os.path.exists(path) and out.samefile(path):
            raise DraftkitError("the output is one of the inputs", where=out, hint="choose another file")


class ProgressLines:
    """How far long work is, as a line on stderr now and then: where that is no terminal, on which a bar would move."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, name: str, done: int, total: int | None, detail: str = "") -> None:
        now = time.monotonic()
        if now - self._said < PROGRESS_SECONDS:
            return
        self._said = now
        print(f"{name}: {done:,}{'' if total is None else f' of {total:,}'}{detail}", file=sys.stderr, flush=True)


def replace_what_streams_lack() -> None:
    """Have stdout and stderr write `?` for what their encoding lacks, instead of failing at the end of long work."""
    for stream in (sys.stdout, sys.stderr):
        fails = stream.errors == "strict" or (stream.errors == "surrogateescape" and not _is_utf8(stream))
        if isinstance(stream, TextIOWrapper) and fails:
            stream.reconfigure(errors="replace")


def _is_utf8(stream: TextIO) -> bool:
    """Whether a stream takes every character; one in memory has no encoding, and does."""
    return stream.encoding is None or codecs.lookup(stream.encoding).name == "utf-8"


def say_next(*words: object) -> None:
    """The command of draftkit that is likely wanted next, on stderr."""
    print(f"next: {command('draftkit', *words)}", file=sys.stderr)


def print_json(value: object) -> None:
    """One JSON object on stdout, in ASCII where that is not UTF-8: `?` for what an encoding lacks would damage data."""
    from draftkit.io.jsonfile import dump, finite

    print(dump(finite(value), ascii_only=not _is_utf8(sys.stdout)), end="")


def print_csv(text: str) -> None:
    """CSV on stdout, in UTF-8 wherever that is."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(text, end="")


def console(*, stderr: bool = False) -> Console:
    """Stdout, text as it is. Off a terminal, tables get the width they need instead of being cut to 80 columns."""
    from rich.console import Console

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else 200
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def quiet_transformers() -> None:
    """No loading bars off a terminal, and no advice meant for people who call transformers themselves."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
