"""EAGLE-3 as SpecForge trains it and SGLang serves it.

SafeAILab's tensors, `architectures` `LlamaForCausalLMEagle3`, nested layer ids that number outputs, and `d2t`/`t2d`
even for a full vocabulary. Source: sgl-project/SpecForge `specforge/modeling/draft/llama3_eagle.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.eagle3 import Dialect, plan_eagle3
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "specforge"
TITLE = "EAGLE-3 (SpecForge, SGLang layout)"
DIALECT = Dialect(NAME, "midlayer.", norm_output="logits")


def recognise(checkpoint: Checkpoint) -> int:
    is_eagle3 = "midlayer.hidden_norm.weight" in checkpoint.tensors
    return 2 if is_eagle3 and "LlamaForCausalLMEagle3" in checkpoint.architectures else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, DIALECT, {})
