"""What of a result file was measured with one draft.

A cell belongs to a draft when it has the draft's digest (`draft_sha256`), or, where it has none, when the path that it
was measured under is the draft's folder. Made-up acceptance (`synthetic` verification) is no measurement.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.errors import DraftkitError
from draftkit.io.jsonfile import read_object
from draftkit.results.record import read_result

EVAL_FOLDER = "eval"  # in a draft's folder: what was measured with it

Stored = dict[str, Any]  # a result as its file has it, with every field


def own_part(path: Path, folder: Path, sha256: str) -> Stored:
    """The part of a result file that was measured with the draft in `folder`, whose digest is `sha256`.

    All its cells carry the digest. Raises `SourceError`/`FormatError` for a file that is no result, `DraftkitError`
    when nothing in it was measured with this draft.
    """
    read_result(path)  # or it says what is wrong
    stored: Stored = read_object(path)
    own = [
        cell for cell in stored["cells"] if _belongs(cell, folder, sha256) and cell.get("verification") != "synthetic"
    ]
    if not own:
        raise _not_measured(stored, path, folder)
    names = {cell["draft"] for cell in own}
    models = [model for model in stored.get("speed_models") or [] if model["draft"] in names]
    return stored | {"cells": [cell | {"draft_sha256": sha256} for cell in own], "speed_models": models}


def _belongs(cell: Mapping[str, Any], folder: Path, sha256: str) -> bool:
    digest = cell.get("draft_sha256")
    return _is_named(cell, folder) if digest is None else digest == sha256


def _is_named(cell: Mapping[str, Any], folder: Path) -> bool:
    return os.path.realpath(os.path.expanduser(cell["draft"])) == os.path.realpath(folder)


def _not_measured(stored: Stored, path: Path, folder: Path) -> DraftkitError:
    """Why no cell belongs to the draft."""
    own = [cell for cell in stored["cells"] if _is_named(cell, folder)] or stored["cells"]
    target = own[0]["target"] if own else "TARGET"
    measure = f"draftkit eval --target {target} --draft {folder} --json > {path.name}"
    if own and path.parent == folder / EVAL_FOLDER:
        return DraftkitError(
            f"{path.name} was measured with other weights or facts than {folder} holds now",
            where=path,
            hint=f"remove the file, or measure again: {measure}",
        )
    drafts = ", ".join(sorted({cell["draft"] for cell in stored["cells"]})) or "none"
    return DraftkitError(
        f"{path.name} has no measurement of this draft",
        where=folder,
        expected=f"a cell with its folder or its digest; the drafts in the file: {drafts}",
        hint=measure,
    )
