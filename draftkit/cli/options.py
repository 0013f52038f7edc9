"""The options that several commands share, each declared once, and what the shell completes of them.

Completion needs no network and imports nothing slow. Bash ends a word at a colon and at an equals sign, so that of
`zoo:eag` typer sees three; `join_words` puts such words together again.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftkit.errors import DraftkitError
from draftkit.io.cache import local_file
from draftkit.io.settings import tokens_of_text

MACHINE, OUTPUT = "Machine", "Output"  # panels of the help
PROMPTS, ENGINES, SPEED = "Prompts", "Engines", "What is told of it"

_typed = ""  # of the word that is completed: what bash keeps, as `zoo:`


def models() -> list[str]:
    """The embedded models, as `zoo:target`; without what bash keeps of the word."""
    from draftkit import zoo

    names = [f"zoo:{name}" for name in zoo.names()]
    return [name.removeprefix(_typed) for name in names if name.startswith(_typed)]


def drafts() -> list[str]:
    """The embedded models, and the drafts without a checkpoint."""
    from draftkit.layout.families import families

    return [*models(), "mtp", *(name for name, family in families().items() if not family.has_checkpoint)]


def draft_facts() -> list[str]:
    """What `convert --set` takes, of drafts of any family."""
    from draftkit.layout.facts import settings_of_facts
    from draftkit.layout.families import families

    return sorted({f"{one.name}=" for family in families().values() for one in settings_of_facts(family)})


def engines() -> list[str]:
    """The engines that have settings, and draftkit's own."""
    from draftkit.evaluate.options import ENGINE_SETTINGS

    return ["draftkit", *(settings.engine for settings in ENGINE_SETTINGS)]


def evaluation_settings() -> list[str]:
    """What `eval --set` takes."""
    from draftkit.evaluate.options import settable_settings

    return sorted(f"{one.name}=" for one in settable_settings())


def training_settings() -> list[str]:
    """What `train --set` takes, but for the options of single recipes."""
    from draftkit.io.settings import settings_of
    from draftkit.train.config import TrainConfig

    return sorted(f"{one.name}=" for one in settings_of(TrainConfig))


def join_words() -> None:
    """Let typer see words as they were typed where bash, which asks for a completion, has split them."""
    global _typed
    line, at = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    if os.environ.get("_DRAFTKIT_COMPLETE") != "complete_bash" or not at.isdigit():
        return
    joined = re.sub(r"\n([:=])(?:\n|$)", r"\1", line)  # typer's script gives a line to each word
    before, newline, word = joined.rpartition("\n")
    last = line.rpartition("\n")[2].strip(":=") if joined != line else word
    _typed = word.removesuffix(last)
    os.environ["COMP_WORDS"] = f"{before}{newline}{last}"
    os.environ["COMP_CWORD"] = str(int(at) - (line.count("\n") - joined.count("\n")))


def releases() -> list[str]:
    """What `--for` takes."""
    from draftkit.engines.known import names

    return names()


def _speak(context: typer.Context, name: str | None) -> str | None:
    """While the command runs, one release of an engine is spoken of."""
    if name is not None:
        from draftkit.engines.known import speaking_of

        try:
            context.with_resource(speaking_of(name))
        except DraftkitError as error:
            raise typer.BadParameter(str(error)) from error
    return name


def _formats() -> list[str]:
    from draftkit.convert.detect import all_formats

    return [format.NAME for format in all_formats()]


def prompts_of(named: str | None, target: str | None) -> str:
    """The prompt set of `--dataset`; where none is named, the bundled one for the zoo's own targets, for which it is
    made, and MT-Bench for all others."""
    from draftkit.evaluate.prompts import BUNDLED

    own = target is not None and target.startswith("zoo:")
    return named or (BUNDLED if own else "mt-bench")


def prompt_sets() -> list[str]:
    """The prompt sets that have a name."""
    from draftkit.evaluate.prompts import BUNDLED, registry

    return [BUNDLED, *registry()]


SOURCE = typer.Argument(autocompletion=models, help="A folder, org/name[@revision], hf://org/name or zoo:NAME.")
SourceArgument = Annotated[str, SOURCE]
OptionalSourceArgument = Annotated[str | None, SOURCE]
TARGET = typer.Option(autocompletion=models, help="The target model: a folder, org/name[@revision] or zoo:target.")
TargetOption = Annotated[str, TARGET]
OptionalTargetOption = Annotated[str | None, TARGET]
TargetAdapterOption = Annotated[
    str | None, typer.Option("--target-adapter", help="A LoRA adapter (peft) on the target, merged into it in memory.")
]
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
ConcurrencyOption = Annotated[int, typer.Option(min=1, help="Sequences decoded, or requests waited for, together.")]
EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        help="http://HOST:PORT/v1 of a vLLM server with the target, instead of loading it; repeatable. Behind it "
        "=NAME of the environment variable with its key, where that is not OPENAI_API_KEY."
    ),
]
ServedModelOption = Annotated[str | None, typer.Option(help="The target's name at an endpoint with several.")]
LoraOption = Annotated[
    str | None, typer.Option(help="Train adapters, as r=16,alpha=32,targets=q_proj+v_proj; `default` for all.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object on stdout and nothing else.")
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", rich_help_panel=OUTPUT, help="Show all of it, not only what matters most.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")]
ReleaseOption = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="ENGINE==RELEASE",
        autocompletion=releases,
        callback=_speak,
        rich_help_panel=OUTPUT,
        help="Say what this release of an engine does, as vllm==VERSION; default: the installed one, else all that are "
        "known. What is written or decoded stays the same.",
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--from", autocompletion=_formats, help="The format of the source; `draftkit inspect --formats` lists all."
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
    if trusted:  # what it is without: and the module imports torch
        from draftkit.targets.pretrained import trust_remote_code

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


# Like `TrustOption`, it holds while the command runs.
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        callback=_refuse_media,
        help="Refuse rows with parts that are not used, as videos; else they are left out and counted.",
    ),
]


def _spread(context: typer.Context, kind: str | None) -> str | None:
    if kind is not None:
        from draftkit.targets.device_map import spread_targets

        context.with_resource(spread_targets(True))
    return kind


# Like `TrustOption`, it holds while the command runs.
DeviceMapOption = Annotated[
    Literal["auto"] | None,
    typer.Option(
        callback=_spread,
        rich_help_panel=MACHINE,
        help="Spread a target that one device cannot hold over the GPUs from --device on, then the host's memory and "
        "the disk.",
    ),
]


# What is measured.
TargetNameOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        autocompletion=models,
        help="The target model: a folder, org/name[@revision] or zoo:target. Of servers only its tokenizer, or "
        "none: they render messages.",
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
TreesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tree",
        help="Draft a tree instead of a chain; repeat to compare: eagle:topk=10,depth=6,nodes=60, best:nodes=32, "
        "suffix:nodes=16,width=4.",
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        rich_help_panel=MACHINE,
        help="On a CPU, run rounds as compiled programs: faster, after a minute for each, and kept for the next time.",
    ),
]
DatasetOption = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "--prompts",
        autocompletion=prompt_sets,
        rich_help_panel=PROMPTS,
        help="mt-bench (default), zoo (bundled, default for zoo: targets), humaneval, …, a JSONL file, a .txt file "
        "with a prompt in each line, or a Hub dataset. A row has messages, conversations, turns, prompt, data or "
        "question; or text, gone on with as it is.",
    ),
]
LimitOption = Annotated[
    int | None, typer.Option(rich_help_panel=PROMPTS, help="Use this many prompts, spread over the set.")
]
NewTokensOption = Annotated[int, typer.Option(rich_help_panel=PROMPTS, help="Tokens to generate per prompt, at most.")]
ContextOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=PROMPTS,
        help="Put other text of the set before each prompt, up to as many tokens, as 1k,4k,16k.",
    ),
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
        help="A rarer setting, as top_p=0.9 or verification=block; repeatable. --settings lists all.",
    ),
]

# What is trained, and on which data.
RowsArgument = Annotated[
    str,
    typer.Argument(
        help="A JSONL, JSON or parquet file, a .txt file with a prompt in each line, a folder of these, or a Hub "
        "dataset. A row has messages, conversations, turns, prompt, data or question; or text, gone on with as it is."
    ),
]
MediaRootOption = Annotated[
    Path | None,
    typer.Option("--media-root", help="The folder below which the images of rows lie; default: that of their file."),
]
SampleMediaRootOption = Annotated[
    Path | None,
    typer.Option("--media-root", help="The folder of the samples' images; default: where they were."),
]
SplitOption = Annotated[str, typer.Option(help="The split of a Hub dataset.")]
SubsetOption = Annotated[str | None, typer.Option(help="The configuration of a Hub dataset.")]
RowLimitOption = Annotated[int | None, typer.Option(min=1, help="Take this many rows from the beginning.")]
SystemOption = Annotated[str | None, typer.Option(help="The system message of conversations that have none.")]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option("--template-option", help="NAME=VALUE for the chat template, as enable_thinking=false; repeatable."),
]

TopKOption = Annotated[int, typer.Option(min=0, help="Draw from this many tokens; 0 from all.")]
TopPOption = Annotated[float, typer.Option(help="Draw from the smallest set with this probability.")]
SamplesArgument = Annotated[Path, typer.Argument(parser=local_file, help="What `draftkit data prepare` has written.")]


def length_of_text(text: str) -> int:
    """The length of a sample that a user names. Raises `typer.BadParameter` for one in which nothing can be learned."""
    try:
        tokens = tokens_of_text(str(text))
    except ValueError:
        tokens = 0
    if tokens < 2:
        raise typer.BadParameter(f"{text} is no length: a number of tokens from 2 on, as 4096 or 32k")
    return tokens


MaxLengthOption = Annotated[
    int,
    typer.Option(parser=length_of_text, metavar="TOKENS", help="Cut samples at this many tokens, as 4096 or 32k."),
]
TensorParallelOption = Annotated[int, typer.Option(min=1, help="Devices that vLLM spreads the target over.")]
WithParentOption = Annotated[
    bool, typer.Option("--with-parent", hidden=True, help="End with the process that started this one.")
]
ReplaceFolderOption = Annotated[bool, typer.Option("--force", help="Replace a folder that draftkit has written.")]
TrainingSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        autocompletion=training_settings,
        help="SETTING=VALUE of training, as optimization.lr=1e-4 or options.steps=3; repeatable.",
    ),
]
DraftArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a unified draft.")]
LicenseOption = Annotated[
    str | None,
    typer.Option(help="The license, by the Hub's name for it; default: that of the draft's source or of its target."),
]
BaseModelOption = Annotated[
    str | None, typer.Option(help="The target's org/name on the Hub, where the draft was made for a folder.")
]
TrainedOnOption = Annotated[
    list[str] | None, typer.Option("--dataset", help="An org/name that it was trained on; repeatable.")
]
LanguagesOption = Annotated[
    list[str] | None,
    typer.Option("--language", help="A language's code, as en; repeatable. Default: those of the target's card."),
]
