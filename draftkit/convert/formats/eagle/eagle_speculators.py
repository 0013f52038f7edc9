"""EAGLE-3 and P-EAGLE as the speculators library trains and stores them (0.9, vllm-project/speculators).

`speculators_model_type` in the config; sizes nested in `transformer_layer_config`, layer ids at the top in convention
S; `embed_tokens` is stored, `d2t` and `t2d` only for a reduced vocabulary. The library's `Eagle3Converter` drops
tensors that its class lacks with no more than a warning; such files are recognized where they contradict themselves.
The library loads its files strictly, and vLLM reads the same config: `speculators_config` for the target and the draft
length, `transformer_layer_config` as the draft's own.
Source: `speculators/models/eagle3`, `models/peagle`, `convert/eagle/eagle3_converter.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import Dialect, plan_eagle3
from draftkit.convert.formats.speculators import (
    check_converted,
    layer_config,
    note_target,
    read_kind,
    recognize_kinds,
    refuse_inexpressible,
    serving,
    with_target_named,
    zero_biases,
)
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.engines.speculators import ARCHITECTURES, KIND, LAYER_CONFIG, SERVING, VERSION
from draftkit.errors import FormatError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.target import TargetFacts

NAME = "speculators"
TITLE = "EAGLE-3, P-EAGLE (speculators layout)"

DESTINATION = "speculators"
METHODS = ("eagle3", "p-eagle")
KINDS = ("eagle3", "peagle")

DIALECT = Dialect(NAME, residual_note="the library's default; vLLM takes an absent key of this layout for true")
CONVERTED = "Eagle3Speculator"  # the class that Eagle3Converter saves


def recognize(checkpoint: Checkpoint) -> int:
    return recognize_kinds(checkpoint, KINDS)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    kind = read_kind(checkpoint, facts, KINDS)
    facts.lift(LAYER_CONFIG)
    check_converted(checkpoint, facts, "Eagle3Converter")
    _check_trained(checkpoint, facts, kind)
    named = note_target(facts)
    if CONVERTED in checkpoint.architectures:
        note = "drops q_norm, k_norm and the ids in eagle_config without a trace: compare with the original checkpoint"
        facts.record("converter", "Eagle3Converter", "stated", note)
    return with_target_named(plan_eagle3(checkpoint, facts, target, DIALECT), named)


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
    eagle = outgoing.draft.spec.architecture.expect(EagleSpec)
    refuse_inexpressible(outgoing, _obstacles(eagle))
    shared = ["embed_tokens.weight", "lm_head.weight"]
    moves = outgoing.renamed({}, without=shared)
    if outgoing.draft.provenance.format == NAME:
        shared = [name for name in shared if name in outgoing.draft.tensors]
    moves += [outgoing.borrowed(name) for name in shared]
    if eagle.reduced_vocabulary:
        moves.append(Move("offset_to_mask", ("d2t",), "t2d", "BOOL", (eagle.vocab_size,)))
    moves += zero_biases(outgoing.draft, eagle, eagle.decoder)
    return Export(speculators_config(outgoing, eagle), tuple(moves), losses(eagle, library_eagle(eagle)))


def speculators_config(outgoing: Outgoing, eagle: EagleSpec) -> dict[str, object]:
    """The whole config.json. Raises `LayoutError` when the target, which it names, is not known."""
    kind = "eagle3" if eagle.parallel is None else "peagle"
    width = eagle.target_hidden_size
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[kind]],
        KIND: kind,
        "speculators_version": VERSION,
        SERVING: serving(outgoing, kind),
        "draft_vocab_size": eagle.draft_vocab_size,
        "target_hidden_size": None if width == eagle.decoder.hidden_size else width,
        "eagle_aux_hidden_state_layer_ids": list(eagle.aux_layer_ids or ()),
        "norm_before_residual": eagle.norm_before_residual,  # absent, vLLM takes it for true and the library for false
        "norm_before_fc": eagle.feature_norm == "joint",
        "fc_norm": eagle.feature_norm == "per_layer",
        "norm_output": eagle.feedback == "post_norm",
        "embed_requires_grad": eagle.parallel is not None and eagle.embed_tokens == "draft",
        "tie_word_embeddings": False,
        "dtype": outgoing.dtype,
        LAYER_CONFIG: _layer_config(eagle),
    }
    if eagle.parallel is not None:
        config["mask_token_id"] = eagle.parallel.mask_token_id
    return config


def _obstacles(eagle: EagleSpec) -> list[str]:
    """The facts of a draft that the library's classes have no parameters for, so that no file can state them."""
    found = []
    if eagle.aux_layer_ids is None:
        found.append("it reads the target's last hidden state, and the library's reads captured layers through fc")
    if not (eagle.embedding_norm and eagle.hidden_norm and eagle.final_norm):
        found.append("it lacks one of the norms of embedding, hidden state and output")
    if eagle.fusion_bias:
        found.append("its fc has a bias")
    if eagle.parallel is not None and not eagle.parallel.mask_state:
        found.append("it drafts in parallel without a mask_hidden")
    if eagle.concatenation != "embedding_hidden":
        found.append("it concatenates the hidden state first")
    if eagle.decoder.qk_norm and eagle.decoder.mlp_bias:
        found.append("it has both norms of queries and keys and biases in its MLP")
    return found


def library_eagle(eagle: EagleSpec) -> EagleSpec:
    """The draft that the library's classes make of this one; vLLM reads the two facts from the same file."""
    return replace(eagle, target_hidden_size=eagle.decoder.hidden_size, input_norm=False, logit_scale=1.0)


def _layer_config(eagle: EagleSpec) -> dict[str, object]:
    """A transformers config of the decoder layers, which is also all that vLLM's draft class reads."""
    decoder = eagle.decoder
    config = layer_config(decoder, eagle.vocab_size) | {
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "mlp_bias": decoder.mlp_bias,
    }
    return config | _keys_for_vllm(eagle)


def _keys_for_vllm(eagle: EagleSpec) -> dict[str, object]:
    """The keys that vLLM 0.32 does not carry over from the outer config, and so reads from here only."""
    keys: dict[str, object] = {}
    if eagle.aux_layer_ids is not None and len(eagle.aux_layer_ids) != 3:
        keys["num_aux_hidden_states"] = len(eagle.aux_layer_ids)
    if eagle.logit_scale != 1.0:
        keys["logit_scale"] = eagle.logit_scale
    if eagle.parallel is not None and eagle.feature_norm == "per_layer":
        keys["fc_norm"] = True
    return keys
