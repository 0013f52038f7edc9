"""DFlash as z-lab publishes it, which SpecForge, ModelOpt and NeMo Automodel write too; DFlash2 and JetSpec with it.

No embedding and no head: they are the target's. `dflash_config` nests the mask token and the layers whose outputs are
captured. Source: z-lab/dflash `model.py`, vLLM 0.32 `qwen3_dflash.py`, `qwen3_dflash2.py`, Model-Optimizer
`hf_spec_export.py`, NeMo Automodel `train_dflash.py`, `train_dflash2.py`, `train_jetspec.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.block_reading import BlockLayout, LastState, lift_nested
from draftkit.convert.block_writing import last_state_at
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.dflash_reading import CONFIDENCE, MARKOV, plan_dflash
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.operations import copy
from draftkit.convert.plan import Plan
from draftkit.layout.block import MASK_FILE, NESTED
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
    target = {} if outgoing.target is None else {"num_target_layers": outgoing.target.num_hidden_layers}
    config = _config(draft) | target | {"dtype": outgoing.dtype}
    return Export(config, tuple(moves), losses(draft, runs), torch_files=apart)


def _zlab_draft(draft: DFlashSpec, last_state: LastState) -> DFlashSpec:
    """The draft that readers of this layout make of this one."""
    decoder = draft.decoder
    own = draft if draft.method == "dflash2" else replace(draft, embedding_scale=1.0, logit_softcap=0.0)
    uniform = len(draft.causal_layers) in (0, decoder.num_hidden_layers)
    return replace(
        own,
        decoder=replace(decoder, output_bias=decoder.qkv_bias, mlp_bias=False, qk_norm=True),
        last_state=last_state,
        slots="fill-in",
        causal_layers=draft.causal_layers if uniform else draft.sliding_layers,
        window_rule="row",
        markov=None,
        confidence="none",
    )


def _config(draft: DFlashSpec) -> dict[str, object]:
    """Block size and causality at both levels, as readers look for them at either."""
    layers = draft.decoder.num_hidden_layers
    nested = draft.nested_config() | {"block_size": draft.block_size}
    config: dict[str, object] = {"architectures": [VLLM_CLASSES[draft.method]], **draft.body_config()}
    if len(draft.causal_layers) in (0, layers):
        config["is_causal"] = nested["causal"] = bool(draft.causal_layers)
    if draft.target_hidden_size != draft.decoder.hidden_size:
        config["target_hidden_size"] = draft.target_hidden_size
    if draft.reduced_vocabulary:
        config["draft_vocab_size"] = draft.draft_vocab_size
    if draft.logit_scale != 1.0 and draft.method != "dflash2":
        config["logit_scale"] = draft.logit_scale
    return config | {NESTED: nested}
