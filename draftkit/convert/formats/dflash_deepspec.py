"""DSpark as DeepSpec trains and stores it, with its DFlash baseline, which has no Markov head (markov_rank 0).

All keys at the top, frozen copies of the target's embedding and head in the file; every row predicts, the anchor too.
Source: deepseek-ai/DeepSpec `deepspec/modeling/dspark`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.dflash_reading import BlockLayout, plan_block_draft
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "deepspec"
TITLE = "DSpark (DeepSpec layout)"
LAYOUT = BlockLayout(NAME, slots="anchor-first", last_state="after_norm")


def recognize(checkpoint: Checkpoint) -> int:
    return 3 * ("Qwen3DSparkModel" in checkpoint.architectures and "speculators_model_type" not in checkpoint.config)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_block_draft(checkpoint, facts, target, LAYOUT)
