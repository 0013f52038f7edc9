"""Which public configs of drafts does draftkit read? `python -m scripts.check.public_configs [FOLDER] [--write]`

Each `config.json` of the folder (any file of JSON that names an architecture), else each stored one
(`tests/fixtures/checkpoints/public_configs.json`), gets a file of tensors of the right names and shapes, and goes
through `inspect` and `convert --dry-run`. Printed is a table of what was read, as which format; refused by name; and
unknown, which is what no released engine loads. `--write` stores the outcomes of the stored ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fixtures.checkpoints.public_drafts import STORED, public_configs, write_public_draft

from draftkit.convert.api import inspect_checkpoint, plan_conversion
from draftkit.errors import DraftkitError, FormatError
from scripts._bench import arguments


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    stored = public_configs() if asked.folder is None else {}
    configs = {name: one["config"] for name, one in stored.items()}
    if asked.folder is not None:
        configs = {path.name: json.loads(path.read_text()) for path in sorted(asked.folder.glob("*.json"))}
        configs = {name: config for name, config in configs.items() if config.get("architectures")}
    found = {name: outcome_of(config) for name, config in configs.items()}
    for name, outcome in sorted(found.items(), key=lambda row: (row[1].partition(":")[0], row[0])):
        print(f"{outcome:60} {name}")
    if asked.write:
        kept = {name: one | {"outcome": found[name]} for name, one in stored.items()}
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(kept.items()))
        STORED.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    sys.exit(any(outcome.startswith("unknown") for outcome in found.values()))


def outcome_of(config: Mapping[str, Any]) -> str:
    """`read: FORMAT`, `incomplete: FORMAT` where a fact has to be given, `refused: WHAT`, or `unknown`."""
    with tempfile.TemporaryDirectory() as name:
        source = str(write_public_draft(Path(name) / "draft", config))
        try:
            inspect_checkpoint(source)
            conversion = plan_conversion(source)
        except FormatError as error:
            said = str(error).split("\n")[0]
            return f"unknown: {said}" if "no known draft format" in said else f"refused: {said[:120]}"
        except DraftkitError as error:
            return f"refused: {str(error).split(chr(10))[0][:120]}"
    assert conversion.reading is not None
    plan = conversion.reading.plan
    return f"{'read' if conversion.draft is not None else 'incomplete'}: {plan.format}"


if __name__ == "__main__":
    main()
