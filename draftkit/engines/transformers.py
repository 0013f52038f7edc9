"""What transformers' assisted generation does with a target's multi-token prediction heads."""

from __future__ import annotations

from draftkit.engines.releases import Release, each, has, lacks
from draftkit.layout.mtp import HeadKind

PRESENT = Release(
    engine="transformers",
    number="5.23",
    methods=each(has("generation/configuration_utils.py", "self.use_mtp"), "use_mtp"),
)

# By `model_type`: the targets whose heads transformers runs, and those that it refuses.
WITH_HEADS = each(has("modeling_layers.py", "MtpModel"), "deepseek_v3 glm4_moe")
RECURRENT = each(
    lacks("generation/utils.py", "self._is_stateful"),
    "qwen3_next qwen3_5 qwen3_5_moe qwen3_5_text qwen3_5_moe_text nemotron_h",
)


def use_of_heads(kind: HeadKind, model_type: str) -> str:
    """How transformers' generic multi-token prediction heads (`modeling_layers.py`, `MtpModel`) treat a kind of head,
    and where they compute otherwise than vLLM."""
    if model_type in RECURRENT:
        return "none: its assisted generation refuses recurrent layers"
    known = "one token for each head" if model_type in WITH_HEADS else "if its release knows the kind"
    differing = []
    if kind.parts is not None and kind.hidden_state == "before_norm":
        differing.append("feeds the target's state after its norm, vLLM before it")
    if kind.parts is not None and kind.feedback == "pre_norm":
        differing.append("feeds the head's own state after its last norm, vLLM before it")
    if kind.parts is not None and kind.zero_first_embedding:
        differing.append("zeroes no embedding, vLLM the first")
    return "; it ".join([f"generate(use_mtp=True), {known}", *differing])
