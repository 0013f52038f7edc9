"""`draftkit prepare prune-vocab`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from draftkit.cli.completion import models
from draftkit.cli.shared import (
    JsonOption,
    SourceArgument,
    TrustOption,
    console,
    print_json,
    quiet_transformers,
    say_next,
)


def prune_vocab(
    draft: SourceArgument,
    data: Annotated[Path, typer.Option(help="Samples that `draftkit data prepare` wrote: what the target says.")],
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
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that draftkit has written.")] = False,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let a draft propose the most frequent tokens only. Each of its steps is cheaper then."""
    quiet_transformers()
    from draftkit.engines.vllm.serve import method_note
    from draftkit.errors import DraftkitError
    from draftkit.prepare.prune import plan_pruning
    from draftkit.report.vocabulary import show_pruning

    if not plan and (size is None or out is None):
        raise DraftkitError("pruning takes --size and --out", hint="--plan shows what sizes allow")
    pruning = plan_pruning(draft, data, size=size, target=target, keep=keep or [], k=k)
    if out is not None and not plan:
        pruning.write(out, force=force)
    result = pruning.to_dict() | {"out": None if plan else str(out)}
    if as_json:
        print_json(result)
        return
    show_pruning(console(), result)
    if not plan:
        for note in method_note(pruning.source.spec):
            print(note, file=sys.stderr)
        named = target or pruning.source.provenance.target or "TARGET"
        say_next("eval", "--target", named, "--draft", out)
