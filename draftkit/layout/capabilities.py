"""What a draft asks of an engine beyond what every draft of its method has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Capability:
    """One row of a family's `NEEDS`.

    - `name`: by which the tables of releases (`engines/NAME/releases.py`) say whether an engine has it. What takes two
      facts at once is a capability of its own.
    - `what`: the thing that the draft has, in words after "runs".
    - `without`: what an engine without the capability does instead, beginning with the verb: the engine puts its own
      name before it. `{draft.FACT}` stands for a fact of the draft.
    - `needed`: whether a draft of the family needs it.
    - `layout`: the only layout, as `--to` names it, whose folders ask for it; None for all.
    """

    name: str
    what: str
    without: str
    needed: Callable[[Any], bool]
    layout: str | None = None


ACTIVATION = Capability(
    "draft-activation", "another activation than silu", "has silu in its draft layers, not {draft.decoder.hidden_act}",
    lambda draft: draft.decoder.hidden_act != "silu",
)  # fmt: skip
