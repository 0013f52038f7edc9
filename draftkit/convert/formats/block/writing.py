"""Writing the layouts of block drafters: what of a body they can say, and what their readers make of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from draftkit.convert.export import Outgoing
from draftkit.convert.formats.block.reading import BlockLayout, LastState
from draftkit.convert.formats.speculators import layer_config, serving, zero_biases
from draftkit.convert.operations import Move
from draftkit.engines.speculators import ARCHITECTURES, KIND, LAYER_CONFIG, SERVING, VERSION
from draftkit.layout.block import NESTED, BlockDraft

Body = TypeVar("Body", bound=BlockDraft)


def last_state_at(outgoing: Outgoing, draft: BlockDraft, layout: BlockLayout) -> LastState:
    """Where a layout's readers take the state after the target's last layer, if the draft reads it at all."""
    last = None if outgoing.target is None else outgoing.target.num_hidden_layers
    return layout.last_state if last in draft.aux_layer_ids else draft.last_state


def zlab_body(draft: Body, last_state: LastState) -> Body:
    """The draft whose body readers of z-lab's layout make of this one's."""
    decoder = draft.decoder
    uniform = len(draft.causal_layers) in (0, decoder.num_hidden_layers)
    return replace(
        draft,
        decoder=replace(decoder, output_bias=decoder.qkv_bias, mlp_bias=False, qk_norm=True),
        last_state=last_state,
        causal_layers=draft.causal_layers if uniform else draft.sliding_layers,
        window_rule="row",
    )


def zlab_config(outgoing: Outgoing, draft: BlockDraft, architecture: str) -> dict[str, object]:
    """The config in z-lab's layout: block size and causality at both levels, as readers look for them at either."""
    layers = draft.decoder.num_hidden_layers
    nested = draft.nested_config() | {"block_size": draft.block_size}
    config: dict[str, object] = {"architectures": [architecture], **draft.body_config()}
    if len(draft.causal_layers) in (0, layers):
        config["is_causal"] = nested["causal"] = bool(draft.causal_layers)
    if draft.target_hidden_size != draft.decoder.hidden_size:
        config["target_hidden_size"] = draft.target_hidden_size
    if draft.reduced_vocabulary:
        config["draft_vocab_size"] = draft.draft_vocab_size
    if outgoing.target is not None:
        config["num_target_layers"] = outgoing.target.num_hidden_layers
    return config | {"dtype": outgoing.dtype, NESTED: nested}


def library_body(draft: Body) -> Body:
    """The draft whose body the speculators library's classes make of this one's."""
    return replace(
        draft,
        target_hidden_size=draft.decoder.hidden_size,
        last_state="before_norm",
        causal_layers=draft.sliding_layers if windows_are_causal(draft) else (),
        window_rule="row",
        embed_tokens="target",
        lm_head="draft" if draft.reduced_vocabulary else "target",
    )


def windows_are_causal(draft: BlockDraft) -> bool:
    """Whether the windows are causal, which `sliding_window_non_causal` of the config denies; vLLM takes a denial as
    causality of all layers where none has a window."""
    return bool(draft.sliding_layers) and bool(draft.causal_layers)


def library_obstacles(draft: BlockDraft) -> list[str]:
    """The facts of a body that the library's classes have no parameters for, so that no file can state them."""
    found = {
        "it has no norms of queries and keys": not draft.decoder.qk_norm,
        "it has biases in its MLP": draft.decoder.mlp_bias,
    }
    return [what for what, holds in found.items() if holds]


def library_config(outgoing: Outgoing, draft: BlockDraft) -> dict[str, object]:
    """The config in the library's layout. Raises `LayoutError` when the target, which it names, is not known."""
    kind, width = draft.method, draft.target_hidden_size
    return {
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
        "sliding_window_non_causal": not windows_are_causal(draft),
        "tie_word_embeddings": False,
        "dtype": outgoing.dtype,
        LAYER_CONFIG: layer_config(draft.decoder, draft.vocab_size) | {"model_type": "qwen3"},
    }


def library_moves(outgoing: Outgoing, draft: BlockDraft) -> tuple[Move, ...]:
    """The tensors in the library's layout: those of the draft, the mask of its vocabulary, biases that do nothing."""
    moves = outgoing.renamed({})
    if draft.reduced_vocabulary:
        moves.append(Move("offset_to_mask", ("d2t",), "t2d", "BOOL", (draft.vocab_size,)))
    return (*moves, *zero_biases(outgoing.draft, draft, draft.decoder))
