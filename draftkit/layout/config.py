"""The `config.json` of a unified draft: what vLLM reads for this kind of draft, generated from the spec.

Draftkit itself reads only the `draftkit` block; the keys around it are for serving engines, and each optional one is
written out because engines disagree about its default.
"""

from __future__ import annotations

from draftkit.layout.spec import CausalLMSpec, DraftSpec, EagleSpec, MedusaSpec, MlpSpeculatorSpec, Rope

HF_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def engine_config(spec: DraftSpec) -> dict[str, object]:
    """The keys around the `draftkit` block."""
    match spec.architecture:
        case EagleSpec() as eagle:
            config = _eagle(eagle)
        case CausalLMSpec() as lm:
            config = dict(lm.config)
            if lm.parallel is not None:
                config["pard_token"] = lm.parallel.mask_token_id
        case MlpSpeculatorSpec() as mlp:
            config = _mlp_speculator(mlp)
        case MedusaSpec() as medusa:
            config = _medusa(medusa)
    if spec.quantization is not None:
        config["quantization_config"] = spec.quantization
    return config | {"dtype": HF_DTYPES[spec.dtype], "torch_dtype": HF_DTYPES[spec.dtype]}


def refusal_by_vllm(spec: DraftSpec) -> str | None:
    """Why vLLM 0.32 must not load this draft (it would, and run it wrongly without a word), or None."""
    match spec.architecture:
        case EagleSpec(token_entry="fusion") as eagle:
            if eagle.fusion_bias:
                return "vLLM drops fc.bias"
            if eagle.embedding_norm or eagle.hidden_norm or eagle.input_norm or eagle.final_norm:
                return "vLLM's EAGLE class has none of the norms of this draft"
        case EagleSpec() as eagle if not (eagle.embedding_norm and eagle.hidden_norm and eagle.final_norm):
            return "vLLM's EAGLE-3 class always norms embedding, hidden state and output"
        case EagleSpec() as eagle if eagle.decoder.qkv_bias != eagle.decoder.output_bias:
            return "vLLM's EAGLE-3 class gives a bias to all four attention projections or to none"
        case MlpSpeculatorSpec():
            return "vLLM has no proposer for MLP speculators"
        case MedusaSpec(lm_head="target"):
            return "vLLM's Medusa class does not borrow the target's head, and leaves its own uninitialised"
        case MedusaSpec(lm_head="draft") as medusa if medusa.draft_vocab_size != medusa.vocab_size:
            return "vLLM's Medusa class gives every head the whole vocabulary"
        case CausalLMSpec(target_features=features) if features is not None:
            return "vLLM would ignore the target features of PARD-2"
    if isinstance(spec.architecture, EagleSpec) and spec.architecture.concatenation != "embedding_hidden":
        return "vLLM concatenates the embedding first"
    return None


def _eagle(eagle: EagleSpec) -> dict[str, object]:
    decoder = eagle.decoder
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM" if eagle.token_entry == "fusion" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": eagle.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_hidden_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.hidden_act,
        "rms_norm_eps": decoder.rms_norm_eps,
        "attention_bias": decoder.output_bias or (decoder.qkv_bias and eagle.token_entry == "attention"),
        "mlp_bias": decoder.mlp_bias,
        "tie_word_embeddings": False,
    } | rope_keys(decoder.rope)
    if eagle.token_entry == "fusion":
        config["qkv_bias"] = decoder.qkv_bias
    if decoder.sliding_window is not None:
        config["sliding_window"] = decoder.sliding_window
    if eagle.token_entry == "attention":
        config |= _eagle3_keys(eagle)
    return config


def _eagle3_keys(eagle: EagleSpec) -> dict[str, object]:
    keys: dict[str, object] = {
        "draft_vocab_size": eagle.draft_vocab_size,
        "target_hidden_size": eagle.target_hidden_size,
        "norm_before_residual": eagle.norm_before_residual,
        "norm_before_fc": eagle.feature_norm == "joint",
        "fc_norm": eagle.feature_norm == "per_layer",
        "norm_output": eagle.feedback == "post_norm",
        "logit_scale": eagle.logit_scale,
        "eagle_config": {"use_aux_hidden_state": eagle.aux_layer_ids is not None},
    }
    if eagle.aux_layer_ids is not None:
        keys["eagle_aux_hidden_state_layer_ids"] = list(eagle.aux_layer_ids)
        # vLLM's Llama class takes the width of fc from this key, not from the ids above.
        keys["num_aux_hidden_states"] = len(eagle.aux_layer_ids)
    if eagle.parallel is not None:
        keys["ptd_token_id"] = eagle.parallel.mask_token_id
    return keys


def rope_keys(rope: Rope) -> dict[str, object]:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of older engines."""
    scaling = rope.scaling or {"rope_type": "default"}
    return {
        "max_position_embeddings": rope.max_position_embeddings,
        "rope_theta": rope.base,
        "rope_scaling": rope.scaling,
        "rope_parameters": {**scaling, "rope_theta": rope.base},
    }


def _mlp_speculator(mlp: MlpSpeculatorSpec) -> dict[str, object]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": mlp.vocab_size,
        "emb_dim": mlp.target_hidden_size,
        "inner_dim": mlp.inner_size,
        "n_predict": mlp.num_heads,
        "top_k_tokens_per_head": list(mlp.top_k_per_head),
        "n_candidates": mlp.num_candidates,
        "tie_weights": mlp.tied,
        "scale_input": mlp.scale_input,
    }


def _medusa(medusa: MedusaSpec) -> dict[str, object]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": medusa.target_hidden_size,
        "vocab_size": medusa.vocab_size,
        "truncated_vocab_size": medusa.draft_vocab_size,
        "num_heads": medusa.num_heads,
        "num_hidden_layers": medusa.num_layers,
        "medusa_fc_bias": medusa.bias,
        "original_lm_head": medusa.lm_head != "draft",
    }
