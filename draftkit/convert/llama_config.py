"""A flat Llama-style config for the layouts of the EAGLE family, and what their classes cannot compute."""

from __future__ import annotations

from draftkit.layout.spec import Decoder, EagleSpec


def llama_config(eagle: EagleSpec, dtype: str) -> dict[str, object]:
    """The keys that every loader of the family reads, in the spelling of transformers 4 that all of them know.

    `rope_theta` is the effective base: a loader has no other way to learn it.
    """
    decoder = eagle.decoder
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_hidden_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.hidden_act,
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope.base,
        "max_position_embeddings": decoder.rope.max_position_embeddings,
        "vocab_size": eagle.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if decoder.rope.scaling is not None:
        config["rope_scaling"] = decoder.rope.scaling | {"type": decoder.rope.scaling.get("rope_type")}
    return config


def losses_of_decoder(decoder: Decoder) -> list[str]:
    """What SafeAILab's layers cannot compute of this decoder (`cnets.py`, `cnets1.py`)."""
    losses = []
    if decoder.head_dim * decoder.num_attention_heads != decoder.hidden_size:
        losses.append(f"heads of {decoder.head_dim}: its class takes hidden_size / num_attention_heads")
    if decoder.qk_norm:
        losses.append("the norms of queries and keys")
    if decoder.sliding_window is not None:
        losses.append(f"the sliding window of {decoder.sliding_window}")
    if decoder.output_bias or decoder.mlp_bias:
        losses.append("biases of o_proj and the MLP")
    scaling = decoder.rope.scaling or {}
    if scaling.get("rope_type") not in (None, "linear", "dynamic"):
        losses.append(f"rope of type {scaling['rope_type']}")
    return losses
