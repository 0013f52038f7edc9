"""Block drafters as llama.cpp runs them from GGUF: architecture `dflash`, for DFlash, DSpark and DFlash2 alike.

Rows see their whole block, or none the later ones, in all layers. A file with a table and no head drafts with the table
as its head, so both are written or none. Source: llama.cpp b11434 `src/models/dflash.cpp`, `conversion/qwen.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.gguf.layers import (
    DEFAULT,
    TABLE_IS_HEAD,
    Names,
    begin_reading,
    layer_metadata,
    read_ids,
    read_layers,
    reading_moves,
    rope_factors,
    runs_scaling,
    vocabulary_of,
    writing_moves,
)
from draftkit.convert.formats.gguf.tokenizer import KINDS, KINDS_KEY, MASK_KEY
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.engines.llama_cpp import check_target, last_state_of
from draftkit.errors import FormatError, LayoutError
from draftkit.finding import Finding
from draftkit.io.gguf_file import read_typed
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.block import BlockConvolution
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.dflash import CandidateSelector, DFlashSpec, MarkovHead
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "gguf-dflash"
TITLE = "DFlash, DSpark, DFlash2 (GGUF, llama.cpp)"
DESTINATION = "gguf"
METHODS = ("dflash", "dspark", "dflash2")

ARCHITECTURE = "dflash"
TEXT_AS_MASK = "an ordinary token of the tokenizer"
PATTERN_ALONE = "the pattern has sliding layers, and no window is stated"
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
OUTSIDE_LAYERS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
IN_LAYERS = {
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def recognize(checkpoint: Checkpoint) -> int:
    return 3 * (checkpoint.gguf_architecture == ARCHITECTURE)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    dtype = begin_reading(checkpoint, facts)
    activation = facts.stated_or("hidden_activation", str, "silu", DEFAULT, "hidden_act")
    decoder = _windowed(facts, read_layers(checkpoint, facts, hidden_act=activation))
    vocab_size = vocabulary_of(checkpoint, facts)
    own_head, own_table = (name in checkpoint.tensors for name in ("output.weight", "token_embd.weight"))
    if target is not None:
        checkpoint.check_target(target, hidden_size=decoder.hidden_size, vocab_size=vocab_size)
    moves = read_ids(checkpoint, facts, reading_moves(checkpoint, _names(decoder), decoder, dtype), vocab_size)
    if own_table and not own_head:
        table = checkpoint.tensors["token_embd.weight"]
        moves.append(Move("copy", (table.name,), "lm_head.weight", table.dtype, table.shape))
        facts.record("lm_head", "draft", "format default", TABLE_IS_HEAD)
    architecture = DFlashSpec(
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=checkpoint.matrix("output.weight")[0] if own_head else vocab_size,
        target_hidden_size=decoder.hidden_size,
        aux_layer_ids=_captured(checkpoint, facts),
        last_state="before_norm",
        block_size=facts.size("block_size", 16, DEFAULT),
        parallel=ParallelDrafting(mask_token_id=_mask(checkpoint, facts), mask_state=False),
        causal_layers=tuple(range(decoder.num_hidden_layers)) if _causal(facts) else (),
        window_rule="row",
        embed_tokens="draft" if own_table else "target",
        lm_head="draft" if own_head or own_table else "target",
        mask_embedding=False,
        attention_sinks="blk.0.attn_sinks.weight" in checkpoint.tensors,
        value_scale=facts.stated_or("attention.value_scale", float, 1.0, "none", "value_scale"),
        embedding_scale=facts.stated_or("embedding_scale", float, 1.0, "none"),
        logit_scale=facts.stated_or("logit_scale", float, 1.0, "none"),
        logit_softcap=facts.stated_or("final_logit_softcapping", float, 0.0, "none", "logit_softcap"),
        **_heads(checkpoint, facts),
    )
    spec = DraftSpec(architecture=architecture, dtype=dtype or common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, moves)


def export(outgoing: Outgoing) -> Export:
    """Facts that llama.cpp's graph has no place for become losses; a file that llama.cpp does not load, or that makes
    it abort, is not written."""
    draft = outgoing.draft.spec.architecture.expect(DFlashSpec)
    target = outgoing.need_target("its tokenizer")
    check_target(outgoing.draft.spec, target)
    problem = last_state_of(target, draft.aux_layer_ids) or _one_sided(draft)
    if draft.target_hidden_size != draft.decoder.hidden_size:
        problem = f"the draft is {draft.decoder.hidden_size} wide, and its target {draft.target_hidden_size}"
    if outgoing.draft.spec.quantization is not None:
        problem = "the weights are quantized in another way than GGUF's"
    if problem is not None:
        raise LayoutError(f"llama.cpp does not run this draft: {problem}", where=outgoing.draft.path)
    runs = _run(draft)
    names = _names(draft.decoder)
    tensors = [name for move in kept(outgoing, runs, {}) for name in move.sources]
    moves = writing_moves(outgoing, names, runs.decoder, tensors)
    if runs.embed_tokens == "draft" and runs.lm_head == "target":
        moves.append(replace(outgoing.borrowed("lm_head.weight"), destination=names.written("lm_head.weight")))
    metadata = {"general.architecture": ARCHITECTURE} | _metadata(runs)
    return Export(metadata, tuple(moves), losses(draft, runs), computed=rope_factors(outgoing, runs.decoder))


def _run(draft: DFlashSpec) -> DFlashSpec:
    """The draft that llama.cpp makes of this one."""
    decoder, own = draft.decoder, draft.method == "dflash2"
    every = len(draft.causal_layers) == decoder.num_hidden_layers
    return replace(
        draft,
        decoder=replace(
            decoder,
            hidden_act=decoder.hidden_act if decoder.hidden_act in ACTIVATIONS else "silu",
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=True,
            rope=decoder.rope if runs_scaling(decoder.rope) else replace(decoder.rope, scaling=None),
        ),
        last_state="before_norm",
        slots="fill-in" if own else draft.slots,
        causal_layers=draft.causal_layers if every else (),
        window_rule="row",
        mask_embedding=False,
        markov=None if own or draft.markov is None else replace(draft.markov, markov_type="vanilla"),
        confidence="hidden_and_token" if draft.confidence == "hidden_and_token" and not own else "none",
        logit_scale=draft.logit_scale if own else 1.0,
        logit_softcap=draft.logit_softcap if own else 0.0,
    )


def _one_sided(draft: DFlashSpec) -> str | None:
    """llama.cpp lets a row see all later ones where the layer is not causal; a window may end before the last of them
    (`llama-hparams.h`, `is_masked_swa`)."""
    found = (w for i, w in enumerate(draft.windows) if w and i not in draft.causal_layers and w < draft.block_size)
    window = next(found, None)
    if window is None:
        return None
    return f"its window of {window} ends within its block of {draft.block_size} rows, and llama.cpp's has no end there"


def _metadata(draft: DFlashSpec) -> dict[str, object]:
    decoder = draft.decoder
    keys: dict[str, object] = {
        "target_layers": list(draft.aux_layer_ids),
        "block_size": draft.block_size,
        "attention.causal": bool(draft.causal_layers),
        "has_confidence_head": draft.confidence != "none",
        "hidden_activation": decoder.hidden_act,
        "embedding_scale": draft.embedding_scale,
    }
    if draft.method == "dspark":  # the only one for which it is read
        keys["sample_from_anchor"] = draft.slots == "anchor-first"
    if decoder.sliding_window is not None:
        keys["attention.sliding_window"] = decoder.sliding_window
        keys["attention.sliding_window_pattern"] = [window is not None for window in draft.windows]
    if draft.value_scale != 1.0:
        keys["attention.value_scale"] = draft.value_scale
    if draft.method == "dflash2":
        keys |= {"logit_scale": draft.logit_scale, "final_logit_softcapping": draft.logit_softcap}
    for part in (draft.convolution, draft.selector):
        keys |= {} if part is None else part.keys()
    own = {f"{ARCHITECTURE}.{key}": value for key, value in keys.items()}
    return layer_metadata(ARCHITECTURE, decoder, draft.vocab_size) | own | {MASK_KEY: draft.parallel.mask_token_id}


def _names(decoder: Decoder) -> Names:
    layers = range(decoder.num_hidden_layers)
    own = {f"layers.{i}.{name}": f"blk.{i}.{gguf}" for i in layers for name, gguf in IN_LAYERS.items()}
    return Names(tensors=OUTSIDE_LAYERS | own)


def _captured(checkpoint: Checkpoint, facts: Facts) -> tuple[int, ...]:
    ids = facts.integers("target_layers")
    if ids is None:
        raise FormatError("the file has no target_layers: llama.cpp does not load it", where=checkpoint.source.path)
    facts.record("aux_layer_ids", str(list(ids)), "stated", key=f"{ARCHITECTURE}.target_layers")
    return ids


def _mask(checkpoint: Checkpoint, facts: Facts) -> int:
    """The token in the place of masks, which stands among the tokenizer's keys."""
    tokenizer = checkpoint.config.get("tokenizer")
    token = tokenizer.get(MASK_KEY.partition(".")[2]) if isinstance(tokenizer, dict) else None
    if not isinstance(token, int):
        old = facts.optional("mask_token_id", int)
        named = (
            "" if old is None else f", and {ARCHITECTURE}.mask_token_id {old}, a name that it does not read any more"
        )
        raise FormatError(
            f"the file has no {MASK_KEY}{named}: llama.cpp's server dies on the first request",
            where=checkpoint.source.path,
            hint="convert the draft again",
        )
    kinds = read_typed(checkpoint.source.path, KINDS_KEY).get(KINDS_KEY)
    text = kinds is not None and isinstance(kinds.value, list) and kinds.value[token : token + 1] == [KINDS["normal"]]
    return facts.record("mask_token_id", token, "stated", TEXT_AS_MASK if text else f"GGUF key {MASK_KEY}")


def _causal(facts: Facts) -> bool:
    return facts.stated_or("attention.causal", bool, False, DEFAULT, "causal_layers")


def _windowed(facts: Facts, decoder: Decoder) -> Decoder:
    """The decoder with its windows: those that a pattern gives to its layers."""
    window, pattern = facts.optional("attention.sliding_window", int), facts.flags("attention.sliding_window_pattern")
    slides = pattern is not None and any(pattern)
    if window and pattern is None:
        facts.problems.append(
            Finding(
                "gguf-window-without-pattern",
                "error",
                f"attention.sliding_window is {window}, and no sliding_window_pattern says of which layers: llama.cpp "
                "does not load the file",
                fix="convert the checkpoint that the file was made from again",
                source="llama.cpp `src/models/dflash.cpp`",
            )
        )
    if slides and not window:
        facts.record("sliding_window", "none", "stated", PATTERN_ALONE)
    if not window or pattern is None or not slides:
        return decoder
    full = tuple(layer for layer, sliding in enumerate(pattern) if not sliding)
    facts.record("sliding_window", window, "stated")
    return replace(decoder, sliding_window=window, full_attention_layers=full)


def _heads(checkpoint: Checkpoint, facts: Facts) -> Mapping[str, Any]:
    """What DSpark and DFlash2 add to the body, by the tensors, and which row predicts which position."""
    tensors = checkpoint.tensors
    markov = "markov_w1.weight" in tensors
    anchor = facts.optional("sample_from_anchor", bool)
    if facts.optional("has_confidence_head", bool) and "conf_proj.weight" not in tensors:
        raise FormatError("has_confidence_head is true, and the file has none", where=checkpoint.source.path)
    taps, group = facts.optional("conv_kernel_size", int), facts.optional("conv_group_size", int)
    rank, top = facts.optional("selector_rank", int), facts.optional("selector_top_k", int)
    first = markov if anchor is None else anchor
    note = "sample_from_anchor" if anchor is not None else DEFAULT if markov else "no DSpark"
    confidence = "hidden_and_token" if markov and "conf_proj.weight" in tensors else "none"
    found: dict[str, Any] = {
        "slots": facts.record("slots", "anchor-first" if first else "fill-in", "stated", note),
        "markov": None,
        "confidence": facts.record("confidence", confidence, "from tensors"),
        "convolution": None,
        "selector": None,
    }
    if markov:
        found["markov"] = MarkovHead(markov_type="vanilla", markov_rank=checkpoint.matrix("markov_w1.weight")[1])
    if taps is not None and group is not None:
        found["convolution"] = BlockConvolution(conv_taps=taps, conv_group_size=group)
    if rank is not None and top is not None:
        found["selector"] = CandidateSelector(selector_rank=rank, selector_top_k=top)
    return found
