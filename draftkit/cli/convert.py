"""`draftkit convert` and `inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftkit.cli.options import (
    FormatOption,
    JsonOption,
    OptionalSourceArgument,
    OptionalTargetOption,
    ReleaseOption,
    ReplaceFolderOption,
    RevisionOption,
    SourceArgument,
    VerboseOption,
    draft_facts,
    models,
)
from draftkit.cli.output import console, counted_progress, print_json, say_next
from draftkit.cli.settings import SettingsOption
from draftkit.errors import DraftkitError

if TYPE_CHECKING:
    from draftkit.convert.api import Conversion


def _destinations() -> list[str]:
    from draftkit.convert.destinations import destinations

    return destinations()


OutArgument = Annotated[
    Path | None,
    typer.Argument(help="The folder to write, OUT.gguf for --to gguf; default: the source's name-draftkit."),
]
LayoutOption = Annotated[
    str, typer.Option(autocompletion=_destinations, help="The layout to write; `draftkit inspect --formats` lists all.")
]
StoredOption = Annotated[
    str | None,
    typer.Option("--type", help="How the matrices of a GGUF file are stored: f32, f16, bf16, q8_0, q4_0."),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="Quantize the weights: fp8-dynamic, w4a16-g128, nvfp4a16, modelopt-fp8 or modelopt-w4a16-nvfp4; or "
        "part:format pairs, as mlp:fp8-dynamic,qkv:nvfp4a16."
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option(
        help="Take this part out: mtp, a target's multi-token prediction heads; adapter, that of a checkpoint of "
        "train --lora, as peft has it."
    ),
]
IntoOption = Annotated[
    str | None,
    typer.Option(
        autocompletion=models,
        help="Put heads (the source) back into this target: there, or in OUT, which shares its weights; of a GGUF "
        "file in OUT.gguf.",
    ),
]
FactsOption = Annotated[
    list[str] | None,
    typer.Option("--set", autocompletion=draft_facts, help="FACT=VALUE instead of what was found; repeatable."),
]
IgnoredKeysOption = Annotated[
    list[str] | None,
    typer.Option("--ignore-key", help="A config key whose effect is unknown, to be ignored; repeatable."),
]
DigestOption = Annotated[
    bool, typer.Option("--digest", help="Take the SHA-256 of large files too, and compare it with the Hub's.")
]
LossyOption = Annotated[
    bool, typer.Option("--allow-lossy", help="Write what the destination can hold, and record what it cannot.")
]


def convert(
    source: SourceArgument,
    out: OutArgument = None,
    target: OptionalTargetOption = None,
    revision: RevisionOption = None,
    to: LayoutOption = "unified",
    stored: StoredOption = None,
    quantize: QuantizeOption = None,
    format: FormatOption = None,
    part: PartOption = None,
    into: IntoOption = None,
    facts: FactsOption = None,
    list_settings: SettingsOption = None,
    ignored_keys: IgnoredKeysOption = None,
    check: Annotated[bool, typer.Option("--check", help="Read every tensor first and refuse NaN and inf.")] = False,
    digest: DigestOption = False,
    allow_lossy: LossyOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    force: ReplaceFolderOption = False,
    release: ReleaseOption = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a draft of any known format into the unified layout. With --to, into another."""
    from draftkit.convert.api import default_output, plan_conversion
    from draftkit.io.settings import assignments

    if part not in (None, "mtp", "adapter"):
        raise DraftkitError(f"there is no part {part}", expected="--part mtp or --part adapter")
    if part == "adapter":
        return _take_adapter(source, out or Path("adapter"), as_json)
    if into is not None:
        return _put_heads_back(source, into, out, as_json)
    overrides = assignments(facts or [])
    conversion = plan_conversion(
        source,
        to=to,
        target=target,
        revision=revision,
        format=part or format,
        overrides=overrides,
        ignored_keys=ignored_keys or (),
        digest=digest,
        stored=stored,
        quantize=quantize,
    )
    if check:
        conversion.check_finite()
    if not dry_run:
        out = out or default_output(conversion)
        with counted_progress("convert", conversion.output_bytes, in_bytes=True) as on_bytes:
            conversion.write(out, force=force, allow_lossy=allow_lossy, on_bytes=on_bytes)
    if as_json:
        from draftkit.report.terminal.conversion import conversion_json

        print_json(conversion_json(conversion) | ({} if dry_run else {"out": str(out)}))
    else:
        _report_conversion(conversion, None if dry_run else out, verbose)


def _take_adapter(source: str, out: Path, as_json: bool) -> None:
    from draftkit.convert.api import take_adapter

    taken = take_adapter(source, out)
    if as_json:
        print_json({"schema": 1, "out": str(taken)})
    else:
        console().print(f"written: {taken}, an adapter (peft)", soft_wrap=True, markup=False)


def _put_heads_back(source: str, target: str, out: Path | None, as_json: bool) -> None:
    from draftkit.convert.api import put_heads_back
    from draftkit.engines.llama_cpp import serve_with_heads

    folder, changed = put_heads_back(source, target, out)
    if as_json:
        print_json({"schema": 1, "out": str(folder), "changed": changed})
        return
    console().print(f"{source} → {folder}; written anew: {', '.join(changed) or 'nothing'}", soft_wrap=True)
    if folder.suffix == ".gguf":
        console().print(f"llama.cpp: {serve_with_heads(folder)}", soft_wrap=True, markup=False)


def inspect(
    source: OptionalSourceArgument = None,
    target: OptionalTargetOption = None,
    revision: RevisionOption = None,
    format: FormatOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Of a target: read the tensors of its multi-token prediction heads too.")
    ] = False,
    formats: Annotated[
        bool, typer.Option("--formats", help="List the formats that are read, and those that are written.")
    ] = False,
    release: ReleaseOption = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint is, and its known defects. Its facts, the most doubtful first, and tensors; of a target its
    multi-token prediction heads."""
    from draftkit.convert.api import Reading, describe_checkpoint, named_target_facts, target_with_heads
    from draftkit.report.terminal.conversion import (
        after_inspecting,
        draft_json,
        findings_of_heads,
        formats_json,
        formats_table,
        heads_json,
        reading_json,
        show_draft,
        show_heads,
        show_reading,
    )

    if formats:
        print_json(formats_json()) if as_json else console().print(formats_table())
        return
    if source is None:
        raise typer.BadParameter("Missing argument 'SOURCE' (or --formats).")
    if format is None and (target_and_heads := target_with_heads(source, revision=revision)):
        seen = findings_of_heads(*target_and_heads, read=check)
        if as_json:
            print_json(heads_json(*target_and_heads, seen))
        else:
            show_heads(console(), *target_and_heads, seen, read=check)
        return
    found = describe_checkpoint(source, target=target, revision=revision, format=format)
    if isinstance(found, Reading):
        print_json(reading_json(found)) if as_json else show_reading(console(), found, verbose=verbose)
        if found.plan.refusal is not None:
            raise found.plan.refusal
    else:
        facts = named_target_facts(target)
        print_json(draft_json(found, facts)) if as_json else show_draft(console(), found, facts, verbose=verbose)
    if not as_json:
        say_next(*after_inspecting(found, source, target))


def _report_conversion(conversion: Conversion, out: Path | None, verbose: bool) -> None:
    """The plan, or, where there is an output, what was written and the next command."""
    from draftkit.report.terminal.conversion import report_conversion, show_conversion
    from draftkit.runtime.drafters import refusal_to_run

    if out is None:
        show_conversion(console(), conversion, verbose=verbose)
        return
    report_conversion(console(), conversion, out, verbose=verbose)
    if conversion.export is None and refusal_to_run(conversion.require_draft().spec) is None:
        target = conversion.target.name if conversion.target else "TARGET"
        say_next("eval", "--target", target, "--draft", out)
