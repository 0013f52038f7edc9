"""The names in releases of vLLM, written by `python -m scripts.check.releases`."""

NAMES: dict[str, dict[str, str]] = {
    "0.32": {
        "methods": """
            custom_class dflash draft_model dspark eagle eagle3 extract_hidden_states medusa mtp ngram ngram_gpu
            suffix
        """,
        "config_keys": """
            attention_backend code_revision disable_eagle_block_drop disable_padded_drafter_batch draft_load_config
            draft_sample_method draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification
            enforce_eager index_share_for_mtp_iteration kv_cache_dtype max_model_len method model moe_backend
            num_speculative_tokens num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max
            prompt_lookup_min quantization rejection_sample_method revision suffix_decoding_max_cached_requests
            suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth suffix_decoding_min_token_prob
            synthetic_acceptance_length synthetic_acceptance_rates use_heterogeneous_vocab
            use_local_argmax_reduction
        """,
        "architectures": """
            BailingMoeV25MTPModel BailingMoeV3MTPModel DFlash2DraftModel DFlashDraftModel DFlashLagunaForCausalLM
            DFlashMuseGlimmerAssistantModel DSparkDraftModel DSparkV41DraftModel DeepSeekMTPModel DeepSeekV4MTPModel
            DeepseekV32MTPModel Dots3NoteMTPModel Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM
            Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3ForCausalLM
            Eagle3Qwen3vlForCausalLM EagleCohereForCausalLM EagleDeepSeekMTPModel EagleLlama4ForCausalLM
            EagleLlamaForCausalLM EagleMiniCPMForCausalLM EagleMistralForCausalLM EagleMistralLarge3ForCausalLM
            ErnieMTPModel Exaone4_5_MTP ExaoneMoeMTP ExtractHiddenStatesModel Gemma4DSparkModel Gemma4MTPModel
            Glm4MoeLiteMTPModel Glm4MoeMTPModel Glm5NextMTPModel GlmOcrMTPModel HYV3MTPModel HYV4MTPModel
            InklingMTPModel InternS2MobiusMTP K3DSparkModel KimiK3MTPModel LiLiCorrDraftModel LlamaForCausalLMEagle3
            LongCatFlashMTPModel MedusaModel MiMoMTPModel MiMoV2MTPModel MiMoV2OmniMTPModel MiniMaxM3MTP
            MuseGlimmerAssistantModel NemotronHMTPModel OpenPanguMTPModel PEagleDraftModel PeagleLlamaForCausalLM
            PeagleQwen3ForCausalLM Qwen3DSparkModel Qwen3NextMTP Qwen3OmniDSparkModel Qwen3_5MTP Qwen3_5MoeMTP
            Qwen4ExpMTP Step3p5MTP
        """,
        "verifications": """
            block standard synthetic
        """,
        "metrics": """
            vllm:spec_decode_num_accepted_tokens vllm:spec_decode_num_accepted_tokens_per_pos
            vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_drafts
        """,
        "raised_ropes": """
        """,
    },
    "0.33": {
        "methods": """
            custom_class dflash draft_model dspark eagle eagle3 extract_hidden_states mtp ngram ngram_gpu suffix
        """,
        "config_keys": """
            attention_backend code_revision disable_eagle_block_drop disable_lookahead_block_hashes
            disable_padded_drafter_batch draft_lm_head_quantization draft_load_config draft_sample_method
            draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification enforce_eager
            fly_entropy_threshold fly_entropy_top_k fly_window_size index_share_for_mtp_iteration kv_cache_dtype
            max_model_len method model moe_backend num_speculative_tokens num_speculative_tokens_per_batch_size
            parallel_drafting prompt_lookup_max prompt_lookup_min quantization rejection_sample_method revision
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
            suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates
            use_heterogeneous_vocab use_local_argmax_reduction xpress_topc
        """,
        "architectures": """
            BailingMoeV25MTPModel BailingMoeV3MTPModel DFlash2BeamDraftModel DFlash2DraftModel DFlashDraftModel
            DFlashLagunaForCausalLM DFlashMuseGlimmerAssistantModel DFlashQwen3XPressModel DSparkDraftModel
            DSparkV41DraftModel DeepSeekMTPModel DeepSeekV4MTPModel DeepseekV32MTPModel Dots3NoteMTPModel
            Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM Eagle3LlamaForCausalLM
            Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3ForCausalLM Eagle3Qwen3vlForCausalLM
            EagleCohereForCausalLM EagleDeepSeekMTPModel EagleLlama4ForCausalLM EagleLlamaForCausalLM
            EagleMiniCPMForCausalLM EagleMistralForCausalLM EagleMistralLarge3ForCausalLM ErnieMTPModel
            Exaone4_5_MTP ExaoneMoeMTP ExtractHiddenStatesModel Gemma4DSparkModel Gemma4MTPModel Glm4MoeLiteMTPModel
            Glm4MoeMTPModel Glm5NextMTPModel GlmOcrMTPModel HYV3MTPModel HYV4MTPModel InklingMTPModel
            InternS2MobiusMTP K3DSparkModel KimiK3MTPModel LiLiCorrDraftModel LlamaForCausalLMEagle3
            LongCatFlashMTPModel MiMoMTPModel MiMoV2MTPModel MiMoV2OmniMTPModel MiniMaxM3MTP
            MuseGlimmerAssistantModel MuseSparkDSparkModel NemotronHMTPModel OpenPanguMTPModel PEagleDraftModel
            ParseAuxMTPModel PeagleLlamaForCausalLM PeagleQwen3ForCausalLM Qwen3DSparkModel Qwen3NextMTP
            Qwen3OmniDSparkModel Qwen3XPressModel Qwen3_5MTP Qwen3_5MoeMTP Qwen4ExpMTP Step3p5MTP Step5MTP
            TransformersForMTP TransformersMoEForMTP
        """,
        "verifications": """
            block fly standard synthetic
        """,
        "metrics": """
            vllm:spec_decode_num_accepted_tokens vllm:spec_decode_num_accepted_tokens_per_pos
            vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_drafts
        """,
        "raised_ropes": """
            default linear llama3 ntk proportional
        """,
    },
}
