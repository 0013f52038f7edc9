"""What the exports of NVIDIA Model-Optimizer have in common."""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts

# Keys of `eagle_config` that only its exporters write (`hf_spec_configs.py`, `unified_export_megatron.py`).
MARKS = {"next_layer_regular", "use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm"}


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
