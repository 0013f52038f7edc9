"""What SGLang has, by release: algorithms, config keys and architectures, each with its evidence.

`python -m scripts.check.releases sglang==NUMBER` compares a release with its tables. What it computes otherwise than
drafts of a method may ask for has not been read: it has no capabilities here.
"""

from __future__ import annotations

from draftkit.engines.releases import Release, each, has
from draftkit.engines.sglang.names import NAMES

SETTINGS = "srt/arg_groups/fields/spec.py"
HOOK = "srt/arg_groups/speculative_hook.py"

V0_5_23 = Release(
    engine="SGLang",
    number="0.5.23",
    methods=each(has("srt/speculative/spec_info.py"), NAMES["0.5.23"]["methods"])
    | {"UNO": has(HOOK, "uno_lora_path", when="a LoRA on the target by --uno-lora-path, and no draft model")},
    config_keys=each(has(SETTINGS), NAMES["0.5.23"]["config_keys"])
    | {
        "speculative_draft_window_size": has(
            HOOK, "speculative_draft_window_size", when="EAGLE, EAGLE3 and DFLASH, there no less than the draft tokens"
        ),
        "speculative_draft_sink_size": has(
            HOOK, "speculative_draft_sink_size", when="with a window, in EAGLE's and MTP's steps alone"
        ),
        "speculative_use_block_verification": has(
            HOOK, "speculative_use_block_verification", when="EAGLE, EAGLE3, DFLASH and DSPARK on CUDA or ROCm"
        ),
    }
    | each(
        has("srt/speculative/dspark_components/dspark_sts.py", when="DSPARK"), "speculative_dspark_confidence_sts_path"
    )
    | each(has("srt/speculative/dspark_components/dspark_sps.py", when="DSPARK"), "speculative_dspark_sps_table_path"),
    architectures=each(has("srt/models"), NAMES["0.5.23"]["architectures"]),
    metrics=each(has("srt/observability/metrics_collector.py"), NAMES["0.5.23"]["metrics"]),
    rules={
        "short-drafts-refused": has("srt/configs/model_config.py", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
        "adapters-beside-drafts": has(
            "srt/arg_groups/lora_hook.py",
            "def check_lora_speculative_compatibility",
            when="NGRAM, EAGLE, EAGLE3, DFLASH and DSPARK, whose drafts stay unadapted",
        ),
    },
)

RELEASES = (V0_5_23,)
