"""The config of the speculators library: what of it is no fact of a draft, how it is written, what it cannot say."""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.export import Outgoing
from draftkit.convert.facts import Facts
from draftkit.engines.serving import local_name, stated_tokens, usual_tokens
from draftkit.engines.speculators import (
    ARCHITECTURES,
    LAYER_CONFIG,
    SERVING,
    VERSION,
    serving_config,
    verifier_name,
)
from draftkit.errors import LayoutError
from draftkit.layout.decoder import Decoder, layer_keys, rope_keys
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.spec import DraftSpec


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
        "embed_requires_grad": eagle.parallel is not None,
        "tie_word_embeddings": False,
        "dtype": outgoing.dtype,
        LAYER_CONFIG: _layer_config(eagle),
    }
    if eagle.parallel is not None:
        config["mask_token_id"] = eagle.parallel.mask_token_id
    return config


def _obstacles(spec: DraftSpec) -> list[str]:
    """What of a draft the library's classes have no parameters for, so that no file can say it."""
    eagle = spec.architecture
    assert isinstance(eagle, EagleSpec)
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
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * decoder.num_hidden_layers,
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
