"""EAGLE-3 as SafeAILab publishes it.

Tensors without prefix, the one decoder layer under `midlayer.`; `fc` over three captured target states; its own head
over a reduced vocabulary with `d2t` (offsets) and `t2d` (mask). The captured layers are not in the config: the
reference hard-codes 2, N//2 and N−3. Source: SafeAILab/EAGLE `eagle/model/cnets.py`, `modeling_llama_kv.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.eagle3 import Dialect, plan_eagle3
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "eagle3"
TITLE = "EAGLE-3 (SafeAILab layout)"
DIALECT = Dialect(NAME, "midlayer.")


def recognise(checkpoint: Checkpoint) -> int:
    return int("midlayer.hidden_norm.weight" in checkpoint.tensors)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, DIALECT, {})
