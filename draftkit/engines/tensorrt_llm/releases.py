"""What TensorRT-LLM tells of its drafts, read in its source at a commit; nothing of it was run."""

from __future__ import annotations

from draftkit.engines.releases import Release, has

AVERAGE = "avg_decoded_tokens_per_iter"  # of an answer: its tokens / iterations, the prefill's among them

PRESENT = Release(
    engine="TensorRT-LLM",
    number="0076e93",
    methods={},
    metrics={AVERAGE: has("tensorrt_llm/serve/openai_protocol.py", AVERAGE)},
    rules={
        "unknown-fields-refused": has("tensorrt_llm/serve/openai_protocol.py"),
        "trees": has(
            "tensorrt_llm/llmapi/llm_args.py",  # at 0004396
            "default_max_total_draft_tokens = self.dynamic_tree_max_topK * self.max_draft_len",
            methods=("eagle3",),
            when="for targets without sliding windows and without MLA; max_batch_size is that of the server",
        ),
    },
)
RELEASES = (PRESENT,)
