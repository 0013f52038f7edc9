"""A plain causal language model as draft, in the layout of transformers."""

from __future__ import annotations

from draftkit.convert.causal_lm import BASE_MODELS, exported_config, exported_losses, is_causal_lm, plan_causal_lm
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.layout.target import TargetFacts

NAME = "causal-lm"
TITLE = "causal language model (transformers layout)"

DESTINATION = "hf"
METHODS = ("draft-model",)
# The embedding tables of families that do not follow Llama's names: OPT, GPT-2, GPT-NeoX, BLOOM and Falcon.
EMBEDDINGS = {
    "model.decoder.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "transformer.word_embeddings.weight",
}


def recognize(checkpoint: Checkpoint) -> int:
    embeddings = EMBEDDINGS | BASE_MODELS.keys()
    return int(is_causal_lm(checkpoint) or bool(embeddings & checkpoint.tensors.keys()))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_causal_lm(NAME, checkpoint, facts, target)


def export(outgoing: Outgoing) -> Export:
    draft = outgoing.draft
    return Export(config=exported_config(draft), moves=tuple(outgoing.renamed({})), losses=exported_losses(draft))
