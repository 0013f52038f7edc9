"""DFlash, DSpark and DFlash2 as the speculators library trains and stores them (0.9, vllm-project/speculators).

Sizes nested in `transformer_layer_config`, layer ids at the top in convention S. Embedding and head are the target's,
but for the head of a reduced vocabulary, with `d2t` and `t2d`. Layers with a window are causal unless
`sliding_window_non_causal`, the others see the whole block. A DSpark file without `sample_from_anchor` is anchor-first
to the library and filled in to vLLM. The library's windows begin at the anchor's for all rows, and end at none of the
block; vLLM serves each row's own, to both sides where the layer is not causal. Source: `speculators/models/dflash`,
`dspark`, `dflash2`; vLLM 0.32 `configs/speculators/algos.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.block.dflash import plan_dflash
from draftkit.convert.formats.block.reading import BlockLayout, read_library_draft
from draftkit.convert.formats.block.writing import (
    library_body,
    library_config,
    library_moves,
    library_obstacles,
    windows_are_causal,
)
from draftkit.convert.formats.speculators import recognize_kinds, refuse_inexpressible, with_target_named
from draftkit.convert.plan import Plan
from draftkit.engines.speculators import LAYER_CONFIG
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.target import TargetFacts

NAME = "speculators-dflash"
TITLE = "DFlash, DSpark, DFlash2 (speculators layout)"

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
    kind, named = read_library_draft(checkpoint, facts, tuple(LAYOUTS))
    return with_target_named(plan_dflash(checkpoint, facts, target, LAYOUTS[kind]), named)


def export(outgoing: Outgoing) -> Export:
    """The library reads embedding and whole head from the target; vLLM takes those of the file, so they are written."""
    draft = outgoing.draft.spec.architecture.expect(DFlashSpec)
    refuse_inexpressible(outgoing, _obstacles(draft))
    return Export(_config(outgoing, draft), library_moves(outgoing, draft), losses(draft, _library_draft(draft)))


def _obstacles(draft: DFlashSpec) -> list[str]:
    """The facts of a draft that the library's classes have no parameters for, so that no file can state them."""
    found = {
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
    return library_obstacles(draft) + [what for what, holds in found.items() if holds]


def _library_draft(draft: DFlashSpec) -> DFlashSpec:
    """The draft that the library's classes make of this one; vLLM reads some more from the same file."""
    return replace(library_body(draft), value_scale=1.0, embedding_scale=1.0, logit_scale=1.0, logit_softcap=0.0)


def _config(outgoing: Outgoing, draft: DFlashSpec) -> dict[str, object]:
    """The whole config.json. Raises `LayoutError` when the target, which it names, is not known."""
    config = library_config(outgoing, draft)
    config[LAYER_CONFIG] = _layer_config(draft, config[LAYER_CONFIG])
    if draft.method == "dspark":
        config |= draft.dspark_keys()
        del config["target_layer_ids"]
    if draft.convolution is not None and draft.selector is not None:
        config |= draft.convolution.keys() | draft.selector.keys()
    return config


def _layer_config(draft: DFlashSpec, config: Any) -> dict[str, object]:
    """Add what vLLM 0.32 does not carry over from the outer config, and so reads from here only."""
    read = {} if draft.logit_scale == 1.0 else {"logit_scale": draft.logit_scale}
    everywhere, nowhere = len(draft.causal_layers) == draft.decoder.num_hidden_layers, not draft.causal_layers
    if draft.causal_layers != _causal_in_vllm(draft) and (everywhere or nowhere):
        read["is_causal"] = everywhere
    return config | read


def _causal_in_vllm(draft: DFlashSpec) -> tuple[int, ...]:
    """The causal layers that vLLM reads from the outer config: of DSpark those with a window, else all or none."""
    if draft.method == "dspark":
        return draft.sliding_layers
    return tuple(range(draft.decoder.num_hidden_layers)) if windows_are_causal(draft) else ()
