"""DFlash as z-lab publishes it, which SpecForge, ModelOpt and NeMo Automodel write too; DFlash2 and JetSpec with it.

No embedding and no head: they are the target's. `dflash_config` nests the mask token and the layers whose outputs are
captured. Source: z-lab/dflash `model.py`, vLLM 0.32 `qwen3_dflash.py`, `qwen3_dflash2.py`, Model-Optimizer
`hf_spec_export.py`, NeMo Automodel `train_dflash.py`, `train_dflash2.py`, `train_jetspec.py`;
of the heads of DSpark deepseek-ai/DeepSpec `modeling/dspark` and vLLM 0.32 `qwen3_dspark.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.reading import (
    BlockLayout,
    LastState,
    lift_nested,
    plan_block_draft,
    read_convolution,
)
from draftkit.convert.formats.block.writing import last_state_at, zlab_body, zlab_config
from draftkit.convert.operations import copy
from draftkit.convert.plan import Plan
from draftkit.errors import FormatError
from draftkit.layout.block import MASK_FILE
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.dflash import VLLM_CLASSES, CandidateSelector, DFlashSpec, MarkovHead
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
    """Write for engines; z-lab's module, of this layout, has no causal windows, no sinks, and no tables of its own."""
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


MarkovType = Literal["vanilla", "gated", "rnn"]
Confidence = Literal["none", "hidden", "hidden_and_token"]
MARKOV, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"


def plan_dflash(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None, layout: BlockLayout) -> Plan:
    """Plan the conversion of a draft of this family, whose config keys stand side by side (`Facts.lift`)."""
    return plan_block_draft(checkpoint, facts, target, layout, DFlashSpec, _heads)


def _heads(view: Checkpoint, facts: Facts, body: Mapping[str, Any]) -> dict[str, Any]:
    markov = _markov(view, facts)
    convolution, selector = read_convolution(view, facts), _selector(view, facts)
    for key in ("attention_sink_bias", "add_swa_attention_sink_bias"):
        facts.drop(key, "the tensors tell")
    sinks = "layers.0.self_attn.attention_sink_bias" in view.tensors
    return {
        "mask_embedding": facts.record("mask_embedding", "mask_embedding" in view.tensors, "from tensors"),
        "attention_sinks": facts.record("attention_sinks", sinks, "from tensors"),
        "value_scale": facts.stated_or("attention_value_scale", float, 1.0, "none", "value_scale"),
        "markov": markov,
        "confidence": _confidence(view, facts, body["decoder"], markov),
        "convolution": convolution,
        "selector": selector,
        "embedding_scale": facts.stated_or("input_embedding_scale", float, 1.0, "none", "embedding_scale"),
        "logit_scale": _logit_scale(facts, own_name=convolution is not None or selector is not None),
        "logit_softcap": facts.stated_or("final_logit_softcapping", float, 0.0, "none", "logit_softcap"),
    }


def _markov(view: Checkpoint, facts: Facts) -> MarkovHead | None:
    """DSpark's head by its tensors, which tell rank and type."""
    rank, kind = facts.optional("markov_rank", int), facts.optional("markov_head_type", str)
    if MARKOV not in view.tensors:
        if rank:
            raise FormatError(
                f"config.json has a Markov head of rank {rank}, and {MARKOV} is missing",
                where=view.source.path,
                hint="fetch the checkpoint again",
            )
        facts.record("markov", "None", "from tensors", "the file has no Markov head")
        return None
    types: dict[str, MarkovType] = {"gate_proj": "gated", "joint_proj": "rnn"}
    present = (name for part, name in types.items() if f"markov_head.{part}.weight" in view.tensors)
    found: MarkovType = next(present, "vanilla")
    if kind is not None and kind.lower() != found:
        raise FormatError(f"markov_head_type is {kind}, and the tensors are those of {found}", where=view.source.path)
    _, columns = view.matrix(MARKOV)
    facts.record("markov_type", found, "from tensors")
    return MarkovHead(markov_type=found, markov_rank=facts.record("markov_rank", columns, "from tensors"))


def _confidence(view: Checkpoint, facts: Facts, decoder: Decoder, markov: MarkovHead | None) -> Confidence:
    for key in (
        "enable_confidence_head",
        "confidence_head_with_markov",
        "confidence_head_alpha",
        "use_confidence_head",
    ):
        facts.drop(key, "the tensors tell")
    found: Confidence = "none"
    if CONFIDENCE in view.tensors:
        _, columns = view.matrix(CONFIDENCE)
        reads_token = markov is not None and columns == decoder.hidden_size + markov.markov_rank
        found = "hidden_and_token" if reads_token else "hidden"
    facts.record("confidence", found, "from tensors")
    return found


def _selector(view: Checkpoint, facts: Facts) -> CandidateSelector | None:
    if "candidate_selector.predecessor_codebook" not in view.tensors:
        return None
    _, rank = view.matrix("candidate_selector.predecessor_codebook")
    return CandidateSelector(
        selector_rank=facts.from_tensors("selector_rank", rank, "columns of the codebooks"),
        selector_top_k=facts.size("selector_top_k"),
    )


def _logit_scale(facts: Facts, *, own_name: bool) -> float:
    """DFlash2 has a name of its own for it, and engines do not read the other one there."""
    if not own_name:
        return facts.stated_or("logit_scale", float, 1.0, "none")
    facts.drop("logit_scale", "DFlash2 has output_multiplier")
    return facts.stated_or("output_multiplier", float, 1.0, "none", "logit_scale")
