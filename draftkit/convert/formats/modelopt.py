"""EAGLE-3 as NVIDIA Model-Optimizer exports it through Hugging Face.

`layers.0.` instead of `midlayer.`, no `t2d`, no embedding; nested layer ids that number outputs.
Source: NVIDIA/Model-Optimizer `modelopt/torch/export/plugins/hf_spec_export.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.eagle3 import Dialect, plan_eagle3
from draftkit.convert.facts import Facts
from draftkit.convert.modelopt import eagle_config, extra_heads
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "modelopt"
TITLE = "EAGLE-3 (NVIDIA ModelOpt export, layers.0. names)"
DIALECT = Dialect(NAME)


def recognize(checkpoint: Checkpoint) -> int:
    """The norm of layer 0's hidden input, which a draft without captured layers may lack."""
    first_layer = "layers.0.self_attn.o_proj.weight" in checkpoint.tensors
    last_state = eagle_config(checkpoint).get("use_aux_hidden_state") is False and "fc.weight" not in checkpoint.tensors
    return int(first_layer and ("layers.0.hidden_norm.weight" in checkpoint.tensors or last_state))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, DIALECT, extra_heads(checkpoint, facts))
