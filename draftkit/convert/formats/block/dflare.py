"""DFlare as AngelSlim trains and stores it: z-lab's config, without `fc`.

Source: Tencent/AngelSlim `models/draft/qwen_dflare.py`, `configs/qwen3_dflare.json`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.reading import BlockLayout, has_head, lift_nested, plan_block_draft
from draftkit.convert.formats.block.writing import last_state_at, zlab_body, zlab_config
from draftkit.convert.plan import Plan
from draftkit.layout.families.dflare import DFlareSpec
from draftkit.layout.target import TargetFacts

NAME = "dflare"
TITLE = "DFlare (AngelSlim)"
DESTINATION = "dflare"
METHODS = ("dflare",)

LAYOUT = BlockLayout(NAME, slots="fill-in", last_state="after_norm")


def recognize(checkpoint: Checkpoint) -> int:
    return 6 * has_head(checkpoint, r"layer_fusion_weights$|layers\.\d+\.self_attn\.[kv]_proj_target\.", "dflare")


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    return plan_block_draft(checkpoint, facts, target, LAYOUT, DFlareSpec, lambda *_: {})


def export(outgoing: Outgoing) -> Export:
    draft = outgoing.draft.spec.architecture.expect(DFlareSpec)
    runs = zlab_body(draft, last_state_at(outgoing, draft, LAYOUT))
    return Export(
        zlab_config(outgoing, draft, "QwenDFlareDraftModel"), tuple(kept(outgoing, runs, {})), losses(draft, runs)
    )
