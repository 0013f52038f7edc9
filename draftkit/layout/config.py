"""The `config.json` of a unified draft: what vLLM reads for this kind of draft, generated from the spec.

Draftkit itself reads only the `draftkit` block; the keys around it are for serving engines, and each optional one is
written out because engines disagree about its default.
"""

from __future__ import annotations

from draftkit.layout.spec import CausalLMSpec, Decoder, DraftSpec, EagleSpec, MedusaSpec, MlpSpeculatorSpec, Rope

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
        case EagleSpec() as eagle:
            return _refused_eagle(eagle)
        case MlpSpeculatorSpec():
            return "vLLM has no proposer for MLP speculators"
        case MedusaSpec(lm_head="target"):
            return "vLLM's Medusa class does not borrow the target's head, and leaves its own uninitialised"
        case MedusaSpec() as medusa if medusa.draft_vocab_size != medusa.vocab_size:
            return "vLLM's Medusa class has a token_map, and its loader stops at it"
        case CausalLMSpec(target_features=features) if features is not None:
            return "vLLM would ignore the target features of PARD-2"
    return None


def _refused_eagle(eagle: EagleSpec) -> str | None:
    """The first thing that vLLM's class for this draft (`llama_eagle.py`, `llama_eagle3.py`) computes otherwise."""
    decoder = eagle.decoder
    reasons = _unlike_eagle1(eagle) if eagle.token_entry == "fusion" else _unlike_eagle3(eagle)
    reasons |= {
        "vLLM concatenates the embedding first": eagle.concatenation != "embedding_hidden",
        f"vLLM's draft layers have silu, not {decoder.hidden_act}": decoder.hidden_act != "silu",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _unlike_eagle1(eagle: EagleSpec) -> dict[str, bool]:
    norms = eagle.embedding_norm or eagle.hidden_norm or eagle.input_norm or eagle.final_norm or eagle.decoder.qk_norm
    norms = norms or eagle.feature_norm != "none" or eagle.norm_before_residual
    return {
        "vLLM drops fc.bias": eagle.fusion_bias,
        "vLLM's EAGLE class has none of the norms of this draft": norms,
        "vLLM's EAGLE class has the whole vocabulary": eagle.reduced_vocabulary,
        "vLLM's EAGLE class reads the target's last state": eagle.aux_layer_ids is not None,
        "vLLM's EAGLE class takes the target's head, and its loader stops at another": eagle.lm_head == "draft",
        "vLLM's EAGLE class has no sliding window": eagle.decoder.sliding_window is not None,
    }


def _unlike_eagle3(eagle: EagleSpec) -> dict[str, bool]:
    decoder = eagle.decoder
    norms = eagle.embedding_norm and eagle.hidden_norm and eagle.final_norm
    return {
        "vLLM's EAGLE-3 class has no bias in fc": eagle.fusion_bias,
        "vLLM's EAGLE-3 class always norms embedding, hidden state and output": not norms,
        "vLLM's second model runner feeds captured layers to a draft that reads the last state": (
            eagle.aux_layer_ids is None
        ),
        "vLLM's EAGLE-3 class gives a bias to all four attention projections or to none": (
            not decoder.qk_norm and decoder.qkv_bias != decoder.output_bias
        ),
        "vLLM's EAGLE-3 class with norms of queries and keys has no biases in o_proj and the MLP": (
            decoder.qk_norm and (decoder.output_bias or decoder.mlp_bias)
        ),
        "vLLM drafts in parallel with a mask_hidden only": eagle.parallel is not None and not eagle.parallel.mask_state,
    }


def _eagle(eagle: EagleSpec) -> dict[str, object]:
    decoder = eagle.decoder
    config: dict[str, object] = {
        "architectures": [_vllm_class(eagle)],
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "vocab_size": eagle.vocab_size,
        **layer_keys(decoder),
        "attention_bias": decoder.output_bias or (decoder.qkv_bias and eagle.token_entry == "attention"),
        "mlp_bias": decoder.mlp_bias,
        "logit_scale": eagle.logit_scale,
        "tie_word_embeddings": False,
    } | rope_keys(decoder.rope)
    if eagle.token_entry == "fusion":
        config["qkv_bias"] = decoder.qkv_bias
    if decoder.sliding_window is not None:
        config |= {
            "layer_types": ["sliding_attention"] * decoder.num_hidden_layers,
            "sliding_window": decoder.sliding_window,
            "use_sliding_window": True,
        }
    if eagle.token_entry == "attention":
        config |= _eagle3_keys(eagle)
    return config


def layer_keys(decoder: Decoder) -> dict[str, object]:
    """The sizes of decoder layers under the names of transformers, which every config of the EAGLE family uses."""
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_hidden_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.hidden_act,
        "rms_norm_eps": decoder.rms_norm_eps,
    }


def _vllm_class(eagle: EagleSpec) -> str:
    """The architecture under which vLLM has a class for this draft."""
    if eagle.token_entry == "fusion":
        return "LlamaForCausalLM"
    return "Eagle3Qwen3ForCausalLM" if eagle.decoder.qk_norm else "LlamaForCausalLMEagle3"


def _eagle3_keys(eagle: EagleSpec) -> dict[str, object]:
    keys: dict[str, object] = {
        "draft_vocab_size": eagle.draft_vocab_size,
        "target_hidden_size": eagle.target_hidden_size,
        "norm_before_residual": eagle.norm_before_residual,
        "norm_before_fc": eagle.feature_norm == "joint",
        "fc_norm": eagle.feature_norm == "per_layer",
        "norm_output": eagle.feedback == "post_norm",
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
