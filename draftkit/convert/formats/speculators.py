"""EAGLE-3 and P-EAGLE as the speculators library trains and stores them (0.9, vllm-project/speculators).

`speculators_model_type` in the config; sizes nested in `transformer_layer_config`, layer ids at the top in convention
S; `embed_tokens` is stored, `d2t` and `t2d` only for a reduced vocabulary. The library's `Eagle3Converter` drops
tensors that its class lacks with no more than a warning; such files are recognized where they contradict themselves.
Source: `speculators/models/eagle3`, `models/peagle`, `convert/eagle/eagle3_converter.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.eagle3 import Dialect, plan_eagle3
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.llama_config import losses
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.convert.speculators import (
    has_attention_bias,
    library_eagle,
    note_target,
    refuse_inexpressible,
    speculators_config,
)
from draftkit.engines.speculators import ARCHITECTURES, LAYER_CONFIG
from draftkit.errors import FormatError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.layout.target import TargetFacts

NAME = "speculators"
TITLE = "EAGLE-3, P-EAGLE (speculators 0.9 layout)"

DESTINATION = "speculators"
METHODS = ("eagle3", "p-eagle")

DIALECT = Dialect(NAME, residual_note="the library's default; vLLM takes an absent key of this layout for true")
CONVERTED = "Eagle3Speculator"  # the class that Eagle3Converter saves


def recognize(checkpoint: Checkpoint) -> int:
    """Every type of the library but its first, which has a format of its own."""
    return 5 if checkpoint.config.get("speculators_model_type", "eagle") != "eagle" else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    kind = facts.optional("speculators_model_type", str)
    if kind not in ARCHITECTURES:
        raise FormatError(
            f"draftkit does not read drafts of speculators_model_type {kind}",
            where=checkpoint.config_path,
            expected="one of " + ", ".join(("eagle", *ARCHITECTURES)),
        )
    facts.lift(LAYER_CONFIG)
    _check_converted(checkpoint, facts)
    _check_trained(checkpoint, facts, kind)
    named = note_target(facts)
    if CONVERTED in checkpoint.architectures:
        note = "drops q_norm, k_norm and the ids in eagle_config without a trace: compare with the original checkpoint"
        facts.record("converter", "Eagle3Converter", "stated", note)
    planned = plan_eagle3(checkpoint, facts, target, DIALECT)
    hints = tuple((fact, f"{hint} (the checkpoint names {named} as its target)") for fact, hint in planned.missing)
    return replace(planned, missing=hints if named else planned.missing)


def _check_converted(checkpoint: Checkpoint, facts: Facts) -> None:
    """Raise `FormatError` where the config has layers or a vocabulary that the weights lack."""
    stated, found = facts.optional("num_hidden_layers", int), checkpoint.count_layers()
    draft, vocabulary = facts.optional("draft_vocab_size", int), facts.optional("vocab_size", int)
    problem = None
    if stated is not None and stated != found:
        problem = f"config.json has {stated} layers, and the weights have {found}"
    elif draft is not None and draft != vocabulary and "d2t" not in checkpoint.tensors:
        problem = f"the draft has {draft} of {vocabulary} tokens, and no d2t says which"
    if problem:
        raise FormatError(
            problem,
            where=checkpoint.source.path,
            hint="Eagle3Converter drops what its class lacks: convert the original checkpoint with draftkit",
        )


def _check_trained(checkpoint: Checkpoint, facts: Facts, kind: str) -> None:
    """Raise `FormatError` where trained tensors are missing that the library would replace by others."""
    parallel = kind == "peagle"
    trained = facts.optional("embed_requires_grad", bool)
    facts.drop("embed_requires_grad", "used in training only")
    problem = None
    if parallel != ("mask_hidden" in checkpoint.tensors):
        problem = f"speculators_model_type is {kind}, and mask_hidden is {'missing' if parallel else 'there'}"
    elif trained and "embed_tokens.weight" not in checkpoint.tensors:
        problem = "its embedding was trained, and embed_tokens.weight is missing"
    if problem:
        raise FormatError(problem, where=checkpoint.source.path, hint="fetch the checkpoint again")


def export(outgoing: Outgoing) -> Export:
    """The library fills in what it does not find of embedding and head, but stores both, so copies are written.

    A draft that came in this layout without them goes back without them.
    """
    refuse_inexpressible(outgoing)
    eagle = outgoing.draft.spec.architecture
    assert isinstance(eagle, EagleSpec)
    shared = ["embed_tokens.weight", "lm_head.weight"]
    moves = outgoing.renamed({}, without=shared)
    if outgoing.draft.provenance.format == NAME:
        shared = [name for name in shared if name in outgoing.draft.tensors]
    moves += [outgoing.borrowed(name) for name in shared]
    if eagle.reduced_vocabulary:
        moves.append(Move("offset_to_mask", ("d2t",), "t2d", "BOOL", (eagle.vocab_size,)))
    moves += _zero_biases(outgoing.draft, eagle)
    return Export(speculators_config(outgoing, eagle), tuple(moves), losses(eagle, library_eagle(eagle)))


def _zero_biases(draft: Draft, eagle: EagleSpec) -> list[Move]:
    """The library's attention has four biases or none: those that a draft with some of them lacks."""
    if not has_attention_bias(eagle.decoder):
        return []
    decoder = replace(eagle.decoder, qkv_bias=True, output_bias=True)
    loaded = replace(draft.spec, architecture=replace(eagle, decoder=decoder))
    return [
        Move("fill", (), name, draft.spec.dtype, tensor.shape, reason="the draft has no such bias", number=0)
        for name, tensor in loaded.tensors().items()
        if name.endswith(".bias") and name not in draft.tensors
    ]
