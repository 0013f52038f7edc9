"""Where targets keep their multi-token prediction heads, and how each kind of head computes.

By the `model_type` of a target's configuration, as vLLM 0.32 reads them (`config/speculative.py` and the `*_mtp.py` of
its models). A head is a norm for the embedding and one for the hidden state, a projection of both, a decoder layer like
the target's own, and a last norm before the target's output layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftkit.errors import LayoutError
from draftkit.io.records import excerpt
from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_REPEATS
from draftkit.layout.target import WRAPPERS, language_model

# Config keys that say how many heads there are, in the order in which engines look.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")

# Copies of the target's tables among a head's tensors, which vLLM does not read, and how the target's own names end.
COPIES = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# Under what keys of `quantization_config` quantizers list the modules that they leave as they are.
LEFT_ALONE = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")

MOST = 8  # heads; more than any target has

Concatenation = Literal["embedding_hidden", "hidden_embedding"]
HiddenState = Literal["after_norm", "before_norm"]
Feedback = Literal["post_norm", "pre_norm"]
Modules = Literal["in_turn", "first"]


@dataclass(frozen=True, kw_only=True)
class HeadParts:
    """The names of a head's parts below its prefix."""

    embedding_norm: str = setting("The name of the norm of the token's embedding.")
    hidden_norm: str = setting("The name of the norm of the target's state.")
    projection: str = setting("The name of the projection of both.")
    final_norm: str = setting("The name of the norm before the output layer.")
    block: str = setting(
        "What stands before the names of its decoder layer, with {index} for the head's number where the "
        "other parts are there once for all heads.",
        "",
    )


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A kind of multi-token prediction head: where its tensors are, and how it computes.

    - `prefix`: what the names of its tensors begin with, with {layer} for the number after the target's layers and
      {index} for the head's own.
      `beside`: the prefix of tensors that all heads share, where these lie elsewhere.
    - `parts`: None where a head is built in another way; `names` of tensors, without `.weight`, that each then has
      below its prefix. `run`: whether draftkit's runtime has been proved to draft as vLLM does with it.
    - `unstated`: where the config does not say how many there are, there are as many as its weights hold. `surplus`: by
      how many it says more, where that is more than one.
    - `concatenation`: what the projection reads. `hidden_state`: the target's last, after its final norm or before.
      `feedback`: the state that the next step reads, after the head's last norm or before. `zero_first_embedding`: the
      embedding beside the state of position 0 is zero. `modules`: the one for each draft step, of several: the next in
      turn, over all rows, each with the tokens one later; or always the first, over the newest row.
    - Of its decoder layer: `gated` attention, whose queries come with gates; `qk_norm`: norms of queries and keys,
      whatever the config says; `qkv_bias`, likewise; `divided`: heads share the width where the config says nothing of
      theirs; `routing_bias`: what is added to the experts' scores.
    """

    prefix: str
    beside: str | None = None
    parts: HeadParts | None = None
    names: tuple[str, ...] = ()
    unstated: bool = False
    surplus: int = 0
    run: bool = True
    concatenation: Concatenation = "embedding_hidden"
    hidden_state: HiddenState = "after_norm"
    feedback: Feedback = "post_norm"
    zero_first_embedding: bool = False
    modules: Modules = "in_turn"
    gated: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    divided: bool = False
    routing_bias: str | None = None

    def prefixes(self, count: int, num_hidden_layers: int) -> tuple[str, ...]:
        """The prefixes of `count` heads of a target with so many layers; a single one where all heads share it."""
        every = (self.prefix.format(index=i, layer=num_hidden_layers + i) for i in range(count))
        return tuple(dict.fromkeys(every))

    @property
    def runnable_parts(self) -> HeadParts | None:
        """The names of the head's parts, where draftkit's runtime runs this kind; None elsewhere."""
        return self.parts if self.run else None

    def spellings(self) -> tuple[HeadKind, ...]:
        """This kind, and what it is where a multi-modal model has the language model inside."""
        inside = self.prefix.replace("model.", "model.language_model.", 1)
        return tuple(
            replace(self, prefix=p) for p in dict.fromkeys((self.prefix, f"language_model.{self.prefix}", inside))
        )


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

DEEPSEEK = HeadKind(
    prefix=BEHIND, parts=DEEPSEEK_PARTS, zero_first_embedding=True, routing_bias="mlp.gate.e_score_correction_bias"
)
GLM = replace(DEEPSEEK, feedback="pre_norm")
PLAIN = replace(DEEPSEEK, parts=PLAIN_PARTS, qk_norm=True, routing_bias="mlp.expert_bias")
QWEN = HeadKind(prefix="mtp.", parts=QWEN_PARTS, gated=True, qk_norm=True)
MIMO = HeadKind(
    prefix="model.mtp_layers.{index}.",
    parts=MIMO_PARTS,
    concatenation="hidden_embedding",
    hidden_state="before_norm",
    zero_first_embedding=True,
    modules="first",
    qkv_bias=True,
    divided=True,
)
QWEN_FIRST = replace(QWEN, modules="first")  # whose count vLLM's runner does not look at
PLAIN_NAMES = ("enorm", "hnorm", "eh_proj", "final_layernorm")
DEEPSEEK_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LATENT = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
BAILING = replace(PLAIN, run=False)  # some layers are linear, and rotate in part
SPARSE = replace(DEEPSEEK, run=False)  # with an indexer
PANGU = replace(DEEPSEEK, run=False)  # transformers has no such target
GLM_OCR = HeadKind(prefix=BEHIND, names=DEEPSEEK_NAMES)  # positions in three dimensions
EXAONE = replace(QWEN, run=False)  # dense, and rotates whatever the target's layers do
MIMO_V2 = HeadKind(  # its attention has a sink, its second norm another name
    prefix="model.mtp.layers.{index}.",
    names=(*PLAIN_NAMES, "input_layernorm", "pre_mlp_layernorm", "self_attn.o_proj", *MLP),
    unstated=True,
)
LONGCAT = HeadKind(  # two attentions to a layer of the target, one to the head's
    prefix="model.mtp.",
    names=(
        *(f"layers.0.{name}" for name in ("enorm.m", "hnorm.m", "eh_proj", "input_layernorm")),
        "layers.0.post_attention_layernorm",
        *(f"layers.0.self_attn.{name}" for name in LATENT),
        *(f"layers.0.transformer_layer.{name}" for name in MLP),
        "norm",
    ),
    unstated=True,
)
MINIMAX = HeadKind(prefix="model.mtp.layers.{index}.", names=PLAIN_NAMES, unstated=True)
NEMOTRON = HeadKind(prefix="mtp.", names=("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj"))  # of sub-layers
QWEN4 = HeadKind(  # two projections, several streams of residuals
    prefix="mtp.", names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden")
)
STEP = HeadKind(
    prefix=BEHIND, names=("enorm", "hnorm", "eh_proj"), unstated=True
)  # each with an output layer of its own
INKLING = HeadKind(  # one norm for all heads, which only some checkpoints feed back
    prefix="model.mtp.layers.{index}.",
    beside="model.mtp.chain_norm.",
    names=("embed_norm", "hidden_norm", "input_proj"),
)

# By `model_type`, and by the name of the class where vLLM looks at that, whatever the type is.
KINDS: dict[str, HeadKind] = {
    "BailingMoeV3ForCausalLM": HeadKind(prefix=BEHIND, names=PLAIN_NAMES),  # as PLAIN, and zeroes nothing
    "BailingMoeV3VLForConditionalGeneration": HeadKind(prefix=BEHIND, names=PLAIN_NAMES),
    "BailingMoeV2_5ForCausalLM": BAILING,
    "Glm4MoeForCausalLM": GLM,
    "Glm4MoeLiteForCausalLM": GLM,
    "GlmOcrForConditionalGeneration": GLM_OCR,
    "MiMoForCausalLM": MIMO,
    "MiMoV2FlashForCausalLM": MIMO_V2,
    "MiMoV2ForCausalLM": MIMO_V2,
    "MiMoV2OmniForCausalLM": MIMO_V2,
    "MiniMaxM3SparseForConditionalGeneration": MINIMAX,
    "Step3p5ForCausalLM": STEP,
    "Step3p7ForConditionalGeneration": STEP,
    "bailing_hybrid": BAILING,
    "bailing_moe_linear": BAILING,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": SPARSE,
    "deepseek_v4": HeadKind(  # two projections, several streams of residuals
        prefix="mtp.{index}.", names=("enorm", "hnorm", "e_proj", "h_proj", "norm")
    ),
    "dots3_note": HeadKind(prefix=BEHIND, beside="model.mtp.", names=DEEPSEEK_NAMES, unstated=True),
    "ernie4_5_moe": HeadKind(  # its logits are those of a state without a norm
        prefix="model.mtp_", names=("emb_norm.0", "hidden_norm.0", "linear_proj.0")
    ),
    "exaone4_5": EXAONE,
    "exaone_moe": EXAONE,
    "glm4_moe": GLM,
    "glm4_moe_lite": GLM,
    "glm5_next": HeadKind(prefix=BEHIND, names=DEEPSEEK_NAMES),  # shares the indices of its sparse attention
    "glm_moe_dsa": SPARSE,
    "glm_ocr": GLM_OCR,
    "hy_v3": PLAIN,
    "hy_v4": HeadKind(prefix="model.mtp_layers.{index}.", names=PLAIN_NAMES, surplus=1),
    "inkling": INKLING,
    "inkling_mm_model": INKLING,
    "inkling_model": INKLING,
    "intern_s2_preview": QWEN_FIRST,
    "interns2_mobius": HeadKind(prefix="mtp.", names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "kimi_k2": DEEPSEEK,
    "kimi_k3": HeadKind(prefix=BEHIND, names=DEEPSEEK_NAMES),  # kernels of its own for positions
    "longcat_flash": LONGCAT,
    "mimo": MIMO,
    "mimo_v2": MIMO_V2,
    "mimo_v2_flash": MIMO_V2,
    "minimax_m3": MINIMAX,
    "minimax_m3_vl": MINIMAX,
    "nemotron_h": NEMOTRON,
    "nemotron_h_puzzle": NEMOTRON,
    "pangu_ultra_moe": PANGU,
    "qwen3_5": QWEN_FIRST,
    "qwen3_5_moe": QWEN_FIRST,
    "qwen3_5_moe_text": QWEN_FIRST,
    "qwen3_5_text": QWEN_FIRST,
    "qwen3_next": replace(QWEN, unstated=True),
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "step3p5": STEP,
    "step3p7": STEP,
}


def head_kind(config: Mapping[str, object]) -> HeadKind | None:
    """The kind of a target's heads; None where draftkit knows none for its class or its `model_type`."""
    classes: object = config.get("architectures")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    names += [str(values.get("model_type")) for values in (language_model(config), config)]
    return next((KINDS[name] for name in names if name in KINDS), None)


def heads_stated(config: Mapping[str, object]) -> tuple[str | None, str, int] | None:
    """Where the configuration of a target says how many heads there are: the key of an object within it, None for
    itself, the key there, and the number. None where it does not. Raises `LayoutError` for what is no number of heads.
    """
    for holder in (None, *WRAPPERS, "mtp_config"):
        values: Any = config if holder is None else config.get(holder)
        for key in COUNTS if isinstance(values, Mapping) else ():
            if (count := values.get(key)) is not None:
                if type(count) is not int or not 0 <= count <= MAX_REPEATS:
                    raise LayoutError(f"the target's {key} is {excerpt(count)}", expected=f"0 to {MAX_REPEATS:,}")
                return holder, key, count
    return None


def heads_promised(config: Mapping[str, object], kind: HeadKind, held: int) -> int:
    """How many heads a target of this kind has by its configuration, whose weights have tensors of `held`."""
    stated = heads_stated(config)
    if stated is None:
        return held if kind.unstated else 0
    return stated[2] - kind.surplus if stated[2] > 1 else stated[2]


def head_patterns(config: Mapping[str, object]) -> list[str]:
    """Regular expressions for the names of the tensors of a target's promised heads, wherever the language model lies;
    none where it has no heads that draftkit knows."""
    kind, layers = head_kind(config), language_model(config).get("num_hidden_layers")
    if kind is None or not isinstance(layers, int):
        return []
    own = kind.prefixes(heads_promised(config, kind, MOST), layers)
    beside = () if kind.beside is None else (kind.beside,)
    return [rf"^((model|language_model)\.)*{re.escape(prefix.removeprefix('model.'))}" for prefix in (*own, *beside)]
