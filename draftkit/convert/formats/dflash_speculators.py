"""DFlash, DSpark and DFlash2 as the speculators library trains and stores them (0.9, vllm-project/speculators).

Sizes nested in `transformer_layer_config`, layer ids at the top in convention S. Embedding and head are the target's,
but for the head of a reduced vocabulary, with `d2t` and `t2d`. Layers with a window are causal unless
`sliding_window_non_causal`, the others see the whole block. A DSpark file without `sample_from_anchor` is anchor-first
to the library and filled in to vLLM. The library's windows begin at the anchor's for all rows; vLLM serves each row's
own. Source: `speculators/models/dflash`, `dspark`, `dflash2`; vLLM 0.32 `configs/speculators/algos.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.block_reading import SLIDING, BlockLayout
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.dflash_reading import plan_dflash
from draftkit.convert.export import Export, Outgoing, losses
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.convert.speculators import (
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
from draftkit.engines.speculators import ARCHITECTURES, KIND, LAYER_CONFIG, SERVING, VERSION
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.target import TargetFacts

NAME = "speculators-dflash"
TITLE = "DFlash, DSpark, DFlash2 (speculators 0.9 layout)"

DESTINATION = "speculators"
METHODS = ("dflash", "dspark", "dflash2")

FILL_IN = BlockLayout(NAME, slots="fill-in", last_state="before_norm")
LAYOUTS = {
    "dflash": FILL_IN,
    "dspark": replace(FILL_IN, slots=None),
    "dflash2": replace(FILL_IN, causal=False),
}


def recognize(checkpoint: Checkpoint) -> int:
    return recognize_kinds(checkpoint, tuple(LAYOUTS))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    kind = read_kind(checkpoint, facts, tuple(LAYOUTS))
    facts.lift(LAYER_CONFIG)
    facts.names("architectures")  # follow from the method, as the kind does
    check_converted(checkpoint, facts, "DFlashConverter")
    named = note_target(facts)
    if SLIDING in (facts.names("layer_types") or ()):
        note = "as vLLM serves it; the library trains all rows of a block with the window of its first"
        facts.record("window_rule", "row", "format default", note)
    return with_target_named(plan_dflash(checkpoint, facts, target, LAYOUTS[kind]), named)


def export(outgoing: Outgoing) -> Export:
    """The library reads embedding and whole head from the target; vLLM takes those of the file, so they are written."""
    draft = outgoing.draft.spec.architecture.expect(DFlashSpec)
    refuse_inexpressible(outgoing, _obstacles(draft))
    moves = outgoing.renamed({})
    if draft.reduced_vocabulary:
        moves.append(Move("offset_to_mask", ("d2t",), "t2d", "BOOL", (draft.vocab_size,)))
    moves += zero_biases(outgoing.draft, draft, draft.decoder)
    return Export(_config(outgoing, draft), tuple(moves), losses(draft, _library_draft(draft)))


def _obstacles(draft: DFlashSpec) -> list[str]:
    """What of a draft the library's classes have no parameters for, so that no file can say it."""
    found = {
        "it has no norms of queries and keys": not draft.decoder.qk_norm,
        "it has biases in its MLP": draft.decoder.mlp_bias,
        "its attention has sinks": draft.attention_sinks,
        "its mask has an embedding of its own": draft.mask_embedding,
        "it has convolutions without a selector, or a selector without convolutions": (
            (draft.convolution is None) != (draft.selector is None)
        ),
        "it has both DFlash2's and DSpark's heads, or a selector for a reduced vocabulary": (
            draft.selector is not None
            and (draft.markov is not None or draft.confidence != "none" or draft.reduced_vocabulary)
        ),
    }
    return [what for what, holds in found.items() if holds]


def _library_draft(draft: DFlashSpec) -> DFlashSpec:
    """The draft that the library's classes make of this one; vLLM reads some more from the same file."""
    return replace(
        draft,
        target_hidden_size=draft.decoder.hidden_size,
        last_state="before_norm",
        causal_layers=draft.sliding_layers if _windows_are_causal(draft) else (),
        window_rule="row",
        value_scale=1.0,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        embed_tokens="target",
        lm_head="draft" if draft.reduced_vocabulary else "target",
    )


def _windows_are_causal(draft: DFlashSpec) -> bool:
    """What `sliding_window_non_causal` denies. vLLM takes a denial of layers without a window for causality in all."""
    return bool(draft.sliding_layers) and bool(draft.causal_layers)


def _config(outgoing: Outgoing, draft: DFlashSpec) -> dict[str, object]:
    """The whole config.json. Raises `LayoutError` when the target, which it names, is not known."""
    kind, width = draft.method, draft.target_hidden_size
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[kind]],
        KIND: kind,
        "speculators_version": VERSION,
        SERVING: serving(outgoing, kind),
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": None if width == draft.decoder.hidden_size else width,
        "aux_hidden_state_layer_ids": list(draft.aux_layer_ids),
        "block_size": draft.block_size,
        "mask_token_id": draft.parallel.mask_token_id,
        "sample_from_anchor": draft.slots == "anchor-first",
        "sliding_window_non_causal": not _windows_are_causal(draft),
        "tie_word_embeddings": False,
        "dtype": outgoing.dtype,
        LAYER_CONFIG: _layer_config(draft),
    }
    if kind == "dspark":
        config |= draft.dspark_keys()
        del config["target_layer_ids"]
    if draft.convolution is not None and draft.selector is not None:
        config |= draft.convolution.keys() | draft.selector.keys()
    return config


def _layer_config(draft: DFlashSpec) -> dict[str, object]:
    """With what vLLM 0.32 does not carry over from the outer config, and so reads from here only."""
    config = layer_config(draft.decoder, draft.vocab_size) | {"model_type": "qwen3"}
    if draft.logit_scale != 1.0:
        config["logit_scale"] = draft.logit_scale
    everywhere, nowhere = len(draft.causal_layers) == draft.decoder.num_hidden_layers, not draft.causal_layers
    if draft.causal_layers != _causal_in_vllm(draft) and (everywhere or nowhere):
        config["is_causal"] = everywhere
    return config


def _causal_in_vllm(draft: DFlashSpec) -> tuple[int, ...]:
    """The causal layers that vLLM reads from the outer config: of DSpark those with a window, else all or none."""
    if draft.method == "dspark":
        return draft.sliding_layers
    return tuple(range(draft.decoder.num_hidden_layers)) if _windows_are_causal(draft) else ()
