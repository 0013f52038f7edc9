"""EAGLE-3 as llama.cpp runs it from GGUF: architecture `eagle3`, one layer over three captured states.

The layer's attention reads the embedding and the hidden state, both normed; `d2t` holds the target's ids themselves.
Source: llama.cpp b11434 `src/models/eagle3.cpp`, `conversion/llama.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.gguf.layers import (
    Names,
    begin_reading,
    layer_metadata,
    read_ids,
    read_layers,
    reading_moves,
    rope_factors,
    runs_scaling,
    stated,
    vocabulary_of,
    writing_moves,
)
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.engines.llama_cpp import check_target, last_state_of
from draftkit.errors import LayoutError
from draftkit.finding import Finding
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "gguf-eagle3"
TITLE = "EAGLE-3 (GGUF, llama.cpp)"
DESTINATION = "gguf"
METHODS = ("eagle3",)

ARCHITECTURE, LAYERS, CAPTURED = "eagle3", 1, 3
NAMES = Names(
    tensors={
        "fc.weight": "fc.weight",
        "input_norm.weight": "enc.output_norm.weight",
        "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "embed_tokens.weight": "token_embd.weight",
        "d2t": "d2t",
    },
    interleaved=True,
)


def recognize(checkpoint: Checkpoint) -> int:
    return 3 * (checkpoint.gguf_architecture == ARCHITECTURE)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    dtype = begin_reading(checkpoint, facts)
    decoder = read_layers(checkpoint, facts)
    vocab_size = vocabulary_of(checkpoint, facts)
    target_hidden = stated(facts, "target_hidden_size", int, "target_hidden_size")
    own_head, own_table = (name in checkpoint.tensors for name in ("output.weight", "token_embd.weight"))
    draft_vocab = checkpoint.matrix("output.weight")[0] if own_head else vocab_size
    if target is not None:
        checkpoint.check_target(target, hidden_size=target_hidden, vocab_size=vocab_size)
    ids = _captured(checkpoint, facts)
    joint = facts.stated_or("norm_before_fc", bool, False, "llama.cpp's default")
    residual = facts.stated_or("norm_before_residual", bool, False, "llama.cpp's default")
    found = reading_moves(checkpoint, NAMES, decoder, dtype)
    moves = read_ids(checkpoint, facts, found, vocab_size)
    spec = None
    if ids == sorted(set(ids)):
        architecture = EagleSpec(
            decoder=decoder,
            vocab_size=vocab_size,
            draft_vocab_size=facts.record("draft_vocab_size", draft_vocab, "from tensors"),
            target_hidden_size=target_hidden,
            aux_layer_ids=tuple(ids),
            token_entry="attention",
            concatenation="embedding_hidden",
            fusion_bias=False,
            feature_norm="joint" if joint else "none",
            embedding_norm=True,
            hidden_norm=True,
            input_norm=False,
            norm_before_residual=residual,
            final_norm=True,
            feedback="pre_norm",
            logit_scale=1.0,
            embed_tokens="draft" if own_table else "target",
            lm_head="draft" if own_head else "target",
            parallel=None,
        )
        spec = DraftSpec(architecture=architecture, dtype=dtype or common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, moves)


def export(outgoing: Outgoing) -> Export:
    """Facts that llama.cpp's graph has no place for become losses; a file that llama.cpp does not load is not
    written."""
    eagle = outgoing.draft.spec.architecture.expect(EagleSpec)
    target = outgoing.need_target("its tokenizer")
    check_target(outgoing.draft.spec, target)
    _refuse_unloadable(outgoing, eagle)
    runs = _run(eagle)
    moves = writing_moves(outgoing, NAMES, runs.decoder, _kept(outgoing, runs))
    ids = eagle.aux_layer_ids
    assert ids is not None
    metadata = layer_metadata(ARCHITECTURE, runs.decoder, eagle.vocab_size) | {
        f"{ARCHITECTURE}.target_layers": list(ids),
        f"{ARCHITECTURE}.target_hidden_size": eagle.target_hidden_size,
        f"{ARCHITECTURE}.norm_before_residual": eagle.norm_before_residual,
        f"{ARCHITECTURE}.norm_before_fc": runs.feature_norm == "joint",
    }
    stale = last_state_of(target, ids)
    lost = losses(eagle, runs) + (() if stale is None else (stale,))
    return Export(
        {"general.architecture": ARCHITECTURE} | metadata,
        tuple(moves),
        lost,
        computed=rope_factors(outgoing, runs.decoder),
    )


def _run(eagle: EagleSpec) -> EagleSpec:
    """The draft that llama.cpp makes of this one."""
    decoder = eagle.decoder
    return replace(
        eagle,
        decoder=replace(
            decoder,
            hidden_act="silu",
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            sliding_window=None,
            full_attention_layers=(),
            rope=decoder.rope if runs_scaling(decoder.rope) else replace(decoder.rope, scaling=None),
        ),
        concatenation="embedding_hidden",
        fusion_bias=False,
        feature_norm="joint" if eagle.feature_norm == "joint" else "none",
        embedding_norm=True,
        hidden_norm=True,
        input_norm=False,
        final_norm=True,
        feedback="pre_norm",
        logit_scale=1.0,
    )


def _kept(outgoing: Outgoing, runs: EagleSpec) -> list[str]:
    return [name for move in kept(outgoing, runs, {}) for name in move.sources]


def _refuse_unloadable(outgoing: Outgoing, eagle: EagleSpec) -> None:
    problem = None
    if eagle.decoder.num_hidden_layers != LAYERS:
        problem = f"the draft has {eagle.decoder.num_hidden_layers} layers, and its graph {LAYERS}"
    elif eagle.aux_layer_ids is None or len(eagle.aux_layer_ids) != CAPTURED:
        problem = f"the draft captures layers {eagle.aux_layer_ids}, and its graph {CAPTURED}"
    elif outgoing.draft.spec.quantization is not None:
        problem = "the weights are quantized in another way than GGUF's"
    if problem:
        raise LayoutError(f"llama.cpp does not load this draft: {problem}", where=outgoing.draft.path)


def _captured(checkpoint: Checkpoint, facts: Facts) -> list[int]:
    """The captured layers, which are states (convention S). Notes ids that are out of order."""
    ids = facts.integers("target_layers")
    old = facts.integers("extract_layers")
    if ids is None:
        named = "" if old is None else f", and extract_layers {list(old)}, a name that it does not read any more"
        raise LayoutError(
            f"the file has no {ARCHITECTURE}.target_layers{named}: llama.cpp does not load it",
            where=checkpoint.source.path,
            hint="convert the draft again",
        )
    facts.record("aux_layer_ids", str(list(ids)), "stated", key=f"{ARCHITECTURE}.target_layers")
    if list(ids) != sorted(set(ids)):
        message = f"target_layers are {list(ids)}: fc reads the states of its layers from the first to the last"
        fix = "convert the checkpoint that the file was made from again"
        facts.problems.append(
            Finding("gguf-layer-order", "error", message, fix=fix, source="llama.cpp believes the order of the file")
        )
    return list(ids)
