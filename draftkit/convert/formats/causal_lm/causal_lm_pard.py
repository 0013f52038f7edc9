"""PARD: a causal language model that AMD fine-tunes to draft all tokens in one pass.

The tensors of transformers; the config also has `pard_token`, the mask token, and mostly `spd_type` `pard`.
Source: AMD-AGI/PARD `pard/pard_infer.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.formats.causal_lm.causal_lm import (
    exported_config,
    exported_losses,
    plan_causal_lm,
    read_mask_token,
)
from draftkit.convert.plan import Plan
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.target import TargetFacts

NAME = "pard"
TITLE = "PARD (AMD)"

DESTINATION = "pard"
METHODS = ("pard",)


def recognize(checkpoint: Checkpoint) -> int:
    marked = "pard_token" in checkpoint.config or checkpoint.config.get("spd_type") == "pard"
    return 2 if marked and checkpoint.is_causal_lm else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_causal_lm(NAME, checkpoint, facts, target, parallel=read_mask_token(checkpoint, facts))


def export(outgoing: Outgoing) -> Export:
    model = outgoing.draft.spec.architecture.expect(CausalLMSpec)
    assert model.parallel is not None
    config = exported_config(outgoing.draft) | {"pard_token": model.parallel.mask_token_id}
    return Export(config=config, moves=tuple(outgoing.renamed({})), losses=exported_losses(outgoing.draft))
