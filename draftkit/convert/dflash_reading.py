"""Reading the heads of DFlash, DSpark, DFlash2 and JetSpec, which their tensors tell.

Source: z-lab/dflash `model.py`, deepseek-ai/DeepSpec `modeling/dspark`, vLLM 0.32 `qwen3_dflash.py`,
`qwen3_dspark.py`, `qwen3_dflash2.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from draftkit.convert.block_reading import BlockLayout, plan_block_draft, read_convolution
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.errors import FormatError
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.dflash import CandidateSelector, DFlashSpec, MarkovHead
from draftkit.layout.target import TargetFacts

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
        selector_rank=facts.measured("selector_rank", rank, "columns of the codebooks"),
        selector_top_k=facts.size("selector_top_k"),
    )


def _logit_scale(facts: Facts, *, own_name: bool) -> float:
    """DFlash2 has a name of its own for it, and engines do not read the other one there."""
    if not own_name:
        return facts.stated_or("logit_scale", float, 1.0, "none")
    facts.drop("logit_scale", "DFlash2 has output_multiplier")
    return facts.stated_or("output_multiplier", float, 1.0, "none", "logit_scale")
