"""DFlash as z-lab publishes it, which SpecForge, ModelOpt and NeMo Automodel write too; DFlash2 and JetSpec with it.

No embedding and no head: they are the target's. `dflash_config` nests the mask token and the layers whose outputs are
captured. Source: z-lab/dflash `model.py`, vLLM 0.32 `qwen3_dflash.py`, `qwen3_dflash2.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.dflash_reading import NESTED, BlockLayout, plan_block_draft
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "dflash"
TITLE = "DFlash, DFlash2 (z-lab layout)"
LAYOUT = BlockLayout(NAME, slots="fill-in", last_state="after_norm")


def recognize(checkpoint: Checkpoint) -> int:
    return 2 * ("hidden_norm.weight" in checkpoint.tensors)  # other drafts norm hidden states within their first layer


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    if isinstance(checkpoint.config.get(NESTED), dict):
        facts.lift(NESTED)
    return plan_block_draft(checkpoint, facts, target, LAYOUT)
