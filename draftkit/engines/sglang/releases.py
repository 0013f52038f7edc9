"""What SGLang has, by release: algorithms, config keys and architectures, each with its evidence.

`python -m scripts.check.releases FOLDER` compares a release with its tables. What it computes otherwise than drafts of
a method may ask for has not been read: it has no capabilities here.
"""

from __future__ import annotations

from draftkit.engines.releases import Release, each, has

PRESENT = Release(
    engine="SGLang",
    number="0.5.23",
    methods=each(
        has("srt/speculative/spec_info.py"), "DFLASH UNO DSPARK EAGLE EAGLE3 FROZEN_KV_MTP STANDALONE NGRAM NONE NEXTN"
    ),
    config_keys=each(
        has("srt/arg_groups/fields/spec.py"),
        """speculative_algorithm uno_lora_path speculative_draft_model_path speculative_boundary_reduction
        speculative_draft_model_revision speculative_draft_load_format speculative_num_steps
        speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size
        speculative_domino_candidate_pool_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling
        speculative_use_block_verification speculative_token_map speculative_attention_mode
        speculative_draft_attention_backend speculative_dsa_topk_backend speculative_draft_kv_cache_dtype
        speculative_draft_window_size speculative_draft_sink_size speculative_moe_runner_backend
        speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe
        speculative_draft_model_quantization enable_multi_layer_eagle speculative_adaptive
        speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
        speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
        speculative_ngram_capacity speculative_ngram_external_corpus_path
        speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens""",
    ),
    architectures=each(
        has("srt/models"),
        """LlamaForCausalLMEagle LlamaForCausalLMEagle3 Qwen2ForCausalLMEagle MistralForCausalLMEagle
        MistralLarge3ForCausalLMEagle Eagle3DeepseekV2ForCausalLM Ernie4_5_MoeForCausalLMMTP
        DFlashDraftModel DFlashLagunaForCausalLM MuseGlimmerAssistantModel DFlash2DraftModel
        DFlash2BeamDraftModel MiniMaxDFlash2DraftModel Qwen3DSparkModel LingDSparkModel DSparkDraftModel
        DSparkMiniMaxDraftModel BailingMoeForCausalLMNextN DeepseekV3ForCausalLMNextN
        DeepseekV4ForCausalLMNextN Dots3NoteForCausalLMNextN Glm4MoeLiteForCausalLMNextN
        Glm4MoeForCausalLMNextN Glm5NextForConditionalGenerationNextN GlmOcrForConditionalGenerationNextN
        HYV3ForCausalLMNextN HYV4ForCausalLMNextN LongcatFlashForCausalLMNextN MiMoV2MTP MiMoMTP
        ExaoneMoEForCausalLMMTP Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM
        GigaChat35ForCausalLMNextN IQuestQ1MTP NemotronHForCausalLMMTP Qwen3_5ForCausalLMMTP
        Qwen3MoeForCausalLMMTP Qwen3NextForCausalLMMTP Qwen4ExpForCausalLMMTP Step3p5MTP
        DeepseekV4ForCausalLMDSpark GlmMoeDsaForCausalLMNextN InklingForConditionalGenerationMTP
        Lfm2DSparkDraftModel""",
    ),
)
