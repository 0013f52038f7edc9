"""The names in releases of SGLang, written by `python -m scripts.check.releases`."""

NAMES: dict[str, dict[str, str]] = {
    "0.5.23": {
        "methods": """
            DFLASH DSPARK EAGLE EAGLE3 FROZEN_KV_MTP NEXTN NGRAM NONE STANDALONE UNO
        """,
        "config_keys": """
            enable_multi_layer_eagle spec_trace_dir speculative_accept_threshold_acc
            speculative_accept_threshold_single speculative_adaptive speculative_adaptive_config
            speculative_algorithm speculative_attention_mode speculative_boundary_reduction
            speculative_dflash_block_size speculative_domino_candidate_pool_size speculative_draft_attention_backend
            speculative_draft_kv_cache_dtype speculative_draft_load_format speculative_draft_model_path
            speculative_draft_model_quantization speculative_draft_model_revision speculative_draft_sink_size
            speculative_draft_window_size speculative_dsa_topk_backend
            speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size
            speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path speculative_eagle_topk
            speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend speculative_moe_runner_backend
            speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens
            speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
            speculative_ngram_match_type speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth
            speculative_ngram_min_bfs_breadth speculative_num_draft_tokens speculative_num_steps
            speculative_token_map speculative_use_block_verification speculative_use_rejection_sampling
            uno_lora_path
        """,
        "architectures": """
            BailingMoeForCausalLMNextN DFlash2BeamDraftModel DFlash2DraftModel DFlashDraftModel
            DFlashLagunaForCausalLM DSparkDraftModel DSparkMiniMaxDraftModel DeepseekV3ForCausalLMNextN
            DeepseekV4ForCausalLMDSpark DeepseekV4ForCausalLMNextN Dots3NoteForCausalLMNextN
            Eagle3DeepseekV2ForCausalLM Ernie4_5_MoeForCausalLMMTP ExaoneMoEForCausalLMMTP
            Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM GigaChat35ForCausalLMNextN
            Glm4MoeForCausalLMNextN Glm4MoeLiteForCausalLMNextN Glm5NextForConditionalGenerationNextN
            GlmMoeDsaForCausalLMNextN GlmOcrForConditionalGenerationNextN HYV3ForCausalLMNextN HYV4ForCausalLMNextN
            IQuestQ1MTP InklingForConditionalGenerationMTP Lfm2DSparkDraftModel LingDSparkModel
            LlamaForCausalLMEagle LlamaForCausalLMEagle3 LongcatFlashForCausalLMNextN MiMoMTP MiMoV2MTP
            MiniMaxDFlash2DraftModel MistralForCausalLMEagle MistralLarge3ForCausalLMEagle MuseGlimmerAssistantModel
            NemotronHForCausalLMMTP Qwen2ForCausalLMEagle Qwen3DSparkModel Qwen3MoeForCausalLMMTP
            Qwen3NextForCausalLMMTP Qwen3_5ForCausalLMMTP Qwen4ExpForCausalLMMTP Step3p5MTP
        """,
        "metrics": """
            sglang:spec_accept_length sglang:spec_accept_rate sglang:spec_block_accept_length sglang:spec_cap_length
            sglang:spec_num_draft_tokens sglang:spec_num_steps sglang:spec_verify_calls_total
        """,
    },
}
