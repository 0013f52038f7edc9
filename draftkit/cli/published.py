"""`draftkit published`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from draftkit.cli.options import JsonOption
from draftkit.cli.output import console, print_json
from draftkit.errors import DraftkitError


def published(
    pair: Annotated[
        list[str] | None, typer.Argument(help="Words of a target, draft, method or set, as Qwen3-8B dspark.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print published acceptance lengths and speeds. Each with its link and how it was measured, as far as its source
    says."""
    from draftkit.evaluate.published import published_rows, rows_of
    from draftkit.report.terminal.published import published_table

    words = " ".join(pair or ())
    rows = rows_of(words)
    if not rows:
        targets = ", ".join(dict.fromkeys(row.target for row in published_rows()))
        raise DraftkitError(f"nothing that was published is known for {words}", expected=f"words of: {targets}")
    if as_json:
        print_json({"schema": 1, "published": [asdict(row) for row in rows]})
        return
    console().print(published_table(rows))
