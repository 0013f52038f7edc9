"""What of a result file was measured with one draft.

A cell belongs to a draft when it has the draft's digest (`draft_sha256`), or, where it has none, when it was measured
under the path or the name of the draft's folder. Made-up acceptance (`synthetic` verification) is no measurement.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftkit.errors import DraftkitError, command
from draftkit.hub.local_paths import names_of_paths
from draftkit.io.jsonfile import read_object
from draftkit.results.cell import Cell
from draftkit.results.record import Result, named_result, read_result, result_from
from draftkit.results.verdict import well_known

EVAL_FOLDER = "eval"  # in a draft's folder: what was measured with it
ABOUT_SPEED = ("speed-unexplained", "speed-disturbed", "unequal-baseline")  # warnings, each of one cell


def own_part(path: Path, folder: Path, sha256: str, name: str) -> tuple[Result, dict[str, object]]:
    """The part of a result file that was measured with the draft in `folder`, whose digest is `sha256`.

    As a result, and as the file has it, with fields that a later version may have added; without paths of this machine.
    All its cells carry the digest, and call the draft `name`. Raises `SourceError`/`FormatError` for a file that is no
    result, `DraftkitError` when nothing in it was measured with this draft.
    """
    measured = read_result(path)
    places = [i for i, cell in enumerate(measured.cells) if _belongs(cell, folder, sha256)]
    if not places:
        raise _not_measured(measured, path, folder)
    stored = named_result(read_object(path))
    result = result_from(stored, path)
    names = {result.cells[i].draft for i in places}
    models = [i for i, model in enumerate(result.speed_models) if model.draft in names]
    part: dict[str, Any] = stored | {
        "cells": [stored["cells"][i] | {"draft_sha256": sha256, "draft": name} for i in places],
        "speed_models": [stored["speed_models"][i] | {"draft": name} for i in models],
    }
    others = {cell.draft for cell in result.cells} - names
    part["warnings"] = [
        warning | {"message": _renamed(read.message, names, name)}
        for warning, read in zip(stored.get("warnings", []), result.warnings, strict=True)
        if not read.message.startswith(_beginnings(others))
    ]
    part.pop("verdicts", None)  # they compare all drafts
    return result_from(part, path), part


def _beginnings(drafts: Iterable[str]) -> tuple[str, ...]:
    """With what messages begin that are about one of these drafts."""
    return tuple(f"{draft}{after}" for draft in drafts for after in (", ", " "))


def _renamed(message: str, drafts: Iterable[str], name: str) -> str:
    """A message with another name for one of these drafts, where it is about one."""
    called = next((draft for draft in drafts if message.startswith(_beginnings([draft]))), None)
    return message if called is None else name + message.removeprefix(called)


def with_sure_speeds(result: Result) -> Result:
    """The result without speed-ups that have no interval, as those of one pass, or that their run has doubts of, and
    without warnings of them: a card's reader cannot look at the run, and two runs one after the other may differ by
    what else the machine did.
    """
    cells = tuple(cell if _is_sure(cell) else _untimed(cell) for cell in result.cells)
    shown = tuple(cell.name for cell in cells if cell.speedup is not None)
    warnings = tuple(w for w in result.warnings if w.name not in ABOUT_SPEED or w.message.startswith(shown))
    return replace(result, cells=cells, warnings=warnings)


def _is_sure(cell: Cell) -> bool:
    return cell.speedup_interval is not None and cell.speedup_interval.bounds is not None and well_known(cell)


def _untimed(cell: Cell) -> Cell:
    return replace(cell, speedup=None, speedup_interval=None, baseline_tokens_per_second=None)


def _belongs(cell: Cell, folder: Path, sha256: str) -> bool:
    if cell.verification == "synthetic":
        return False
    return _is_named(cell, folder) if cell.draft_sha256 is None else cell.draft_sha256 == sha256


def _is_named(cell: Cell, folder: Path) -> bool:
    own = os.path.realpath(folder)
    return os.path.realpath(os.path.expanduser(cell.draft)) == own or cell.draft == names_of_paths([own]).get(own)


def _not_measured(result: Result, path: Path, folder: Path) -> DraftkitError:
    """Why no cell belongs to the draft."""
    own = [cell for cell in result.cells if _is_named(cell, folder)] or result.cells
    measure = command("draftkit", "eval", "--target", own[0].target, "--draft", folder, "--json")
    measure += f" > {command(path.name)}"
    if path.parent == folder / EVAL_FOLDER:
        return DraftkitError(
            f"{path.name} was measured with other weights or facts than {folder} holds now",
            where=path,
            hint=f"remove the file, or measure again: {measure}",
        )
    drafts = ", ".join(sorted({cell.draft for cell in result.cells}))
    return DraftkitError(
        f"{path.name} has no measurement of this draft",
        where=folder,
        expected=f"a cell with its folder or its digest; the drafts in the file: {drafts}",
        hint=measure,
    )
