"""`draftkit card`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftkit.cli.shared import JsonOption, print_json, say_next

DraftArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a unified draft.")]
LicenseOption = Annotated[
    str | None,
    typer.Option(help="The license, by the Hub's name for it; default: that of the draft's source or of its target."),
]


def card(
    folder: DraftArgument,
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RESULT.json…", help="What `draftkit eval --json` printed; kept in DIR/eval."),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Option(help="org/name under which the draft will be found; default: ./NAME of the folder."),
    ] = None,
    license: LicenseOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a card that draftkit has not written, or that was edited.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a draft's model card into its folder. It says what was measured, with figures."""
    from draftkit.publish import write_card

    written = write_card(folder, results or [], repo=repo, license=license, force=force)
    if as_json:
        print_json({"schema": 1, "files": [str(path) for path in written]})
        return
    for path in written:
        print(path)
    say_next("push", folder, repo or "ORG/NAME", "--dry-run")
