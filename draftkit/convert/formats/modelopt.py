"""EAGLE-3 as NVIDIA Model-Optimizer exports it through Hugging Face.

`layers.0.` instead of `midlayer.`, no `t2d`, no embedding; nested layer ids that number outputs.
Source: NVIDIA/Model-Optimizer `modelopt/torch/export/plugins/hf_spec_export.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.eagle3 import Dialect, plan_eagle3
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "modelopt"
TITLE = "EAGLE-3 (NVIDIA ModelOpt export, layers.0. names)"
DIALECT = Dialect(NAME, "layers.0.")


def recognise(checkpoint: Checkpoint) -> int:
    return int("layers.0.hidden_norm.weight" in checkpoint.tensors or _reads_last_state(checkpoint))


def _reads_last_state(checkpoint: Checkpoint) -> bool:
    """With `use_aux_hidden_state` false there is neither `fc` nor `hidden_norm`."""
    nested = checkpoint.config.get("eagle_config")
    return isinstance(nested, dict) and nested.get("use_aux_hidden_state") is False


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, DIALECT, extra_heads(checkpoint, facts))


def extra_heads(checkpoint: Checkpoint, facts: Facts) -> dict[str, str]:
    """EagleMedusa's parallel heads, which no engine loads: dropped, and noted as a loss."""
    heads = [name for name in checkpoint.tensors if name.startswith("parallel_draft_heads.")]
    if heads:
        facts.lose(f"{len(heads)} tensors of parallel draft heads (EagleMedusa), which no engine loads")
    return dict.fromkeys(heads, "a parallel draft head, which no engine loads")
