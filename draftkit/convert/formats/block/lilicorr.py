"""LiLiCorr as ModelOpt exports it and vLLM and SGLang load it: z-lab's layout, and the head under `lilicorr.`.

Older exports number the modules of its MLPs. Source: vLLM 0.32 `lilicorr.py`, whose keys are required without a
default; NVIDIA/Model-Optimizer `test_hf_lilicorr.py`; sgl-project/sglang `models/lilicorr.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.reading import BlockLayout, lift_nested, plan_block_draft, read_convolution
from draftkit.convert.formats.block.writing import last_state_at, zlab_body, zlab_config
from draftkit.convert.plan import Plan
from draftkit.errors import FormatError
from draftkit.layout.families.lilicorr import LiLiCorrSpec
from draftkit.layout.target import TargetFacts

NAME = "lilicorr"
TITLE = "LiLiCorr (ModelOpt; vLLM, SGLang)"
DESTINATION = "lilicorr"
METHODS = ("lilicorr",)

LAYOUT = BlockLayout(NAME, slots="fill-in", last_state="after_norm")
NUMBERED = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
}
NUMBERED_OF_LAYER = {"mlp.0.": "mlp.up_proj.", "mlp.2.": "mlp.down_proj."}


def recognize(checkpoint: Checkpoint) -> int:
    """The head's tensors, or its name in the config."""
    has_tensors = any(name.startswith("lilicorr.") for name in checkpoint.tensors)
    return 6 * (has_tensors or any(NAME in name.lower() for name in checkpoint.kind_names))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    if facts.optional("lilicorr_enabled", bool) is False:
        raise FormatError("lilicorr_enabled is false: no engine loads the draft", where=checkpoint.config_path)
    renames = dict(NUMBERED)
    for layer in range(checkpoint.count(r"lilicorr\.layers\.(\d+)\.")):
        renames |= {f"layers.{layer}.{old}": f"layers.{layer}.{new}" for old, new in NUMBERED_OF_LAYER.items()}
    layout = replace(LAYOUT, renames={f"lilicorr.{old}": f"lilicorr.{new}" for old, new in renames.items()})
    return plan_block_draft(checkpoint, facts, target, layout, LiLiCorrSpec, _head)


def _head(view: Checkpoint, facts: Facts, body: Mapping[str, Any]) -> dict[str, Any]:
    del body
    sizes = ("candidate_topk", "num_layers", "num_heads", "factor_dim")
    numbers = ("mlp_ratio", "vector_eps", "logit_scale")
    return {
        "convolution": read_convolution(view, facts),
        "lilicorr_hidden_size": facts.stated_or("lilicorr_hidden_size", int, 0, "as wide as the draft"),
        **{f"lilicorr_{name}": facts.size(f"lilicorr_{name}") for name in sizes},
        **{f"lilicorr_{name}": facts.stated(f"lilicorr_{name}", float) for name in numbers},
    }


def export(outgoing: Outgoing) -> Export:
    draft = outgoing.draft.spec.architecture.expect(LiLiCorrSpec)
    runs = zlab_body(draft, last_state_at(outgoing, draft, LAYOUT))
    config = zlab_config(outgoing, draft, "LiLiCorrDraftModel") | {"has_own_lm_head": draft.lm_head == "draft"}
    return Export(config, tuple(kept(outgoing, runs, {})), losses(draft, runs))
