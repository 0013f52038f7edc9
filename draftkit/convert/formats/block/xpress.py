"""XPress as its first drafts are published: z-lab's layout, and the head under `xpress_head.`.

The whole vocabulary, rows filled in. Source: the loaders of these files in vLLM after 0.32 (`qwen3_xpress.py`,
`xpress_head.py`) and in MLX, which list their keys and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.reading import BlockLayout, has_head, lift_nested, plan_block_draft
from draftkit.convert.formats.block.writing import last_state_at, zlab_body, zlab_config
from draftkit.convert.plan import Plan
from draftkit.layout.families.xpress import XPressSpec
from draftkit.layout.target import TargetFacts

NAME = "xpress"
TITLE = "XPress"
DESTINATION = "xpress"
METHODS = ("xpress",)

RENAMES = {
    "xpress_head.w1.": "refiner_head.token_embed.",
    "xpress_head.w2.": "refiner_head.readout.",
    "xpress_head.mix.L": "refiner_head.mix_l",
    "xpress_head.mlp.gate_proj.": "refiner_head.mlp_gate.",
    "xpress_head.mlp.up_proj.": "refiner_head.mlp_up.",
    "xpress_head.mlp.down_proj.": "refiner_head.mlp_down.",
    "xpress_head.": "refiner_head.",
}
LAYOUT = BlockLayout(NAME, slots="fill-in", last_state="after_norm", renames=RENAMES)


def recognize(checkpoint: Checkpoint) -> int:
    return 5 * has_head(checkpoint, r"xpress_head\.", "xpress")


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    read_head = partial(read_refiner, passes="xpress_num_passes")
    return plan_block_draft(checkpoint, facts, target, LAYOUT, XPressSpec, read_head)


def read_refiner(view: Checkpoint, facts: Facts, body: Mapping[str, Any], *, passes: str) -> dict[str, Any]:
    """The head's facts, in either layout; `passes`: the key of the number of passes."""
    del body
    for key in ("xpress_block_size", "xpress_mlp_ratio"):
        facts.drop(key, "the tensors tell")
    mlp, rank = view.matrix("refiner_head.mlp_gate.weight")
    return {
        "xpress_rank": facts.from_tensors("xpress_rank", rank, "columns of the MLP"),
        "xpress_mlp_hidden": facts.from_tensors("xpress_mlp_hidden", mlp, "rows of the MLP"),
        "num_jacobi_passes": facts.size(passes, 6, "of the published drafts", "num_jacobi_passes"),
    }


def export(outgoing: Outgoing) -> Export:
    draft = outgoing.draft.spec.architecture.expect(XPressSpec)
    runs = replace(zlab_body(draft, last_state_at(outgoing, draft, LAYOUT)), slots="fill-in")
    config = zlab_config(outgoing, draft, "Qwen3XPressModel") | draft.xpress_keys()
    back = {new: old for old, new in RENAMES.items()}
    return Export(config, tuple(kept(outgoing, runs, back)), losses(draft, runs))
