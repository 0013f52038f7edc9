"""What SGLang has, by release: algorithms, config keys and architectures, each with its evidence.

`python -m scripts.check.releases sglang==NUMBER` compares a release with its tables. Of what it computes otherwise than
drafts of a method may ask for, little has been read: of the rest nothing is known.
"""

from __future__ import annotations

from draftkit.engines.releases import Release, each, has, lacks
from draftkit.engines.sglang.names import NAMES

SETTINGS = "srt/arg_groups/fields/spec.py"
HOOK = "srt/arg_groups/speculative_hook.py"
ADAPTERS = "srt/arg_groups/lora_hook.py"
BLOCK = "srt/models/dflash.py"
EAGLE3 = "srt/models/llama_eagle3.py"
STS = "srt/speculative/dspark_components/dspark_sts.py"
SPS = "srt/speculative/dspark_components/dspark_sps.py"
WINDOW, SINKS = "speculative_draft_window_size", "speculative_draft_sink_size"
DRAFTED_ALONE = ("EAGLE", "NEXTN")  # of these a window shortens what the drafted tokens read (`spec_utils.py`)
STEPPING, BLOCKS = ("EAGLE", "EAGLE3"), ("DFLASH", "DSPARK")

# The settings that a serve line may have besides, each with what it is given.
OFFERED = {
    WINDOW: has(HOOK, "speculative_draft_window_size", methods=(*STEPPING, "DFLASH"), when="TOKENS, of text to read"),
    SINKS: has(HOOK, "speculative_draft_sink_size", methods=DRAFTED_ALONE, when="TOKENS, with a window"),
    "speculative_use_block_verification": has(
        HOOK, "speculative_use_block_verification", methods=(*STEPPING, *BLOCKS), when="on CUDA or ROCm"
    ),
    "speculative_dspark_confidence_sts_path": has(STS, methods=("DSPARK",), when="FILE, of temperatures"),
    "speculative_dspark_sps_table_path": has(SPS, methods=("DSPARK",), when="FILE, of what rows cost"),
}

V0_5_23 = Release(
    engine="SGLang",
    number="0.5.23",
    methods=each(has("srt/speculative/spec_info.py"), NAMES["0.5.23"]["methods"])
    | {"UNO": has(HOOK, "uno_lora_path", when="a LoRA on the target by --uno-lora-path, and no draft model")},
    config_keys=each(has(SETTINGS), NAMES["0.5.23"]["config_keys"]) | OFFERED,
    architectures=each(has("srt/models"), NAMES["0.5.23"]["architectures"]),
    capabilities={
        "block-own-tables": lacks(BLOCK, "if self.is_nemotron_35_draft"),
        "model-window": lacks("srt/models/llama.py", no_code="sliding_window"),
        "block-other-width": lacks(BLOCK, "DFLASH fc.weight shape mismatch", refuses=True),
    },
    plain_parts={
        "embed": has(EAGLE3, "self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size"),
        "fc": has(BLOCK, "self.fc = nn.Linear(self.num_context_features * hidden_size", when="of most block drafters"),
        "fc of eagle3": has(EAGLE3, "self.fc = torch.nn.Linear(self.hidden_size_in * self.num_aux_hidden_states"),
    },
    metrics=each(has("srt/observability/metrics_collector.py"), NAMES["0.5.23"]["metrics"]),
    rules={
        "short-drafts-refused": has(
            "srt/configs/model_config.py",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
            when="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 lets it",
            thread="sgl-project/sglang #10787",
        ),
        "adapters-beside-drafts": has(
            ADAPTERS,
            "def check_lora_speculative_compatibility",
            methods=("NGRAM", *STEPPING, *BLOCKS),
            when="whose drafts stay unadapted",
        ),
        "trees": has(
            HOOK,
            "cfg.speculative_eagle_topk == 1 and cfg.speculative_num_draft_tokens != cfg.speculative_num_steps + 1",
            methods=(*STEPPING, "NEXTN", "STANDALONE"),
            when="with pages of one token, or with flashinfer, fa3 or triton; not with trtllm_mha, "
            "trtllm_mla or sparse attention",
            thread="sgl-project/sglang #7523",
        ),
        "images-embedded-for-drafts": has(
            EAGLE3,
            "forward_batch.mm_input_embeds",
            methods=("EAGLE3",),
            when="one position ahead",
        ),
        "one-pipeline-stage": has(HOOK, "'Currently DFLASH speculative decoding only supports", methods=("DFLASH",)),
    },
)

RELEASES = (V0_5_23,)
