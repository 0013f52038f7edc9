"""What vLLM has, by release: methods, config keys, architectures and capabilities, each with its evidence.

`python -m scripts.check.releases FOLDER` compares a release with its tables. What was run is in `benchmarks/vllm.md`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.engines.releases import Release, each, has, lacks, ran

CONFIG = "config/speculative.py"
RUNNER = "config/vllm.py"
MODELS = "model_executor/models"
EAGLE = f"{MODELS}/llama_eagle.py"
EAGLE3 = f"{MODELS}/llama_eagle3.py"
BLOCK = f"{MODELS}/qwen3_dflash.py"
DSPARK = f"{MODELS}/qwen3_dspark.py"
DFLASH2 = f"{MODELS}/qwen3_dflash2.py"
LILICORR = f"{MODELS}/lilicorr.py"
MEDUSA = f"{MODELS}/medusa.py"
ASSISTANT = f"{MODELS}/gemma4_mtp.py"
REGISTRY = f"{MODELS}/registry.py"

V0_32 = Release(
    engine="vLLM",
    number="0.32",
    methods=each(ran(), "draft_model eagle eagle3 dflash mtp ngram extract_hidden_states")
    | each(has(CONFIG), "custom_class medusa ngram_gpu suffix")
    | {
        "dspark": ran(second_runner=True),
        "mlp_speculator": lacks("v1/worker/gpu_model_runner.py", no_code="mlp_speculator"),
    },
    config_keys=each(
        has(CONFIG),
        """enforce_eager num_speculative_tokens model method draft_tensor_parallel_size quantization moe_backend
        attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
        disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab
        prompt_lookup_max prompt_lookup_min parallel_drafting num_speculative_tokens_per_batch_size
        suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_min_token_prob draft_load_config rejection_sample_method synthetic_acceptance_rates
        synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk""",
    ),
    architectures=each(
        has(REGISTRY),
        """ExtractHiddenStatesModel MiMoMTPModel MiMoV2MTPModel MiMoV2OmniMTPModel EagleCohereForCausalLM
        EagleLlama4ForCausalLM EagleMiniCPMForCausalLM MuseGlimmerAssistantModel
        DFlashMuseGlimmerAssistantModel DSparkDraftModel DSparkV41DraftModel Qwen3OmniDSparkModel
        K3DSparkModel DFlashLagunaForCausalLM Gemma4DSparkModel PEagleDraftModel PeagleLlamaForCausalLM
        Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen3ForCausalLM MedusaModel
        Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM PeagleQwen3ForCausalLM EagleMistralForCausalLM
        EagleMistralLarge3ForCausalLM Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM
        EagleDeepSeekMTPModel DeepSeekMTPModel DeepseekV32MTPModel Dots3NoteMTPModel DeepSeekV4MTPModel
        BailingMoeV3MTPModel MiniMaxM3MTP BailingMoeV25MTPModel InklingMTPModel Gemma4MTPModel ErnieMTPModel
        ExaoneMoeMTP Exaone4_5_MTP NemotronHMTPModel LongCatFlashMTPModel Glm4MoeMTPModel
        Glm4MoeLiteMTPModel GlmOcrMTPModel Glm5NextMTPModel OpenPanguMTPModel Qwen3NextMTP Qwen4ExpMTP
        Step3p5MTP Qwen3_5MTP Qwen3_5MoeMTP InternS2MobiusMTP HYV3MTPModel HYV4MTPModel KimiK3MTPModel""",
    )
    | each(ran(), "EagleLlamaForCausalLM LlamaForCausalLMEagle3 DFlashDraftModel")
    | each(ran(second_runner=True), "Qwen3DSparkModel DFlash2DraftModel LiLiCorrDraftModel"),
    capabilities={
        "draft-activation": lacks(f"{MODELS}/llama.py", "hidden_act != 'silu'"),
        "hidden-state-first": lacks(EAGLE, "torch.cat((input_embeds, hidden_states), dim=-1)"),
        "fc-bias": lacks(EAGLE, "bias=False"),
        "fusion-norms": lacks(EAGLE, "self.input_layernorm = nn.Identity()", no_code="RMSNorm"),
        "fusion-vocabulary": lacks(EAGLE, "LogitsProcessor(self.config.vocab_size, scale=logit_scale)"),
        "fusion-captured-layers": lacks(EAGLE, "input_size=self.config.hidden_size * 2"),
        "fusion-own-head": lacks(EAGLE, no_code="ParallelLMHead"),
        "fusion-window": lacks(EAGLE, no_code="sliding_window"),
        "captured-fc-bias": lacks(EAGLE3, "output_size=self.config.hidden_size, bias=False"),
        "norms-left-out": lacks(EAGLE3, "self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)"),
        "attention-last-state": lacks(
            "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
            "aux_layers = eagle3_model.get_eagle3_default_aux_hidden_state_layers()",
        ),
        "some-attention-biases": lacks(EAGLE3, "qkv_bias = getattr(config, 'attention_bias', False)"),
        "biases-with-qk-norms": lacks(f"{MODELS}/qwen3.py", "bias=False"),
        "mixed-windows": lacks(
            "v1/spec_decode/llm_base_proposer.py", "'All drafting layers should belong to the same kv cache group'"
        ),
        "parallel-without-mask-state": lacks(EAGLE3, "not includes_mask_hidden and self.use_parallel_drafting"),
        "block-without-qk-norms": lacks(BLOCK, "self.q_norm = RMSNorm(self.head_dim, eps=rms_norm_eps)"),
        "some-block-biases": lacks(BLOCK, "bias=attention_bias, quant_config=quant_config, prefix=f'{prefix}.o_proj'"),
        "normed-last-state": lacks(f"{MODELS}/interfaces.py", "value = hidden_states + residual"),
        "anchored-window": lacks("v1/attention/backends/flash_attn.py", "return (window[0], window[0])"),
        "some-causal-layers": lacks(BLOCK, "return layer_types[layer_idx] == _SLIDING_ATTENTION"),
        "mixed-block-windows": ran(second_runner=True),
        "scaled-tables": lacks(BLOCK, no_code="input_embedding_scale"),
        "gated-markov": lacks(DSPARK, no_code="markov_head_type"),
        "markov-mask-embedding": lacks(DSPARK, "orig_to_new_substr = {'mask_embedding': None}"),
        "convolutions-or-selector": lacks(DFLASH2, "rank=int(draft_config['selector_rank'])"),
        "selector-with-markov": lacks(DFLASH2, no_code="markov"),
        "selector-vocabulary": lacks(DFLASH2, "vocab_size=self.config.vocab_size", no_code="draft_vocab_size"),
        "causal-windows-alone": lacks(
            "transformers_utils/configs/speculators/algos.py", "config_dict.get('sliding_window_non_causal', True)"
        ),
        "weighed-from-anchor": lacks(LILICORR, "self.num_candidate_slots = block_size - 1"),
        "weighed-vocabulary": lacks(LILICORR, "'LiLiCorr candidates require the full target vocabulary.'"),
        "weighed-own-embeddings": lacks(
            "v1/worker/gpu/spec_decode/lilicorr/speculator.py", "self.target_embeddings(candidate_ids)"
        ),
        "weighed-candidate-counts": lacks(LILICORR, "'LiLiCorr candidate_topk must be a power of two <= 16.'"),
        "layer-fusion": lacks(BLOCK, no_code="layer_fusion_weights"),
        "recurrent-correction": lacks(BLOCK, no_code="prefix_gru"),
        "refined-block": lacks(REGISTRY, no_code="XPress"),
        "heads-without-output-layer": lacks(MEDUSA, "self.lm_head = ParallelLMHead(self.truncated_vocab_size"),
        "heads-vocabulary": lacks(MEDUSA, "self.token_map.to(device=self.lm_heads[0].weight.device)"),
        "shared-keys-concatenation": lacks(ASSISTANT, "torch.cat([inputs_embeds, hidden_states], dim=-1)"),
        "shared-keys-state": lacks(ASSISTANT, "self.pre_projection(combined)"),
        "shared-keys-position": lacks("v1/spec_decode/gemma4.py", "self.constant_draft_positions = True"),
        "added-target-features": lacks("v1/spec_decode/draft_model.py", "pass_hidden_states_to_model=False"),
    },
)
# What is told of it today; the rest, and its capabilities, are not known yet.
V0_33 = replace(
    V0_32,
    number="0.33",
    methods=each(has(CONFIG), " ".join(V0_32.methods)) | each(lacks(CONFIG, no_code="medusa"), "medusa mlp_speculator"),
    architectures=each(
        has(REGISTRY),
        " ".join(name for name in V0_32.architectures if name != "MedusaModel")
        + """ Step5MTP MuseSparkDSparkModel Qwen3XPressModel DFlash2BeamDraftModel DFlashQwen3XPressModel
        ParseAuxMTPModel""",
    ),
    capabilities={"refined-block": has(f"{MODELS}/qwen3_xpress.py", second_runner=True, layout="xpress")},
)

RELEASES = (V0_32, V0_33)  # the first is what draftkit writes for
PRESENT = RELEASES[0]


def first_with(name: str) -> str | None:
    """The number of the first release that has a method or an architecture of this name; None where none has."""
    for release in RELEASES:
        if any(name in rows and rows[name].there for rows in (release.methods, release.architectures)):
            return release.number
    return None
