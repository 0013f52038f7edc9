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
from draftkit.convert.eagle_reading import Dialect, plan_eagle3
from draftkit.convert.eagle_writing import losses
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.engines.serving import local_name, stated_tokens, usual_tokens
from draftkit.engines.speculators import (
    ARCHITECTURES,
    LAYER_CONFIG,
    SERVING,
    VERSION,
    serving_config,
    verifier_name,
)
from draftkit.errors import FormatError, LayoutError
from draftkit.layout.decoder import Decoder, layer_keys, rope_keys
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.layout.spec import DraftSpec
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
    eagle = outgoing.draft.spec.architecture.expect(EagleSpec)
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


def note_target(facts: Facts) -> str | None:
    """The target that the file names, as a fact, and what else of its serving settings is no fact."""
    for key in ("auto_map", "speculators_version"):
        facts.drop(key, "about the library's own loading")
    name = verifier_name({SERVING: facts.mapping(SERVING)})
    facts.drop(SERVING, "how the draft is to be served")
    return None if name is None else facts.record("target", name, "stated", "named by the file")


def speculators_config(outgoing: Outgoing, eagle: EagleSpec) -> dict[str, object]:
    """The whole config.json. Raises `LayoutError` when the target, which it names, is not known."""
    kind = "eagle3" if eagle.parallel is None else "peagle"
    width = eagle.target_hidden_size
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        SERVING: _serving(outgoing, kind),
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


def _obstacles(spec: DraftSpec) -> list[str]:
    """What of a draft the library's classes have no parameters for, so that no file can say it."""
    eagle = spec.architecture.expect(EagleSpec)
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
    if spec.quantization is not None:
        found.append("its weights are quantized")
    return found


def refuse_inexpressible(outgoing: Outgoing) -> None:
    """Raise `LayoutError` with everything that no file in this layout can say."""
    if found := _obstacles(outgoing.draft.spec):
        raise LayoutError(
            "the speculators library has no class for this draft:\n    " + "\n    ".join(found),
            where=outgoing.draft.path,
            hint="use --to unified",
        )


def library_eagle(eagle: EagleSpec) -> EagleSpec:
    """The draft that the library's classes make of this one; vLLM reads the two facts from the same file."""
    return replace(eagle, target_hidden_size=eagle.decoder.hidden_size, input_norm=False, logit_scale=1.0)


def _serving(outgoing: Outgoing, kind: str) -> object:
    """How the draft is served: the target, and how many tokens are drafted. A draft that came with it keeps its own."""
    if SERVING in outgoing.draft.provenance.dropped_config:
        return outgoing.draft.provenance.dropped_config[SERVING]
    target = outgoing.need_target("the name and architectures of the target")
    tokens = stated_tokens(outgoing.draft) or usual_tokens(outgoing.draft.spec)
    return serving_config(kind, tokens, local_name(target.name), target.architectures)


def _layer_config(eagle: EagleSpec) -> dict[str, object]:
    """A transformers config of the decoder layers, which is also all that vLLM's draft class reads."""
    decoder = eagle.decoder
    sliding = decoder.sliding_window is not None
    config: dict[str, object] = {
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "vocab_size": eagle.vocab_size,
        **layer_keys(decoder),
        "attention_bias": has_attention_bias(decoder),
        "mlp_bias": decoder.mlp_bias,
        "layer_types": decoder.layer_types,
        "sliding_window": decoder.sliding_window,
        "use_sliding_window": sliding,
        "tie_word_embeddings": False,
    }
    return config | rope_keys(decoder.rope) | _keys_for_vllm(eagle)


def _keys_for_vllm(eagle: EagleSpec) -> dict[str, object]:
    """What vLLM 0.32 does not carry over from the outer config, and so reads from here only."""
    keys: dict[str, object] = {}
    if eagle.aux_layer_ids is not None and len(eagle.aux_layer_ids) != 3:
        keys["num_aux_hidden_states"] = len(eagle.aux_layer_ids)
    if eagle.logit_scale != 1.0:
        keys["logit_scale"] = eagle.logit_scale
    if eagle.parallel is not None and eagle.feature_norm == "per_layer":
        keys["fc_norm"] = True
    return keys


def has_attention_bias(decoder: Decoder) -> bool:
    """Whether the layers are written with biases: the library's have four, or none."""
    return decoder.qkv_bias or decoder.output_bias
