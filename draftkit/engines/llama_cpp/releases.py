"""What llama.cpp has: kinds of drafts, and by `model_type` the targets that it drafts for, each with its evidence."""

from __future__ import annotations

from draftkit.engines.releases import Release, each, has, lacks, ran

PRESENT = Release(
    engine="llama.cpp",
    number="b11434",
    methods=each(ran(), "draft-simple draft-eagle3 draft-dflash draft-dspark draft-mtp"),
)
RELEASES = (PRESENT,)

# The targets whose graph hands out the inputs of its layers, and those whose graph keeps no state after its last layer
# for a draft.
WITH_LAYER_INPUTS = each(
    has("src/models", "t_layer_inp"),
    """bailing_moe_v3 deepseek_v4 gemma4 gemma4_text gpt_oss hunyuan_vl lfm2 llama mimo_v2 minimax minimax_m2 mistral
    muse_glimmer nanbeige nemotron_h qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    qwen4_exp qwen4_exp_text""",
)
WITHOUT_LAST_STATE = each(lacks("src/models"), "llama mistral")

# The targets for whose heads a graph is built, those of them whose graph takes more than one, and those whose memory it
# cannot take back by single tokens.
WITH_HEADS = each(
    has("src/models", "LLM_GRAPH_TYPE_DECODER_MTP"),
    """cohere2_moe deepseek_v32 deepseek_v4 glm4_moe glm4_moe_lite glm5_next glm_moe_dsa hy_v3 mimo_v2 mimo_v2_flash
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text step3p5""",
)
WITH_SEVERAL_HEADS = each(has("src/models"), "hy_v3 mimo_v2 mimo_v2_flash step3p5")
REPLAYED = each(lacks("src/llama-arch.cpp", "llm_arch_supports_rs_rollback"), "qwen3_next")
