"""XPress as the speculators library trains and stores it (0.9): its DFlash layout, and the head under `refiner_head.`.

Source: `speculators/models/xpress`. vLLM 0.32 has no class for it.
"""

from __future__ import annotations

from functools import partial

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.reading import BlockLayout, plan_block_draft, read_library_draft
from draftkit.convert.formats.block.writing import library_body, library_config, library_moves, library_obstacles
from draftkit.convert.formats.block.xpress import read_refiner
from draftkit.convert.formats.speculators import recognize_kinds, refuse_inexpressible, with_target_named
from draftkit.convert.plan import Plan
from draftkit.layout.families.xpress import XPressSpec
from draftkit.layout.target import TargetFacts

NAME = "speculators-xpress"
TITLE = "XPress (speculators layout)"
DESTINATION = "speculators"
METHODS = ("xpress",)

LAYOUT = BlockLayout(NAME, slots="fill-in", last_state="before_norm")


def recognize(checkpoint: Checkpoint) -> int:
    return recognize_kinds(checkpoint, METHODS)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    _, named = read_library_draft(checkpoint, facts, METHODS)
    read_head = partial(read_refiner, passes="num_jacobi_passes")
    return with_target_named(plan_block_draft(checkpoint, facts, target, LAYOUT, XPressSpec, read_head), named)


def export(outgoing: Outgoing) -> Export:
    draft = outgoing.draft.spec.architecture.expect(XPressSpec)
    ratio, rest = divmod(draft.xpress_mlp_hidden, draft.xpress_rank)
    uneven = ["the features of its MLP are no multiple of its rank"] if rest else []
    refuse_inexpressible(outgoing, library_obstacles(draft) + uneven)
    config = library_config(outgoing, draft) | {
        "xpress_rank": draft.xpress_rank,
        "xpress_mlp_ratio": ratio,
        "num_jacobi_passes": draft.num_jacobi_passes,
    }
    return Export(config, library_moves(outgoing, draft), losses(draft, library_body(draft)))
