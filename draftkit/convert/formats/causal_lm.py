"""A plain causal language model as draft, in the layout of transformers."""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.errors import TargetError
from draftkit.layout.folder import tokenizer_files
from draftkit.layout.spec import CausalLMSpec, DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "causal-lm"
TITLE = "causal language model (transformers layout)"

DESTINATION = "hf"
METHODS = ("draft-model",)


def recognise(checkpoint: Checkpoint) -> int:
    return int({"model.embed_tokens.weight", "model.norm.weight"} <= checkpoint.tensors.keys())


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    vocab_size = facts.size("vocab_size")
    if target is not None and target.vocab_size != vocab_size:
        raise TargetError(
            f"{checkpoint.source.name} has {vocab_size} tokens, {target.name} has {target.vocab_size}",
            where=checkpoint.source.path,
            hint="pass a draft with the target's vocabulary",
        )
    facts.record("config", str(checkpoint.config.get("model_type")), "stated", "kept verbatim")
    for key in checkpoint.config:
        facts.drop(key, "kept verbatim in the spec's config")
    architecture = CausalLMSpec(config=checkpoint.config, vocab_size=vocab_size, parallel=None, target_features=None)
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, rename(checkpoint), tokenizer_files(checkpoint.source.path))


def export(outgoing: Outgoing) -> Export:
    architecture = outgoing.draft.spec.architecture
    assert isinstance(architecture, CausalLMSpec)
    return Export(config=dict(architecture.config), moves=tuple(outgoing.renamed({})))
