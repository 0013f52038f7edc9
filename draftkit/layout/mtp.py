"""Where targets keep their multi-token prediction heads, and how each kind of head computes.

By the `model_type` of a target's configuration, as vLLM 0.32 reads them (`config/speculative.py` and the `*_mtp.py` of
its models). A head is a norm for the embedding and one for the hidden state, a projection of both, a decoder layer like
the target's own, and a last norm before the target's output layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from draftkit.layout.target import language_model

# Config keys that say how many heads there are, in the order in which engines look.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")

# Copies of the target's tables among a head's tensors, which vLLM does not read, and how the target's own names end.
COPIES = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# Under what keys of `quantization_config` quantizers list the modules that they leave as they are.
LEFT_ALONE = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")

Concatenation = Literal["embedding_hidden", "hidden_embedding"]
HiddenState = Literal["after_norm", "before_norm"]
Feedback = Literal["post_norm", "pre_norm"]
Modules = Literal["in_turn", "first"]


@dataclass(frozen=True, kw_only=True)
class HeadParts:
    """The names of a head's parts below its prefix. `block`: what stands before the names of its decoder layer, with
    {index} for the number of the head where the other parts are there once for all heads."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    block: str = ""


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A kind of head.

    - `prefix`: of its tensors, with {layer} for the number after the target's layers and {index} for the head's own.
    - `parts`: None where a head is built in another way, which draftkit does not run.
    - `concatenation`: what the projection reads. `hidden_state`: the target's last, after its final norm or before.
      `feedback`: the state that the next step reads, after the head's last norm or before. `zero_first_embedding`: the
      embedding beside the state of position 0 is zero. `modules`: the one for each draft step, of several: the next in
      turn, over all rows, each with the tokens one later; or always the first, over the newest row.
    """

    prefix: str
    parts: HeadParts | None = None
    concatenation: Concatenation = "embedding_hidden"
    hidden_state: HiddenState = "after_norm"
    feedback: Feedback = "post_norm"
    zero_first_embedding: bool = False
    modules: Modules = "in_turn"

    def prefixes(self, count: int, num_hidden_layers: int) -> tuple[str, ...]:
        """Those of `count` heads of a target with so many layers; one where all heads share it."""
        every = (self.prefix.format(index=i, layer=num_hidden_layers + i) for i in range(count))
        return tuple(dict.fromkeys(every))


BEHIND = "model.layers.{layer}."  # as if it were one more layer of the target
DEEPSEEK_PARTS = HeadParts(
    embedding_norm="enorm", hidden_norm="hnorm", projection="eh_proj", final_norm="shared_head.norm"
)
PLAIN_PARTS = replace(DEEPSEEK_PARTS, final_norm="final_layernorm")
QWEN_PARTS = HeadParts(
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
    block="layers.{index}.",
)
MIMO_PARTS = HeadParts(
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
)

DEEPSEEK = HeadKind(prefix=BEHIND, parts=DEEPSEEK_PARTS, zero_first_embedding=True)
GLM = replace(DEEPSEEK, feedback="pre_norm")
PLAIN = replace(DEEPSEEK, parts=PLAIN_PARTS)
QWEN = HeadKind(prefix="mtp.", parts=QWEN_PARTS)
MIMO = HeadKind(
    prefix="model.mtp_layers.{index}.",
    parts=MIMO_PARTS,
    concatenation="hidden_embedding",
    hidden_state="before_norm",
    zero_first_embedding=True,
    modules="first",
)
QWEN_FIRST = replace(QWEN, modules="first")  # whose count vLLM's runner does not look at
KINDS: dict[str, HeadKind] = {
    "bailing_hybrid": PLAIN,
    "bailing_moe_linear": PLAIN,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "deepseek_v4": HeadKind(prefix="mtp.{index}."),  # two projections, several streams of residuals
    "dots3_note": HeadKind(prefix="model.mtp."),
    "ernie4_5_moe": HeadKind(prefix="model.mtp_"),  # its logits are those of a state without a norm
    "exaone4_5": QWEN,
    "exaone_moe": QWEN,
    "glm4_moe": GLM,
    "glm4_moe_lite": GLM,
    "glm_moe_dsa": DEEPSEEK,
    "hy_v3": PLAIN,
    "inkling": HeadKind(prefix="model.mtp."),  # one norm for all heads, which only some checkpoints feed back
    "kimi_k2": DEEPSEEK,
    "kimi_k3": HeadKind(prefix="language_model.model.layers.{layer}."),  # kernels of its own for positions
    "longcat_flash": HeadKind(prefix="model.mtp."),  # two attentions to a layer
    "mimo": MIMO,
    "mimo_v2": HeadKind(prefix="model.mtp.layers.{index}."),
    "mimo_v2_flash": HeadKind(prefix="model.mtp.layers.{index}."),
    "minimax_m3": HeadKind(prefix="model.mtp.layers.{index}."),
    "nemotron_h": HeadKind(prefix="mtp."),  # of sub-layers, by a pattern
    "pangu_ultra_moe": DEEPSEEK,
    "qwen3_5": QWEN_FIRST,
    "qwen3_5_moe": QWEN_FIRST,
    "qwen3_5_moe_text": QWEN_FIRST,
    "qwen3_5_text": QWEN_FIRST,
    "qwen3_next": QWEN,
    "qwen4_exp": HeadKind(prefix="mtp."),  # two projections, several streams of residuals
    "step3p5": HeadKind(prefix=BEHIND),  # an output layer of its own for each head
}


def head_kind(config: Mapping[str, object]) -> HeadKind | None:
    """The kind of a target's heads; None where draftkit knows none for its `model_type`."""
    kinds = (KINDS.get(str(values.get("model_type"))) for values in (language_model(config), config))
    return next((kind for kind in kinds if kind is not None), None)


def heads_promised(config: Mapping[str, object]) -> int:
    """How many heads the configuration of a target says that there are."""
    for values in (config, language_model(config)):
        for key in COUNTS:
            count = values.get(key)
            if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
                return count
    return 0
