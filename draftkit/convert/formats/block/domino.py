"""Domino as SpecForge, NeMo Automodel and ModelOpt train and store it: z-lab's layout, and a recurrent head.

`shift_label` states that every row predicts the next token; without it rows are filled in. Early files have the head
under `logit_head.`. Source: sgl-project/SpecForge `modeling/draft/domino.py`, NeMo Automodel `train_domino.py`,
Model-Optimizer `hf_spec_export.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.reading import BlockLayout, has_head, lift_nested, plan_block_draft
from draftkit.convert.formats.block.writing import last_state_at, zlab_body, zlab_config
from draftkit.convert.plan import Plan
from draftkit.layout.families.domino import DominoSpec
from draftkit.layout.target import TargetFacts

NAME = "domino"
TITLE = "Domino (SpecForge, NeMo Automodel, ModelOpt)"
DESTINATION = "domino"
METHODS = ("domino",)

LAYOUT = BlockLayout(NAME, slots="fill-in", last_state="after_norm", renames={"logit_head.": ""}, shifts=True)


def recognize(checkpoint: Checkpoint) -> int:
    return 6 * has_head(checkpoint, r"(logit_head\.)?prefix_gru\.", "domino")


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    return plan_block_draft(checkpoint, facts, target, LAYOUT, DominoSpec, _head)


def _head(view: Checkpoint, facts: Facts, body: Mapping[str, Any]) -> dict[str, Any]:
    del body
    features, _ = view.matrix("embed_proj.0.weight")
    _, states = view.matrix("prefix_gru.weight_hh_l0")
    return {
        "gru_hidden_dim": facts.from_tensors("gru_hidden_dim", states, "columns of weight_hh_l0"),
        "emb_dim": facts.from_tensors("emb_dim", features, "rows of embed_proj.0"),
        "pure_draft_prefix_len": facts.stated_or("pure_draft_prefix_len", int, 0, "every predicting row is corrected"),
    }


def export(outgoing: Outgoing) -> Export:
    draft = outgoing.draft.spec.architecture.expect(DominoSpec)
    runs = zlab_body(draft, last_state_at(outgoing, draft, LAYOUT))
    config = zlab_config(outgoing, draft, "DominoDraftModel") | {"emb_dim": draft.emb_dim}
    return Export(config, tuple(kept(outgoing, runs, {})), losses(draft, runs))
