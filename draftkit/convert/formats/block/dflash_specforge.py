"""DSpark as SpecForge trains it: everything but the decoder's sizes nested in `dflash_config`, no embedding, no head.

Its labels are anchor-first, although its own `spec_generate` reads the rows as if they were filled in. Early files have
the heads under `logit_head.`. Source: sgl-project/SpecForge `modeling/draft/dspark.py`,
`algorithms/common/dflash_family_model.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.dflash import plan_dflash
from draftkit.convert.formats.block.reading import BlockLayout, lift_nested
from draftkit.convert.plan import Plan
from draftkit.layout.block import NESTED
from draftkit.layout.target import TargetFacts

NAME = "specforge-dspark"
TITLE = "DSpark (SpecForge layout)"
LAYOUT = BlockLayout(NAME, slots="anchor-first", last_state="after_norm", renames={"logit_head.": ""})


def recognize(checkpoint: Checkpoint) -> int:
    return 4 * is_dspark(checkpoint)


def is_dspark(checkpoint: Checkpoint) -> bool:
    """Whether the nested config names DSpark's heads."""
    nested = checkpoint.config.get(NESTED)
    return isinstance(nested, dict) and nested.get("projector_type") == "dspark"


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    return plan_dflash(checkpoint, facts, target, LAYOUT)
