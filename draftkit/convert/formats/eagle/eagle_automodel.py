"""EAGLE-3 and P-EAGLE as NVIDIA NeMo Automodel trains them.

`model.` before every name but the head's, the map's and `mask_hidden`'s; its script for vLLM strips it. The config is
the whole of the target's with the draft's keys beside, so every key that the draft's class does not read is the
target's. Source: NVIDIA-NeMo/Automodel `nemo_automodel/components/speculative/eagle/draft_llama.py`,
`nemo_automodel/recipes/llm/train_eagle3.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import Dialect, plan_eagle3
from draftkit.convert.plan import Plan
from draftkit.errors import FormatError
from draftkit.layout.target import TargetFacts

NAME = "automodel"
TITLE = "EAGLE-3, P-EAGLE (NeMo Automodel layout)"
DIALECT = Dialect(NAME, {"model.": ""}, windows=False)

# What the classes of all its drafts read of the target's config, and what those of EAGLE-3 and P-EAGLE read beside.
LAYER_KEYS = {
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
}
READ = LAYER_KEYS | {
    "draft_vocab_size",
    "fc_norm",
    "mask_token_id",
    "norm_output",
    "pard_token",
    "parallel_drafting",
    "target_hidden_size",
}


def recognize(checkpoint: Checkpoint) -> int:
    """NeMo Automodel's files have its prefix or class name, or the flag that its script for vLLM adds to the config."""
    layer = "layers.0.hidden_norm.weight"
    marked = "LlamaEagle3DraftModel" in checkpoint.architectures or "parallel_drafting" in checkpoint.config
    return 3 if f"model.{layer}" in checkpoint.tensors or (marked and layer in checkpoint.tensors) else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    check_rope(checkpoint, facts)
    for key in sorted(checkpoint.config.keys() - READ):
        facts.drop(key, "not read by the draft's class: the target's, or about training")
    return plan_eagle3(checkpoint, facts, target, DIALECT)


def check_rope(checkpoint: Checkpoint, facts: Facts) -> None:
    """Raise `FormatError` where the target turns a part of each head, and the draft's class would not."""
    if facts.optional("partial_rotary_factor", float) not in (None, 1.0):
        raise FormatError("partial_rotary_factor is not 1: its class turns whole heads", where=checkpoint.config_path)
