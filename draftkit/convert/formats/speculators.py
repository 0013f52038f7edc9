"""What the layouts of the speculators library share: whose draft a file is, how it is served, what its classes lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.engines.serving import stated_tokens
from draftkit.engines.speculators import KIND, SERVING, serving_config, verifier_name
from draftkit.errors import FormatError, LayoutError
from draftkit.hub.local_paths import public_name
from draftkit.layout.architecture import Architecture
from draftkit.layout.decoder import Decoder, layer_keys, rope_keys
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import Draft


def recognize_kinds(checkpoint: Checkpoint, kinds: Sequence[str]) -> int:
    """What a format's `recognize` says of the library's files of these kinds."""
    return 6 if checkpoint.config.get(KIND) in kinds else 0


def read_kind(checkpoint: Checkpoint, facts: Facts, kinds: Sequence[str]) -> str:
    """The kind of a file. Raises `FormatError` for one of none of these."""
    kind = facts.optional(KIND, str)
    if kind is None or kind not in kinds:
        raise FormatError(
            f"{KIND} is {kind}, of which this format has no drafts",
            where=checkpoint.config_path,
            expected=" or ".join(kinds),
        )
    return kind


def check_converted(checkpoint: Checkpoint, facts: Facts, converter: str) -> None:
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
            hint=f"{converter} drops what its class lacks: convert the original checkpoint with draftkit",
        )


def note_target(facts: Facts) -> str | None:
    """The target that the file names, as a fact, and what else of its serving settings is no fact."""
    for key in ("auto_map", "speculators_version"):
        facts.drop(key, "about the library's own loading")
    name = verifier_name({SERVING: facts.mapping(SERVING)})
    facts.drop(SERVING, "how the draft is to be served")
    return None if name is None else facts.record("target", name, "stated", "named by the file")


def with_target_named(plan: Plan, target: str | None) -> Plan:
    """The plan, whose missing facts may follow from the target that the file names."""
    if target is None:
        return plan
    named = f"(the checkpoint names {target} as its target)"
    return replace(plan, missing=tuple((fact, f"{hint} {named}") for fact, hint in plan.missing))


def refuse_inexpressible(outgoing: Outgoing, obstacles: Sequence[str]) -> None:
    """Raise `LayoutError` with everything that no file in this layout can say."""
    found = [*obstacles, *(["its weights are quantized"] if outgoing.draft.spec.quantization is not None else [])]
    if found:
        raise LayoutError(
            "the speculators library has no class for this draft:\n    " + "\n    ".join(found),
            where=outgoing.draft.path,
            hint="use --to unified",
        )


def serving(outgoing: Outgoing, kind: str) -> object:
    """How the draft is served: the target, and how many tokens are drafted. A draft that came with it keeps its own."""
    if SERVING in outgoing.draft.provenance.dropped_config:
        return outgoing.draft.provenance.dropped_config[SERVING]
    target = outgoing.need_target("the name and architectures of the target")
    tokens = stated_tokens(outgoing.draft) or outgoing.draft.spec.architecture.usual_tokens
    return serving_config(kind, tokens, public_name(target.name), target.architectures)


def layer_config(decoder: Decoder, vocab_size: int) -> dict[str, object]:
    """A transformers config of the decoder layers, which is also all that vLLM's draft classes read."""
    config: dict[str, object] = {
        "vocab_size": vocab_size,
        **layer_keys(decoder),
        "attention_bias": has_attention_bias(decoder),
        "layer_types": decoder.layer_types,
        "sliding_window": decoder.sliding_window,
        "use_sliding_window": decoder.sliding_window is not None,
        "tie_word_embeddings": False,
    }
    return config | rope_keys(decoder.rope)


def zero_biases(draft: Draft, architecture: Architecture, decoder: Decoder) -> list[Move]:
    """The library's attention has four biases or none: those that a draft with some of them lacks."""
    if not has_attention_bias(decoder):
        return []
    loaded = replace(draft.spec, architecture=with_facts(architecture, qkv_bias=True, output_bias=True))
    return [
        Move("fill", (), name, draft.spec.dtype, tensor.shape, reason="the draft has no such bias", number=0)
        for name, tensor in loaded.tensors().items()
        if name.endswith("_proj.bias") and name not in draft.tensors
    ]


def has_attention_bias(decoder: Decoder) -> bool:
    """Whether attention is written with biases: the library's layers have all four of them, or none."""
    return decoder.qkv_bias or decoder.output_bias
