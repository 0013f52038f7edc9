"""A dense causal language model as draft in GGUF: architectures `llama`, `qwen2` and `qwen3`.

Its configuration is made anew from the keys when it is read. Source: llama.cpp b11434 `conversion/llama.py`, `qwen.py`,
`src/models/llama.cpp`, `qwen2.cpp`, `qwen3.cpp`.
"""

from __future__ import annotations

import json
from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import Facts
from draftkit.convert.formats.gguf.layers import (
    CONFIG,
    Names,
    begin_reading,
    layer_metadata,
    own_object,
    read_layers,
    reading_moves,
    rope_factors,
    runs_scaling,
    vocabulary_of,
    writing_moves,
)
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.errors import LayoutError
from draftkit.io.jsonfile import read_object
from draftkit.layout.decoder import Decoder, decoder_of_config, layer_keys, rope_keys
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import tokenizer_files
from draftkit.layout.spec import HF_DTYPES, DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "gguf-causal-lm"
TITLE = "causal language model (GGUF, llama.cpp)"
DESTINATION = "gguf"
METHODS = ("draft-model",)

# GGUF's name by `model_type`; of those, what rotates neighbors.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
INTERLEAVED = ("llama",)
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def recognize(checkpoint: Checkpoint) -> int:
    return 3 * (checkpoint.gguf_architecture in CLASSES)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    dtype, kind = begin_reading(checkpoint, facts), str(checkpoint.gguf_architecture)
    decoder = read_layers(checkpoint, facts)
    vocab_size = vocabulary_of(checkpoint, facts)
    if target is not None and target.vocab_size != vocab_size:
        note = f"{target.name} has {target.vocab_size}: the draft proposes the tokens that both tokenizers share"
        facts.record("vocabulary", "another", "from target", note)
    stored = dtype or common_dtype(checkpoint)
    folder = checkpoint.source.folder
    config = _original(checkpoint, decoder)
    facts.record("config", kind, "stated", "made from the keys" if config is None else "the keys agree with draftkit's")
    if config is None:
        eos_ids = read_object(folder / "generation_config.json").get("eos_token_id")
        config = _config(kind, checkpoint, decoder, vocab_size) | {"eos_token_id": eos_ids, "dtype": HF_DTYPES[stored]}
    architecture = CausalLMSpec(config=config, vocab_size=vocab_size, parallel=None, target_features=None)
    moves = reading_moves(checkpoint, _names(kind), decoder, dtype)
    spec = DraftSpec(architecture=architecture, dtype=stored)
    return make_plan(NAME, checkpoint, facts, spec, moves, tokenizer_files(folder))


def export(outgoing: Outgoing) -> Export:
    """Facts that llama.cpp's graph of such a model has no place for become losses. Files of other kinds of models are
    made by llama.cpp's own converter."""
    draft = outgoing.draft
    model = draft.spec.architecture.expect(CausalLMSpec)
    outgoing.need_target("to know that its tokens are the same")
    kind = ARCHITECTURES.get(str(model.config.get("model_type")))
    if kind is None or draft.spec.quantization is not None:
        raise LayoutError(
            f"draftkit writes no GGUF of {model.config.get('model_type')} models"
            + (" with quantized weights" if kind else ""),
            where=draft.path,
            expected="one of " + ", ".join(ARCHITECTURES),
            hint="llama.cpp's convert_hf_to_gguf.py may",
        )
    decoder = decoder_of_config(model.config)
    scaled = runs_scaling(decoder.rope)
    runs = decoder if scaled else replace(decoder, rope=replace(decoder.rope, scaling=None))
    moves = writing_moves(outgoing, _names(kind), runs, draft.tensors)
    metadata: dict[str, object] = {"general.architecture": kind, CONFIG: json.dumps(model.config)}
    metadata |= layer_metadata(kind, runs, model.vocab_size)
    return Export(metadata, tuple(moves), _losses(model, decoder), computed=rope_factors(outgoing, runs))


def _names(kind: str) -> Names:
    return Names(tensors=OUTSIDE_LAYERS, prefix="model.", interleaved=kind in INTERLEAVED)


def _original(checkpoint: Checkpoint, decoder: Decoder) -> dict[str, object] | None:
    """The configuration that draftkit made the file of, where the keys still say the same of its layers."""
    said = own_object(checkpoint, CONFIG)
    if said is None:
        return None
    before = decoder_of_config(said)
    same = replace(before, rope=replace(before.rope, declared_base=decoder.rope.declared_base)) == decoder
    return said if same else None


def _config(kind: str, checkpoint: Checkpoint, decoder: Decoder, vocab_size: int) -> dict[str, object]:
    """A configuration for transformers."""
    biases: dict[str, object] = {"attention_bias": decoder.output_bias, "mlp_bias": decoder.mlp_bias}
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": vocab_size,
        **layer_keys(decoder),
        **rope_keys(decoder.rope),
        "tie_word_embeddings": "output.weight" not in checkpoint.tensors,
    } | (biases if kind == "llama" else {})


def _losses(model: CausalLMSpec, decoder: Decoder) -> tuple[str, ...]:
    own = model.config.get("sliding_window") if model.config.get("use_sliding_window", True) else None
    window = own if model.sliding_window is None else model.sliding_window
    found = {
        f"hidden_act is {decoder.hidden_act}, and its graph has silu": decoder.hidden_act != "silu",
        f"rope_scaling is {decoder.rope.scaling}, and llama.cpp is told of none": not runs_scaling(decoder.rope),
        f"sliding_window is {window}, and its graph has none": window is not None,
        "head_ids is a list of tokens, and llama.cpp proposes any": model.head_ids is not None,
    }
    return tuple(what for what, holds in found.items() if holds)
