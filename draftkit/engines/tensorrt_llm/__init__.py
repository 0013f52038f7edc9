"""TensorRT-LLM: the trees that it drafts, and how it is started with one."""

from __future__ import annotations

import json
from pathlib import Path

from draftkit.engines.known import asked
from draftkit.engines.trees import DynamicTree
from draftkit.errors import command
from draftkit.layout.spec import DraftSpec

ENGINE = "TensorRT-LLM"
OPTIONS = "speculative.json"  # which is YAML too


def serve_tree(spec: DraftSpec, target: str, folder: Path | str, tree: DynamicTree, batch: int) -> str | None:
    """The commands that serve the target with trees of a draft, for up to `batch` requests together; its counting is
    draftkit's. None for a draft of which it drafts none, and for a tree of fewer nodes than levels or of more than its
    frontiers have."""
    releases = asked(ENGINE)
    methods = releases[0].rules["trees"].methods or () if releases else ()
    if spec.method not in methods or not tree.depth <= tree.nodes <= tree.width * tree.depth:
        return None
    options = {
        "decoding_type": "Eagle3",
        "speculative_model": str(folder),
        "max_draft_len": tree.depth,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": tree.width,
        "max_total_draft_tokens": tree.nodes,
        "max_batch_size": batch,
    }
    written = command("echo", json.dumps({"speculative_config": options}))
    served = command("trtllm-serve", target, "--config", OPTIONS, "--max_batch_size", str(batch))
    return f"{written} > {OPTIONS}\n{served}"
