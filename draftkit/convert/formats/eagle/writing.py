"""Writing the flat layouts of the EAGLE family: a Llama-style config, and what their classes compute of a draft.

An exporter states the draft that its destination's class makes of the one it gets; the facts in which the two differ
are what is lost, and the tensors that the first has are what is written.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.layout.architecture import Rope
from draftkit.layout.decoder import Decoder, layer_keys
from draftkit.layout.families.eagle import EagleSpec


def llama_config(eagle: EagleSpec, dtype: str) -> dict[str, object]:
    """The keys that every loader of the family reads, in the spelling of transformers 4 that all of them know.

    `rope_theta` is the effective base: a loader has no other way to learn it.
    """
    decoder = eagle.decoder
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layer_keys(decoder),
        "rope_theta": decoder.rope.base,
        "max_position_embeddings": decoder.rope.max_position_embeddings,
        "vocab_size": eagle.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def reference_rope_keys(rope: Rope) -> dict[str, object]:
    """`rope_scaling` as SafeAILab's config class takes it: two keys, `type` and a factor above 1."""
    scaling = _reference_rope(rope).scaling
    return {} if scaling is None else {"rope_scaling": {"type": scaling["rope_type"], "factor": scaling["factor"]}}


def engine_rope_keys(rope: Rope) -> dict[str, object]:
    """`rope_scaling` under both names of its kind."""
    return {} if rope.scaling is None else {"rope_scaling": rope.scaling | {"type": rope.scaling.get("rope_type")}}


def plain_eagle(eagle: EagleSpec, decoder: Decoder) -> EagleSpec:
    """EAGLE-1 without the norms, the head and the vocabulary that some trainers give it."""
    return replace(
        eagle,
        decoder=decoder,
        draft_vocab_size=eagle.vocab_size,
        aux_layer_ids=None,
        concatenation="embedding_hidden",
        feature_norm="none",
        embedding_norm=False,
        hidden_norm=False,
        input_norm=False,
        norm_before_residual=False,
        final_norm=False,
        feedback="pre_norm",
        logit_scale=1.0,
        lm_head="target",
    )


def plain_eagle3(eagle: EagleSpec, decoder: Decoder) -> EagleSpec:
    """EAGLE-3 with all of its norms, and without what some trainers vary after `fc`."""
    return replace(
        eagle,
        decoder=decoder,
        concatenation="embedding_hidden",
        fusion_bias=False,
        embedding_norm=True,
        hidden_norm=True,
        input_norm=False,
        norm_before_residual=False,
        final_norm=True,
        logit_scale=1.0,
    )


def reference_decoder(decoder: Decoder) -> Decoder:
    """The layers that SafeAILab's classes make of this decoder (`cnets.py`, `cnets1.py`)."""
    return replace(
        decoder,
        head_dim=decoder.hidden_size // decoder.num_attention_heads,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        full_attention_layers=(),
        rope=_reference_rope(decoder.rope),
    )


def _reference_rope(rope: Rope) -> Rope:
    """Linear and dynamic scaling get no base there, and other kinds are refused."""
    factor = (rope.scaling or {}).get("factor")
    kind = (rope.scaling or {}).get("rope_type")
    if kind not in ("linear", "dynamic") or not isinstance(factor, float) or factor <= 1:
        return replace(rope, scaling=None)
    return replace(rope, base=10000.0, scaling={"rope_type": kind, "factor": factor})


def engine_decoder(decoder: Decoder) -> Decoder:
    """The layers that SGLang's classes make of this decoder (`llama.py`), biases of the attention aside."""
    return replace(
        decoder, hidden_act="silu", mlp_bias=False, qk_norm=False, sliding_window=None, full_attention_layers=()
    )
