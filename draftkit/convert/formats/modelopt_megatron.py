"""EAGLE-3 as NVIDIA Model-Optimizer exports it from Megatron: `midlayer.` names with `d2t` and without `t2d`.

The deep variant numbers its layers `midlayer.0.`, `midlayer.1.`, … . Source: NVIDIA/Model-Optimizer
`modelopt/torch/export/plugins/mcore_llama.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.eagle3 import Dialect, plan_eagle3
from draftkit.convert.facts import Facts
from draftkit.convert.formats.modelopt import extra_heads
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "modelopt-megatron"
TITLE = "EAGLE-3 (NVIDIA ModelOpt export from Megatron, midlayer. names)"


def recognise(checkpoint: Checkpoint) -> int:
    tensors = checkpoint.tensors
    one_layer = "midlayer.hidden_norm.weight" in tensors and "d2t" in tensors and "t2d" not in tensors
    return 3 if one_layer or "midlayer.0.input_layernorm.weight" in tensors else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, Dialect(NAME, "midlayer."), extra_heads(checkpoint, facts))
