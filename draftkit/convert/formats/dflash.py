"""DFlash as z-lab publishes it, which SpecForge, ModelOpt and NeMo Automodel write too; DFlash2 and JetSpec with it.

No embedding and no head: they are the target's. `dflash_config` nests the mask token and the layers whose outputs are
captured. Source: z-lab/dflash `model.py`, vLLM 0.32 `qwen3_dflash.py`, `qwen3_dflash2.py`, Model-Optimizer
`hf_spec_export.py`, NeMo Automodel `train_dflash.py`, `train_dflash2.py`, `train_jetspec.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.block_reading import BlockLayout, LastState, lift_nested
from draftkit.convert.block_writing import last_state_at, zlab_body, zlab_config
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.dflash_reading import CONFIDENCE, MARKOV, plan_dflash
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.operations import copy
from draftkit.convert.plan import Plan
from draftkit.layout.block import MASK_FILE
from draftkit.layout.families.dflash import VLLM_CLASSES, DFlashSpec
from draftkit.layout.target import TargetFacts

NAME = "dflash"
TITLE = "DFlash, DFlash2 (z-lab layout)"
DESTINATION = "dflash"
METHODS = ("dflash", "dflash2")

LAYOUT = BlockLayout(NAME, slots="fill-in", last_state="after_norm", renames={"embedding": "mask_embedding"})


def recognize(checkpoint: Checkpoint) -> int:
    return 2 * ("hidden_norm.weight" in checkpoint.tensors)  # other drafts norm hidden states within their first layer


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    lift_nested(facts)
    with_heads = bool({MARKOV, CONFIDENCE} & checkpoint.tensors.keys())
    return plan_dflash(checkpoint, facts, target, replace(LAYOUT, slots=None) if with_heads else LAYOUT)


def export(outgoing: Outgoing) -> Export:
    """As engines read this layout; z-lab's own module has no windows that are causal, sinks, or tables of its own."""
    draft = outgoing.draft.spec.architecture.expect(DFlashSpec)
    runs = _zlab_draft(draft, last_state_at(outgoing, draft, LAYOUT))
    moves = kept(outgoing, runs, {}, without=["mask_embedding"])
    apart = {}
    if draft.mask_embedding:
        moves.append(copy(outgoing.tensor("mask_embedding"), "embedding"))
        apart[MASK_FILE] = ("embedding",)
    config = zlab_config(outgoing, draft, VLLM_CLASSES[draft.method])
    if draft.logit_scale != 1.0 and draft.method != "dflash2":
        config["logit_scale"] = draft.logit_scale
    return Export(config, tuple(moves), losses(draft, runs), torch_files=apart)


def _zlab_draft(draft: DFlashSpec, last_state: LastState) -> DFlashSpec:
    """The draft that readers of this layout make of this one."""
    own = draft if draft.method == "dflash2" else replace(draft, embedding_scale=1.0, logit_softcap=0.0)
    return replace(zlab_body(own, last_state), slots="fill-in", markov=None, confidence="none")
