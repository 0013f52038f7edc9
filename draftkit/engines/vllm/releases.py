"""What vLLM has, by release: methods, config keys, architectures and capabilities, each with its evidence.

`python -m scripts.check.releases vllm==NUMBER` compares a release with its tables.
What was run is in `benchmarks/README.md`.
"""

from __future__ import annotations

from draftkit.engines.releases import Release, each, has, lacks, ran
from draftkit.engines.vllm.names import NAMES

CONFIG = "config/speculative.py"
RUNNER = "config/vllm.py"
MODELS = "model_executor/models"
EAGLE = f"{MODELS}/llama_eagle.py"
EAGLE3 = f"{MODELS}/llama_eagle3.py"
BLOCK = f"{MODELS}/qwen3_dflash.py"
DSPARK = f"{MODELS}/qwen3_dspark.py"
DFLASH2 = f"{MODELS}/qwen3_dflash2.py"
LILICORR = f"{MODELS}/lilicorr.py"
ASSISTANT = f"{MODELS}/gemma4_mtp.py"
SELECTOR = "v1/worker/gpu/spec_decode/dflash2/speculator.py"
MODELOPT = "model_executor/layers/quantization/modelopt.py"
COMPRESSED = "model_executor/layers/quantization/compressed_tensors/compressed_tensors.py"
REGISTRY = f"{MODELS}/registry.py"
PROPOSER = "v1/spec_decode/llm_base_proposer.py"
STEPPER = "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py"
METRICS = "v1/spec_decode/metrics.py"
FIRST_RUNNER = "speculative method '{speculative_config.method}'"  # what its check of the second says of others
SLOTS_OF = "max_num_new_slots_for_drafting"
SYNTHETIC = has(CONFIG, "'synthetic'", lossy=True, when="it accepts by given rates")
# Instead of a kind of drafts that a release has dropped.
TRAIN_ANOTHER = "train an EAGLE-3 draft for the same target: draftkit train --recipe eagle3"
CAPTURING = ("dflash", "dspark", "eagle", "eagle3", "mtp")  # that read the target's states
# What both releases have in common: settings with conditions, and rules.
KEYS = {
    "enable_adaptive_verification": has(RUNNER, "'adaptive draft verification'", runner="V2"),
    "use_heterogeneous_vocab": has(RUNNER, "'heterogeneous-vocabulary draft models'", runner="V1"),
    "parallel_drafting": has(RUNNER, "'parallel drafting for EAGLE speculative decoding'", runner="V1"),
    "dspark_draft_topk": has(CONFIG, "dspark_draft_topk", when="DSpark drafts of Qwen3's layers"),
    "synthetic_acceptance_rates": has(CONFIG, "'synthetic'", when="rejection_sample_method synthetic"),
    "synthetic_acceptance_length": has(CONFIG, "'synthetic'", when="rejection_sample_method synthetic"),
}
QUANTIZATIONS = {
    **{
        name: has(MODELOPT, f"'{name}': ('modelopt")
        for name in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8")
    },
    "MIXED_PRECISION": has(MODELOPT, "'MIXED_PRECISION'"),
    "compressed-tensors": has(COMPRESSED, "CompressedTensorsConfig"),
}
PLAIN_PARTS = {
    "embed": has(EAGLE3, "self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size"),
    "markov": has(DSPARK, "self.markov_w1 = nn.Embedding(vocab_size, markov_rank)", when="markov_w1, a lookup"),
    "confidence": has(DSPARK, "params_dtype=torch.float32, prefix=maybe_prefix(prefix, 'proj')"),
}
RULES = {
    "short-drafts-skipped": has(
        "v1/worker/gpu_model_runner.py",
        "def _input_fits_in_drafter",
        runner="V1",
        when="where a sequence of the batch and a round's draft are longer than the draft's config says",
    ),
    "multimodal-ropes-refused": has(
        PROPOSER,
        "does not support M-RoPE yet",
        runner="V1",
        methods=("dflash", "draft_model"),
        when="parallel drafts too",
    ),
    "images-embedded-for-drafts": has(
        PROPOSER, "supports_multimodal_embeddings", methods=("mtp",), when="one position ahead; of Qwen3.5's heads"
    ),
    "multimodal-positions-by-time": has(
        PROPOSER, "self.vllm_config.model_config.uses_mrope", runner="V1", when="of a draft with plain rope"
    ),
    "positions-count-tokens": has(STEPPER, no_code="mrope", runner="V2", when="whatever rope a draft has"),
    "positions-clamped": has(
        "v1/worker/gpu/spec_decode/dflash/speculator.py", "max_model_len", runner="V2", when="at the target's length"
    ),
}

SLOTS = {
    "draft_model": has(CONFIG, SLOTS_OF, when="1"),
    "draft_model in parallel": has(CONFIG, SLOTS_OF, when="K"),
    "eagle3 in parallel": has(CONFIG, SLOTS_OF, when="K - 1"),
}

# What each names: written by the script. By hand are what was run, what has conditions, and what is not there.
V0_32 = Release(
    engine="vLLM",
    number="0.32",
    methods=each(has(CONFIG), NAMES["0.32"]["methods"])
    | each(ran(), "draft_model eagle eagle3 dflash mtp ngram extract_hidden_states")
    | each(has(RUNNER, FIRST_RUNNER, runner="V1"), "suffix custom_class medusa")
    | {
        "dspark": ran(runner="V2"),
        "mlp_speculator": lacks("v1/worker/gpu_model_runner.py", no_code="mlp_speculator", instead=TRAIN_ANOTHER),
    },
    config_keys=each(has(CONFIG), NAMES["0.32"]["config_keys"]) | KEYS,
    architectures=each(has(REGISTRY), NAMES["0.32"]["architectures"])
    | each(ran(), "EagleLlamaForCausalLM LlamaForCausalLMEagle3 DFlashDraftModel")
    | each(ran(runner="V2"), "Qwen3DSparkModel DFlash2DraftModel LiLiCorrDraftModel"),
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
        "mixed-block-windows": ran(runner="V2"),
        "block-own-tables": has(BLOCK, "'has_own_lm_head'"),
        "block-other-width": has(BLOCK, "'target_hidden_size'"),
        "scaled-tables": lacks(BLOCK, no_code="input_embedding_scale"),
        "gated-markov": lacks(DSPARK, no_code="markov_head_type"),
        "markov-mask-embedding": lacks(DSPARK, "orig_to_new_substr = {'mask_embedding': None}"),
        "convolutions-or-selector": lacks(DFLASH2, "rank=int(draft_config['selector_rank'])"),
        "selector-with-markov": lacks(DFLASH2, no_code="markov"),
        "selector-vocabulary": lacks(DFLASH2, "vocab_size=self.config.vocab_size", no_code="draft_vocab_size"),
        "causal-windows-alone": lacks(
            "transformers_utils/configs/speculators/algos.py",
            "config_dict.get('sliding_window_non_causal', True)",
            thread="vllm-project/vllm #56692",
        ),
        "weighed-from-anchor": lacks(LILICORR, "self.num_candidate_slots = block_size - 1"),
        "weighed-vocabulary": lacks(LILICORR, "'LiLiCorr candidates require the full target vocabulary.'"),
        "weighed-own-embeddings": lacks(
            "v1/worker/gpu/spec_decode/lilicorr/speculator.py", "self.target_embeddings(candidate_ids)"
        ),
        "weighed-candidate-counts": lacks(LILICORR, "'LiLiCorr candidate_topk must be a power of two <= 16.'"),
        "shared-keys-concatenation": lacks(ASSISTANT, "torch.cat([inputs_embeds, hidden_states], dim=-1)"),
        "shared-keys-state": lacks(ASSISTANT, "self.pre_projection(combined)"),
        "shared-keys-position": lacks("v1/spec_decode/gemma4.py", "self.constant_draft_positions = True"),
        "sink-tokens": lacks(CONFIG, no_code="sink_size"),
        "head-window": lacks(CONFIG, no_code="draft_window"),
        # The first runner (V1) gives a draft model the target's table of blocks, also where its window makes its layers
        # a group of their own, whose blocks share the target's memory. It was run: the output was not the target's.
        "model-window": lacks(
            "v1/worker/gpu_model_runner.py",
            "(EagleProposer, DFlashProposer, Gemma4Proposer, ExtractHiddenStatesProposer)",
        ),
        "added-target-features": lacks("v1/spec_decode/draft_model.py", "pass_hidden_states_to_model=False"),
    },
    verifications=each(has(CONFIG), NAMES["0.32"]["verifications"]) | {"synthetic": SYNTHETIC},
    metrics=each(has(METRICS), NAMES["0.32"]["metrics"]),
    rules={
        "draft-length-raised": has(CONFIG, "'eagle', 'eagle3'", methods=("eagle", "eagle3"), when="of any rope"),
        "target-length-lowered": lacks(RUNNER, no_code="_limit_max_model_len_to_draft"),
        "flat-exclusions-called-ignore": has(MODELOPT, "config.get('ignore', [])"),
        "exclusions-by-checkpoint-name": lacks(f"{MODELS}/utils.py", no_code="map_draft_quant_config"),
        "selector-noise-by-step": lacks(SELECTOR, no_code="spec_step_seed"),
        **RULES,
    },
    quantizations=QUANTIZATIONS,
    plain_parts=PLAIN_PARTS,
    slots=SLOTS
    | {
        "dflash in parallel": has(CONFIG, SLOTS_OF, when="K"),
        "dspark in parallel": has(CONFIG, SLOTS_OF, when="K - 1"),
    },
)
# Read in its source. Nothing of it was run: the index has no wheel of it for the CPU.
V0_33 = Release(
    engine="vLLM",
    number="0.33",
    methods=each(has(CONFIG), NAMES["0.33"]["methods"])
    | each(has(RUNNER, "('suffix', 'custom_class')", runner="V1"), "suffix custom_class")
    | {"dspark": has(RUNNER, "'dspark speculative decoding'", runner="V2")}
    | {"mlp_speculator": lacks(CONFIG, no_code="medusa", instead=TRAIN_ANOTHER)},
    config_keys=each(has(CONFIG), NAMES["0.33"]["config_keys"])
    | KEYS
    | {
        "draft_lm_head_quantization": has(
            RUNNER,
            "'draft lm_head quantization'",
            runner="V2",
            methods=("eagle", "eagle3", "mtp"),
            when="eagle, eagle3 and mtp drafts that share the target's output layer",
        ),
        "xpress_topc": has(CONFIG, "is_xpress", when="XPress drafts"),
    }
    | each(
        has(CONFIG, "'fly'", when="rejection_sample_method fly"),
        "fly_window_size fly_entropy_threshold fly_entropy_top_k",
    ),
    architectures=each(has(REGISTRY), NAMES["0.33"]["architectures"])
    | each(has(RUNNER, "'Parse 3.5 MTP'", runner="V2"), "ParseAuxMTPModel")
    | each(has(RUNNER, "'xpress speculative decoding'", runner="V2"), "Qwen3XPressModel DFlashQwen3XPressModel")
    | each(
        has(RUNNER, "'DFlash candidate-head drafts'", runner="V2"),
        "DFlash2DraftModel DFlash2BeamDraftModel LiLiCorrDraftModel",
    )
    | each(
        has(RUNNER, "'dspark speculative decoding'", runner="V2"),
        " ".join(name for name in NAMES["0.33"]["architectures"].split() if "DSpark" in name),
    ),
    capabilities={
        **V0_32.capabilities,
        "mixed-block-windows": has(RUNNER, "'mixed sliding/full dflash drafts'", runner="V2"),
    },
    verifications=each(has(CONFIG), NAMES["0.33"]["verifications"])
    | {
        "synthetic": SYNTHETIC,
        "fly": has(CONFIG, "fly_entropy_threshold", lossy=True, when="it lets a draft token stand in some contexts"),
    },
    metrics=each(has(METRICS), NAMES["0.33"]["metrics"]),
    rules={
        "draft-length-raised": has(CONFIG, "_CACHE_ONLY_ROPE_TYPES", methods=CAPTURING, when="by rope"),
        "target-length-lowered": has(
            RUNNER, "_limit_max_model_len_to_draft", runner="V2", when="a draft that ends early and is not raised"
        ),
        "draft-pass-bounds-sequences": has(RUNNER, "max_draft_seqs", methods=("dflash", "dspark"), when="K + 1"),
        "flat-exclusions-called-ignore": lacks(
            MODELOPT, "config.get('ignore', config.get('exclude_modules', []))", when="it takes either key"
        ),
        "exclusions-by-checkpoint-name": has(f"{MODELS}/utils.py", "map_draft_quant_config"),
        "selector-noise-by-step": has(SELECTOR, "spec_step_seed(seed, step)"),
        **RULES,
    },
    quantizations=QUANTIZATIONS,
    plain_parts=PLAIN_PARTS,
    slots=SLOTS,
    raised_ropes=frozenset(NAMES["0.33"]["raised_ropes"].split()),
)

RELEASES = (V0_33, V0_32)
