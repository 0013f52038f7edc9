"""DSpark as ModelOpt exports it: SpecForge's nested config, and the heads' tensors at the top.

`shift_label` states that every row predicts the next token. Source: NVIDIA/Model-Optimizer
`speculative/plugins/modeling_dspark.py`, `export/plugins/hf_spec_export.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block import dflash_specforge
from draftkit.convert.formats.block.dflash import plan_dflash
from draftkit.convert.formats.block.reading import lift_nested
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "modelopt-dspark"
TITLE = "DSpark (ModelOpt layout)"
MARKOV_PARTS = ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")
RENAMES = {part: f"markov_head.{part}" for part in MARKOV_PARTS} | {"confidence_proj.": "confidence_head.proj."}
LAYOUT = replace(dflash_specforge.LAYOUT, name=NAME, renames=RENAMES, shifts=True)


def recognize(checkpoint: Checkpoint) -> int:
    return 5 * ("markov_w1.weight" in checkpoint.tensors and dflash_specforge.is_dspark(checkpoint))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    return plan_dflash(checkpoint, facts, target, LAYOUT)
