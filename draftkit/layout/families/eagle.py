"""EAGLE-1/2, HASS, EAGLE-3, P-EAGLE: decoder layers that read the target's hidden states.

The published names are values of the facts, not kinds of their own: one module builds all of them. Tensor names are
those that vLLM's EAGLE loaders take without a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from draftkit.errors import LayoutError
from draftkit.io.settings import setting
from draftkit.layout.architecture import (
    ACTIVATION,
    MAX_SIZE,
    SINK_TOKENS,
    Architecture,
    Capability,
    ParallelDrafting,
    Rope,
    check_range,
)
from draftkit.layout.decoder import Decoder, layer_keys, layer_tensors, rope_keys
from draftkit.layout.positions import PositionLimit, limit_of
from draftkit.layout.schema import Shape, TensorSchema, of_shapes

TITLES = {
    "eagle": "An EAGLE draft: decoder layers that read the target's last hidden state",
    "eagle3": "An EAGLE-3 draft: decoder layers that read hidden states of several of the target's layers",
    "p-eagle": "A P-EAGLE draft: an EAGLE-3 draft that proposes all its tokens in one pass",
}
# What vLLM's classes compute in one way only: `llama_eagle.py`, `llama_eagle3.py`, `llm_base_proposer.py`.
EAGLE_NEEDS = (
    Capability(
        "fc-bias", "a bias in fc", "drops fc.bias",
        lambda draft: draft.token_entry == "fusion" and draft.fusion_bias,
    ),
    Capability(
        "fusion-norms", "norms beside fc", "has none of the norms of this draft in its EAGLE class",
        lambda draft: draft.token_entry == "fusion" and _has_norms(draft),
    ),
    Capability(
        "fusion-vocabulary", "a reduced vocabulary beside fc", "has the whole vocabulary in its EAGLE class",
        lambda draft: draft.token_entry == "fusion" and draft.reduced_vocabulary,
    ),
    Capability(
        "fusion-captured-layers", "captured layers in fc beside the embedding",
        "reads the target's last state in its EAGLE class",
        lambda draft: draft.token_entry == "fusion" and draft.aux_layer_ids is not None,
    ),
    Capability(
        "fusion-own-head", "an output layer of its own beside fc",
        "takes the target's head in its EAGLE class, and its loader stops at another",
        lambda draft: draft.token_entry == "fusion" and draft.lm_head == "draft",
    ),
    Capability(
        "fusion-window", "a sliding window beside fc", "has no sliding window in its EAGLE class",
        lambda draft: draft.token_entry == "fusion" and draft.decoder.sliding_window is not None,
    ),
    Capability(
        "captured-fc-bias", "a bias in fc of captured layers", "has no bias in fc in its EAGLE-3 class",
        lambda draft: draft.token_entry == "attention" and draft.fusion_bias,
    ),
    Capability(
        "norms-left-out", "a layer 0 without all norms of embedding, hidden state and output",
        "always norms embedding, hidden state and output in its EAGLE-3 class",
        lambda draft: (
            draft.token_entry == "attention"
            and not (draft.embedding_norm and draft.hidden_norm and draft.final_norm)
        ),
    ),
    Capability(
        "attention-last-state", "the target's last state in layer 0",
        "feeds captured layers to a draft that reads the last state, in its second model runner",
        lambda draft: draft.token_entry == "attention" and draft.aux_layer_ids is None,
    ),
    Capability(
        "some-attention-biases", "biases in some attention projections",
        "gives a bias to all four attention projections or to none in its EAGLE-3 class",
        lambda draft: (
            draft.token_entry == "attention" and not draft.decoder.qk_norm
            and draft.decoder.qkv_bias != draft.decoder.output_bias
        ),
    ),
    Capability(
        "biases-with-qk-norms", "biases in o_proj and the MLP with norms of queries and keys",
        "has no biases in o_proj and the MLP of its EAGLE-3 class with norms of queries and keys",
        lambda draft: (
            draft.token_entry == "attention" and draft.decoder.qk_norm
            and (draft.decoder.output_bias or draft.decoder.mlp_bias)
        ),
    ),
    Capability(
        "mixed-windows", "layers with and without a window",
        "keeps all layers of a draft in one group of its cache, and layers with and without a window are in two",
        lambda draft: draft.token_entry == "attention" and len(set(draft.windows)) > 1,
    ),
    Capability(
        "parallel-without-mask-state", "parallel drafting without a mask_hidden",
        "drafts in parallel with a mask_hidden only",
        lambda draft: draft.token_entry == "attention" and draft.parallel is not None and not draft.parallel.mask_state,
    ),
    Capability(
        "hidden-state-first", "the hidden state before the embedding", "concatenates the embedding first",
        lambda draft: draft.concatenation != "embedding_hidden",
    ),
    SINK_TOKENS,
    ACTIVATION,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EagleSpec(Architecture):
    """A draft that reads the target's hidden states: EAGLE-1/2, HASS, EAGLE-3, P-EAGLE.

    Without `aux_layer_ids` it reads the target's last hidden state *after* its final norm; with `token_entry`
    `attention` and without captured layers there is no `fc`. Layers after the first always have the usual norm before
    attention.
    """

    NEEDS: ClassVar = EAGLE_NEEDS
    SERVED_AS: ClassVar = {
        "vllm": {"eagle": "eagle", "eagle3": "eagle3", "p-eagle": "eagle3"},
        "sglang": {"eagle": "EAGLE", "eagle3": "EAGLE3"},
        "llama.cpp": {"eagle3": "draft-eagle3"},
    }

    decoder: Decoder
    vocab_size: int = setting("The tokens of the target's vocabulary.", unit="tokens")
    draft_vocab_size: int = setting(
        "The tokens that the draft proposes among, of the target's vocabulary.", unit="tokens"
    )
    target_hidden_size: int = setting("The width of the target's hidden states.", unit="features")
    aux_layer_ids: tuple[int, ...] | None = setting(
        "The target's layers whose states are read, ascending: i is the residual stream after i decoder "
        "layers, before any norm; none for the last state."
    )
    token_entry: Literal["fusion", "attention"] = setting(
        "Where the token embedding joins. fusion: fc reads [embedding, hidden] at every step (EAGLE-1); "
        "attention: layer 0's q/k/v do, and fc reads captured states only (EAGLE-3)."
    )
    concatenation: Literal["embedding_hidden", "hidden_embedding"] = setting(
        "The order in which the token's embedding and the hidden state are concatenated."
    )
    fusion_bias: bool = setting("Whether fc has a bias.")
    feature_norm: Literal["none", "joint", "per_layer"] = setting(
        "An RMSNorm before fc: one over all captured states (joint) or one for each (per_layer)."
    )
    embedding_norm: bool = setting(
        "Whether the embedding is normed where it joins: before fc (enorm) or in layer 0 (input_layernorm)."
    )
    hidden_norm: bool = setting(
        "Whether the hidden state is normed where it joins: before fc (hnorm) or in layer 0 (hidden_norm)."
    )
    input_norm: bool = setting(
        "Whether layer 0 has the usual norm before attention, with the token entry fusion (EAGLE-1 has none)."
    )
    norm_before_residual: bool = setting(
        "Whether layer 0's residual is the normed hidden state instead of the raw one."
    )
    final_norm: bool = setting("Whether there is a norm before the output layer.")
    feedback: Literal["pre_norm", "post_norm"] = setting(
        "Whether the next step gets the layer output before or after the final norm."
    )
    logit_scale: float = setting("The factor on the logits.")
    embed_tokens: Literal["draft", "target"] = setting(
        "Whose embedding it is: the draft's own, or the target's, borrowed when loaded."
    )
    lm_head: Literal["draft", "target"] = setting(
        "Whose output layer it is: the draft's own, or the target's, borrowed when loaded."
    )
    parallel: ParallelDrafting | None = field()

    def __post_init__(self) -> None:
        check_range(self, MAX_SIZE, "target_hidden_size")
        ids = self.aux_layer_ids
        if ids is not None and (not ids or min(ids) < 0 or list(ids) != sorted(set(ids))):
            # Engines sort and de-duplicate the ids, which reorders or narrows what fc reads.
            raise LayoutError(f"aux_layer_ids are {list(ids)}", expected="distinct layers ≥ 0 in ascending order")

    @property
    def method(self) -> str:
        if self.parallel is not None:
            return "p-eagle"
        return "eagle" if self.token_entry == "fusion" else "eagle3"

    @property
    def feature_size(self) -> int:
        """Width of the target features that one row brings: A · target_hidden_size."""
        return self.target_hidden_size * self.states_read

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.decoder.windows

    @property
    def sink_tokens(self) -> int:
        return self.decoder.sink_tokens

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def title(self) -> str:
        return TITLES[self.method]

    @property
    def rope(self) -> Rope:
        return self.decoder.rope

    @property
    def states_read(self) -> int:
        return 1 if self.aux_layer_ids is None else len(self.aux_layer_ids)

    @property
    def max_positions(self) -> PositionLimit | None:
        return limit_of(rope_keys(self.rope))

    def tensors(self) -> dict[str, TensorSchema]:
        if self.lm_head == "target" and self.reduced_vocabulary:
            raise LayoutError(
                f"lm_head is the target's, and the draft has {self.draft_vocab_size} of {self.vocab_size} tokens",
                expected="a head of the draft's own, with a row for each of them",
            )
        h = self.decoder.hidden_size
        tensors = self._first_layer()
        if self.token_entry == "fusion":
            tensors["fc.weight"] = (h, h + self.target_hidden_size)
        elif self.aux_layer_ids is not None:
            tensors["fc.weight"] = (h, self.feature_size)
        for index in range(1, self.decoder.num_hidden_layers):
            tensors |= layer_tensors(self.decoder, f"layers.{index}.")
        if self.fusion_bias:
            tensors["fc.bias"] = (h,)
        if self.feature_norm == "joint":
            tensors["input_norm.weight"] = (self.feature_size,)
        if self.feature_norm == "per_layer":
            captured = range(self.feature_size // self.target_hidden_size)
            tensors |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in captured}
        if self.final_norm:
            tensors["norm.weight"] = (h,)
        if self.embed_tokens == "draft":
            tensors["embed_tokens.weight"] = (self.vocab_size, h)
        if self.lm_head == "draft":
            tensors["lm_head.weight"] = (self.draft_vocab_size, h)
        if self.parallel is not None and self.parallel.mask_state:
            tensors["mask_hidden"] = (1, 1, self.feature_size)
        schema = of_shapes(tensors)
        if self.reduced_vocabulary:
            schema["d2t"] = TensorSchema((self.draft_vocab_size,), ("I64",))
        return schema

    def _first_layer(self) -> dict[str, Shape]:
        """Layer 0, whose attention may read twice the width, and whose norms are the ones the spec names."""
        h, fusion = self.decoder.hidden_size, self.token_entry == "fusion"
        tensors = layer_tensors(self.decoder, "layers.0.", attention_input=h if fusion else 2 * h)
        del tensors["layers.0.input_layernorm.weight"]
        if self.input_norm if fusion else self.embedding_norm:
            tensors["layers.0.input_layernorm.weight"] = (h,)
        if self.hidden_norm and not fusion:
            tensors["layers.0.hidden_norm.weight"] = (h,)
        if self.hidden_norm and fusion:
            tensors["hnorm.weight"] = (self.target_hidden_size,)
        if self.embedding_norm and fusion:
            tensors["enorm.weight"] = (h,)
        return tensors

    def engine_config(self) -> dict[str, object]:
        decoder = self.decoder
        config: dict[str, object] = {
            "architectures": [self._vllm_class],
            "model_type": "qwen3" if decoder.qk_norm else "llama",
            "vocab_size": self.vocab_size,
            **layer_keys(decoder),
            "attention_bias": decoder.output_bias or (decoder.qkv_bias and self.token_entry == "attention"),
            "mlp_bias": decoder.mlp_bias,
            "logit_scale": self.logit_scale,
            "tie_word_embeddings": False,
        } | rope_keys(decoder.rope)
        if self.token_entry == "fusion":
            config["qkv_bias"] = decoder.qkv_bias
        if decoder.sliding_window is not None:
            config |= {
                "layer_types": decoder.layer_types,
                "sliding_window": decoder.sliding_window,
                "use_sliding_window": True,
            }
        if self.token_entry == "attention":
            config |= self._eagle3_keys()
        return config

    @property
    def _vllm_class(self) -> str:
        """The architecture under which vLLM has a class for this draft."""
        if self.token_entry == "fusion":
            return "LlamaForCausalLM"
        return "Eagle3Qwen3ForCausalLM" if self.decoder.qk_norm else "LlamaForCausalLMEagle3"

    def _eagle3_keys(self) -> dict[str, object]:
        keys: dict[str, object] = {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.feature_norm == "joint",
            "fc_norm": self.feature_norm == "per_layer",
            "norm_output": self.feedback == "post_norm",
            "eagle_config": {"use_aux_hidden_state": self.aux_layer_ids is not None},
        }
        if self.aux_layer_ids is not None:
            keys["eagle_aux_hidden_state_layer_ids"] = list(self.aux_layer_ids)
            # vLLM's Llama class takes the width of fc from this key, not from the ids above.
            keys["num_aux_hidden_states"] = len(self.aux_layer_ids)
        if self.parallel is not None:
            keys["ptd_token_id"] = self.parallel.mask_token_id
        return keys

    @property
    def engine_settings(self) -> Mapping[str, Mapping[str, object]]:
        return {} if self.parallel is None else {"vllm": {"parallel_drafting": True}}

    def card_facts(self) -> dict[str, str]:
        ids = self.aux_layer_ids
        return {} if ids is None else {"target layers read": ", ".join(map(str, ids))}

    def limitations(self) -> list[str]:
        length = self.rope.max_position_embeddings
        found = [f"Its position embedding is made for {length:,} tokens; acceptance beyond is not known."]
        if self.reduced_vocabulary:
            left_out = self.vocab_size - self.draft_vocab_size
            found.append(f"It never proposes {left_out:,} of the target's {self.vocab_size:,} tokens.")
        return found


def _has_norms(draft: EagleSpec) -> bool:
    """Whether there is any norm but those that every decoder layer has after its attention."""
    around = draft.embedding_norm or draft.hidden_norm or draft.input_norm or draft.final_norm
    return around or draft.decoder.qk_norm or draft.feature_norm != "none" or draft.norm_before_residual
