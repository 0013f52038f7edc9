"""A result file that grows cell by cell, so that an interrupted sweep can go on."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftkit.errors import DraftkitError, FormatError
from draftkit.hub.local_paths import named, names_of_paths
from draftkit.io.atomic import write_file
from draftkit.io.lock import sole_writer
from draftkit.results.cell import DIGESTS, Cell
from draftkit.results.record import SCHEMA, named_result, read_result, result_json


def replaced_by(cell: Cell, cells: list[Cell]) -> str | None:
    """Take the saved cell that was asked for as `cell` out of `cells`; why it no longer counts, None without one."""
    saved = next((other for other in cells if other.asked == cell.asked), None)
    if saved is None:
        return None
    cells.remove(saved)
    changed = [name.removesuffix("_sha256") for name in DIGESTS if saved.digests[name] != cell.digests[name]]
    return f"{' and '.join(changed)} changed since the saved figure was measured"


class ResultFile:
    """The result in a file: written anew, and whole, after each cell.

    With `resume`, cells that it holds are kept; `add` replaces one that was asked for alike. Raises `DraftkitError`
    where there is a file and no `resume`, when it goes on under other settings or versions, and while another process
    has it open; `FormatError` for a file that is no result.
    """

    def __init__(self, path: Path, *, resume: bool):
        self.path = path
        self.cells: list[Cell] = []
        self._provenance: dict[str, object] | None = None
        if path.is_dir():
            raise DraftkitError("the result is a folder", where=path, hint="name a file")
        held = ExitStack()
        weakref.finalize(self, held.close)
        held.enter_context(sole_writer(path))
        if not path.exists():
            return
        if not resume:
            raise DraftkitError(f"{path} exists", where=path, hint="--resume goes on with it; or name another file")
        try:
            stored = read_result(path)
        except FormatError as error:
            hint = "name another file"
            raise FormatError(f"not the result of an evaluation: {error}", where=path, hint=hint) from error
        self.cells, self._provenance = list(stored.cells), stored.provenance

    def begin(self, provenance: dict[str, object], sources: Sequence[str] = ()) -> None:
        """Say how the cells to come are made, and what target and drafts are called now: the file has names of them."""
        paths = {name: source for source, name in names_of_paths([[*sources]]).items() if source in sources}
        self.cells = [
            replace(cell, target=paths.get(cell.target, cell.target), draft=paths.get(cell.draft, cell.draft))
            for cell in self.cells
        ]
        if self._provenance is not None:
            runs = (named(self._provenance), named(_as_read_back(provenance)))
            before, now = ({k: v for k, v in run.items() if k != "date"} for run in runs)
            differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            if differing:
                raise DraftkitError(
                    f"the result was begun with other {', '.join(differing)}",
                    where=self.path,
                    hint="resume with the same settings and versions, or name another file",
                )
        self._provenance = provenance

    def add(self, cell: Cell) -> None:
        replaced_by(cell, self.cells)
        self.cells.append(cell)
        cells = [cell.to_dict() for cell in self.cells]
        self.write({"schema": SCHEMA, "provenance": self._provenance, "cells": cells})

    def write(self, result: Mapping[str, Any]) -> None:
        write_file(self.path, (result_json(named_result(result)) + "\n").encode())


def _as_read_back(value: object) -> Any:
    """The value as a file gives it back."""
    return json.loads(result_json(value))
