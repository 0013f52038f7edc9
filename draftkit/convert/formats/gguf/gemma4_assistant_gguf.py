"""Gemma-4's assistant as llama.cpp runs it from GGUF: architecture `gemma4-assistant`, over its target's cache.

Its graph gives every token a logit, and has nothing of the ordered embedding. Full layers attend to what the target's
last layer attends to, sliding ones to that of the layer before. Source: llama.cpp b11434
`src/models/gemma4-assistant.cpp`, `src/llama-model.cpp`, `conversion/gemma.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.gguf.layers import (
    CONFIG,
    ROPE_FACTORS,
    Names,
    begin_reading,
    own_object,
    reading_moves,
    vocabulary_of,
    writing_moves,
)
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.errors import FormatError, LayoutError
from draftkit.hub.gguf import generation_config
from draftkit.io.handles import TensorHandle, memory_handle
from draftkit.io.records import excerpt
from draftkit.layout.families.gemma4_assistant import Gemma4AssistantSpec
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, language_model

NAME = "gguf-gemma4-assistant"
TITLE = "Gemma-4's assistant (GGUF, llama.cpp)"
DESTINATION = "gguf"
METHODS = ("gemma4-assistant",)

ARCHITECTURE = "gemma4-assistant"
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATION = "gelu_pytorch_tanh"
NEVER_TURNS = 1e30  # what the frequencies of numbers that are not rotated are divided by
OUTSIDE_LAYERS = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
IN_LAYERS = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}


def recognize(checkpoint: Checkpoint) -> int:
    return 3 * (checkpoint.gguf_architecture == ARCHITECTURE)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    dtype = begin_reading(checkpoint, facts)
    vocab_size = vocabulary_of(checkpoint, facts)
    facts.keep_config()
    config, layer_types = _stored_config(checkpoint)
    tokenizer: Any = checkpoint.config.get("tokenizer") or {}
    suppressed = facts.as_integers(SUPPRESSED, tokenizer.get(SUPPRESSED.partition(".")[2], []))
    target_hidden, hidden = checkpoint.matrix("nextn.post_projection.weight")
    if target is not None:
        checkpoint.check_target(target, hidden_size=target_hidden, vocab_size=vocab_size)
    facts.record("config", str(config.get("model_type")), "stated", "the assistant's, as draftkit has kept it")
    facts.record("suppressed_tokens", str(list(suppressed)), "stated", SUPPRESSED)
    blocks = [f"blk.{layer}." for layer in range(len(layer_types))]
    spec = Gemma4AssistantSpec(
        config=config,
        vocab_size=vocab_size,
        target_hidden_size=facts.record("target_hidden_size", target_hidden, "from tensors"),
        hidden_size=facts.record("hidden_size", hidden, "from tensors"),
        intermediate_size=checkpoint.matrix("blk.0.ffn_gate.weight")[0],
        layer_types=layer_types,
        query_sizes=tuple(checkpoint.matrix(f"{block}attn_q.weight")[0] for block in blocks),
        attention_bias=False,
        num_centroids=0,
        selected_centroids=0,
        tied=True,
        suppressed_tokens=suppressed,
        concatenation="embedding_hidden",
        hidden_state="after_norm",
        position="state",
    )
    _check_keys(checkpoint, spec)
    moves = reading_moves(checkpoint, _names(spec), None, dtype)
    files = [generation_config({"suppress_tokens": list(suppressed)})] if suppressed else []
    return make_plan(
        NAME, checkpoint, facts, DraftSpec(architecture=spec, dtype=dtype or common_dtype(checkpoint)), moves, files
    )


def _check_keys(checkpoint: Checkpoint, spec: Gemma4AssistantSpec) -> None:
    """Raise `FormatError` where the file's own keys, by which llama.cpp computes, are not those of the configuration
    that draftkit has kept."""
    own = checkpoint.config.get(ARCHITECTURE)
    stated = {f"{ARCHITECTURE}.{key}": value for key, value in own.items()} if isinstance(own, dict) else {}
    for key, value in _metadata(spec).items():
        if key in stated and stated[key] != value:
            raise FormatError(
                f"{key} is {excerpt(stated[key])}, and the configuration that draftkit has kept says {value}",
                where=checkpoint.source.path,
                hint="take the assistant's own checkpoint",
            )


def _stored_config(checkpoint: Checkpoint) -> tuple[dict[str, object], tuple[str, ...]]:
    """The assistant's configuration, and the kinds of its layers. Raises `FormatError` where the file has none."""
    config = own_object(checkpoint, CONFIG)
    kinds = None if config is None else _text(config).get("layer_types")
    if config is None or not isinstance(kinds, list):
        raise FormatError(
            "the file does not hold the assistant's configuration, which only draftkit writes there",
            where=checkpoint.source.path,
            hint="take the assistant's own checkpoint",
        )
    return config, tuple(map(str, kinds))


def export(outgoing: Outgoing) -> Export:
    """Facts that llama.cpp's graph has no place for become losses; a file that llama.cpp does not load, or one for
    another target, is not written."""
    assistant = outgoing.draft.spec.architecture.expect(Gemma4AssistantSpec)
    target = outgoing.need_target("its tokenizer")
    if problem := _problem(outgoing, assistant) or _problem_of_target(target):
        raise LayoutError(f"llama.cpp does not run this assistant: {problem}", where=outgoing.draft.path)
    runs = replace(
        assistant,
        config=assistant.config | {"use_ordered_embeddings": False},
        num_centroids=0,
        selected_centroids=0,
        concatenation="embedding_hidden",
        hidden_state="after_norm",
    )
    tensors = [name for move in kept(outgoing, runs, {}) for name in move.sources]
    metadata = {"general.architecture": ARCHITECTURE, CONFIG: json.dumps(runs.config)} | _metadata(runs)
    if runs.suppressed_tokens:
        metadata[SUPPRESSED] = list(runs.suppressed_tokens)
    return Export(
        metadata,
        tuple(writing_moves(outgoing, _names(runs), None, tensors)),
        losses(replace(assistant, config={}), replace(runs, config={})),
        computed=_rope_factors(outgoing, runs),
    )


def _names(assistant: Gemma4AssistantSpec) -> Names:
    layers = range(len(assistant.layer_types))
    own = {f"model.layers.{i}.{name}": f"blk.{i}.{gguf}" for i in layers for name, gguf in IN_LAYERS.items()}
    return Names(tensors=OUTSIDE_LAYERS | own)


def _problem(outgoing: Outgoing, assistant: Gemma4AssistantSpec) -> str | None:
    """A fact that llama.cpp has no place for, so that it would refuse the file or compute something else; None without
    one."""
    text = _text(assistant.config)
    if outgoing.draft.spec.quantization is not None:
        return "the weights are quantized in another way than GGUF's"
    if not assistant.tied or assistant.attention_bias:
        return "its graph has no output layer beside the table, and no biases"
    if assistant.hidden_size == assistant.target_hidden_size:
        return f"it is as wide as its target, {assistant.hidden_size}"
    if set(assistant.layer_types) != {SLIDING, FULL}:
        return f"its layers are {', '.join(sorted(set(assistant.layer_types)))}, and its graph has {SLIDING} and {FULL}"
    if text.get("hidden_activation") != ACTIVATION:
        return f"hidden_activation is {text.get('hidden_activation')}, and its graph has {ACTIVATION}"
    if lacking := [name for name in (*SIZES.values(), "num_key_value_heads", "rope_parameters") if name not in text]:
        return f"its text_config does not state {', '.join(lacking)}"
    return None


def _problem_of_target(target: TargetFacts) -> str | None:
    kinds: Any = language_model(target.config).get("layer_types")
    if not isinstance(kinds, list) or kinds[-2:] != [SLIDING, FULL]:
        return f"{target.name} does not end with a sliding layer and a full one, as Gemma-4 does, whose keys it reads"
    return None


def _text(config: dict[str, object]) -> dict[str, Any]:
    return cast("dict[str, Any]", language_model(config))


def _metadata(assistant: Gemma4AssistantSpec) -> dict[str, object]:
    """Every metadata key of the file, none of them left to a default."""
    text, layers = _text(assistant.config), len(assistant.layer_types)
    width, sliding = _width(assistant, FULL), _width(assistant, SLIDING)
    rope: Mapping[str, Any] = text["rope_parameters"]
    keys = text["num_key_value_heads"]
    shared = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    stated = {key: text[name] for key, name in SIZES.items()} | {
        "block_count": layers,
        "nextn_predict_layers": layers,
        "embedding_length_out": assistant.target_hidden_size,
        "embedding_length_per_layer_input": 0,
        "vocab_size": assistant.vocab_size,
        "attention.head_count_kv": [
            keys if kind == SLIDING or shared is None else shared for kind in assistant.layer_types
        ],
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "attention.shared_kv_layers": layers,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in assistant.layer_types],
        "rope.dimension_count": width,
        "rope.dimension_count_swa": sliding,
        "rope.freq_base": float(rope[FULL]["rope_theta"]),
        "rope.freq_base_swa": float(rope[SLIDING]["rope_theta"]),
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in stated.items()}


def _rope_factors(outgoing: Outgoing, assistant: Gemma4AssistantSpec) -> dict[str, TensorHandle]:
    """What the frequencies of full layers are divided by, [head_dim / 2]: only the first numbers of a head turn."""
    import torch

    width, rope = _width(assistant, FULL), _text(assistant.config)["rope_parameters"][FULL]
    factors = torch.full((width // 2,), NEVER_TURNS)
    factors[: int(width * rope.get("partial_rotary_factor", 1.0) / 2)] = 1.0
    return {ROPE_FACTORS: memory_handle(ROPE_FACTORS, factors, outgoing.draft.path)}


def _width(assistant: Gemma4AssistantSpec, kind: str) -> int:
    """The size of the heads of layers of a kind."""
    return assistant.head_dim(assistant.query_sizes[assistant.layer_types.index(kind)])
