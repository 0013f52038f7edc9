"""EAGLE-3 as NVIDIA Model-Optimizer exports it from Megatron: `midlayer.` names with `d2t` and without `t2d`.

The deep variant numbers its layers `midlayer.0.`, `midlayer.1.`, …, and calls the first norm of each `hidden_norm`.
The config is that of Llama 3.1 with the draft's sizes. Source: NVIDIA/Model-Optimizer
`modelopt/torch/export/plugins/mcore_llama.py`, `unified_export_megatron.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.eagle_modelopt import extra_heads, is_marked
from draftkit.convert.formats.eagle.reading import Dialect, norms_of_deeper_layers, plan_eagle3
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "modelopt-megatron"
TITLE = "EAGLE-3 (NVIDIA ModelOpt export from Megatron, midlayer. names)"
DEEP = "midlayer.0.self_attn.o_proj.weight"


def recognize(checkpoint: Checkpoint) -> int:
    tensors = checkpoint.tensors
    exported = is_marked(checkpoint) or ("d2t" in tensors and "t2d" not in tensors)
    return 3 if DEEP in tensors or ("midlayer.self_attn.o_proj.weight" in tensors and exported) else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    renames = {"midlayer.": "layers.0."}
    if DEEP in checkpoint.tensors:
        renames = norms_of_deeper_layers(checkpoint, "midlayer.") | {"midlayer.": "layers."}
    return plan_eagle3(checkpoint, facts, target, Dialect(NAME, renames), extra_heads(checkpoint, facts))
