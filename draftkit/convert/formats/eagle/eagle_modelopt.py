"""EAGLE-3 as NVIDIA Model-Optimizer exports it through Hugging Face.

`layers.0.` instead of `midlayer.`, no `t2d`, no embedding; nested layer ids that number outputs.
Source: NVIDIA/Model-Optimizer `modelopt/torch/export/plugins/hf_spec_export.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import Dialect, plan_eagle3
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "modelopt"
TITLE = "EAGLE-3 (NVIDIA ModelOpt export, layers.0. names)"
DIALECT = Dialect(NAME)

# Keys of `eagle_config` that only its exporters write (`hf_spec_configs.py`, `unified_export_megatron.py`).
MARKS = {"next_layer_regular", "use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm"}


def recognize(checkpoint: Checkpoint) -> int:
    """The norm of layer 0's hidden input, which a draft without captured layers may lack."""
    first_layer = "layers.0.self_attn.o_proj.weight" in checkpoint.tensors
    last_state = eagle_config(checkpoint).get("use_aux_hidden_state") is False and "fc.weight" not in checkpoint.tensors
    return int(first_layer and ("layers.0.hidden_norm.weight" in checkpoint.tensors or last_state))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, DIALECT, extra_heads(checkpoint, facts))


def eagle_config(checkpoint: Checkpoint) -> dict[str, object]:
    """The nested `eagle_config` as it stands, empty without one."""
    nested = checkpoint.config.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def is_marked(checkpoint: Checkpoint) -> bool:
    """Whether the config can only come from ModelOpt."""
    return bool(MARKS & eagle_config(checkpoint).keys())


def extra_heads(checkpoint: Checkpoint, facts: Facts) -> dict[str, str]:
    """EagleMedusa's parallel heads, which no engine loads: dropped, and noted as a loss."""
    heads = [name for name in checkpoint.tensors if name.startswith("parallel_draft_heads.")]
    if heads:
        facts.lose(f"{len(heads)} tensors of parallel draft heads (EagleMedusa), which no engine loads")
    return dict.fromkeys(heads, "a parallel draft head, which no engine loads")
