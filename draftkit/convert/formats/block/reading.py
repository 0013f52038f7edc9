"""Reading block drafters, whose body several trainers write with small differences.

A format module states its differences as a `BlockLayout` and reads the heads of its family; names, shapes and keys of
the body are shared (z-lab/dflash `model.py`, deepseek-ai/DeepSpec `modeling/dspark`, vLLM 0.32 `qwen3_dflash.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.decoder import read_decoder, read_windows
from draftkit.convert.formats.eagle.reading import Owner, with_unified_names
from draftkit.convert.formats.speculators import check_converted, note_target, read_kind
from draftkit.convert.formats.vocabulary_map import read_vocabulary_map, with_map
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan, common_dtype, make_plan, planned_so_far
from draftkit.engines.speculators import LAYER_CONFIG
from draftkit.errors import FormatError
from draftkit.io.handles import TensorHandle
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.block import NESTED, BlockConvolution, BlockDraft
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, default_block_layer_ids

Slots = Literal["fill-in", "anchor-first"]
LastState = Literal["before_norm", "after_norm"]
SLOTS: tuple[Slots, ...] = ("fill-in", "anchor-first")
OUTPUTS, STATES = ("target_layer_ids",), ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
SLIDING = "sliding_attention"
UNREAD = {
    "used in training only": ("attention_backend", "dflash_block_size", "loss_decay_gamma", "num_anchors"),
    "the target tells": ("num_target_layers",),
    "names the method": ("projector_type", "speculative_algorithm"),
    "the tensors tell": ("attention_mode", "has_own_lm_head", "use_aux_hidden_state"),
}


@dataclass(frozen=True)
class BlockLayout:
    """What one trainer's files mean where the layouts share their names.

    - `name`: the format. `renames`: the beginnings of its tensor names → those of the unified layout.
    - `slots`: the convention of its files that do not state one, None where they may have either. `shifts`: whether
      `shift_label` states it.
    - `last_state`: which state its trainer reads after the target's last layer.
    - `causal`: whether rows see the later rows of their block, in all layers, where a file does not say; None: the
      layers with a window are causal.
    """

    name: str
    slots: Slots | None
    last_state: LastState
    renames: Mapping[str, str] = field(default_factory=dict)
    shifts: bool = False
    causal: bool | None = None


# Reads what a family adds to the body: its facts, from the checkpoint under unified names and the body's facts.
ReadHeads = Callable[[Checkpoint, Facts, Mapping[str, Any]], dict[str, Any]]


def lift_nested(facts: Facts) -> None:
    """Read the keys of z-lab's nested config as if they stood beside it, where there is one."""
    if isinstance(facts.mapping(NESTED), dict):
        facts.lift(NESTED)


def read_library_draft(checkpoint: Checkpoint, facts: Facts, kinds: Sequence[str]) -> tuple[str, str | None]:
    """The kind of a block drafter of the speculators library, and the target that it names; its sizes are lifted."""
    kind = read_kind(checkpoint, facts, kinds)
    facts.lift(LAYER_CONFIG)
    facts.names("architectures")  # follow from the method, as the kind does
    check_converted(checkpoint, facts, "DFlashConverter")
    named = note_target(facts)
    if SLIDING in (facts.names("layer_types") or ()):
        note = "as vLLM serves it; the library trains all rows with the window of the first, which ends at no later row"
        facts.record("window_rule", "row", "format default", note)
    return kind, named


def plan_block_draft(
    checkpoint: Checkpoint,
    facts: Facts,
    target: TargetFacts | None,
    layout: BlockLayout,
    family: type[BlockDraft],
    read_heads: ReadHeads,
) -> Plan:
    """Plan the conversion of a block drafter, whose config keys stand side by side (`Facts.lift`)."""
    view = with_unified_names(checkpoint, layout.renames)
    num_layers = view.count_layers()
    window, full_attention_layers, sliding = _windows(view, facts, num_layers)
    decoder = read_decoder(view, facts, "layers.0.", num_layers, "config", (window, full_attention_layers))
    vocab_size = _vocab_size(facts, target)
    if vocab_size is None:
        return planned_so_far(layout.name, facts)
    draft_vocab_size = facts.size("draft_vocab_size", _rows_of_head(view, vocab_size), "rows of the head")
    target_hidden = facts.size("target_hidden_size", decoder.hidden_size, "absent means the draft's width")
    if target is not None:
        checkpoint.check_target(target, hidden_size=target_hidden, vocab_size=vocab_size)
    target_layers = facts.optional("num_target_layers", int) if target is None else target.num_hidden_layers
    aux_layer_ids = _aux_layer_ids(view, facts, target_hidden, num_layers, target_layers)
    vocabulary_map = read_vocabulary_map(view, facts, vocab_size, draft_vocab_size)
    mask = _mask_token(facts)
    last_state = layout.last_state if target_layers in aux_layer_ids else "before_norm"
    facts.record("last_state", last_state, "format default", "of the target, where it is read: what its trainer reads")
    body: dict[str, Any] = {
        "decoder": decoder,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target_hidden,
        "aux_layer_ids": aux_layer_ids,
        "last_state": last_state,
        "slots": _slots(facts, layout),
        "block_size": facts.size("block_size"),
        "parallel": None if mask is None else ParallelDrafting(mask_token_id=mask, mask_state=False),
        "causal_layers": _causal_layers(view, facts, sliding, layout),
        "window_rule": "row",
        "embed_tokens": _owner(view, facts, "embed_tokens"),
        "lm_head": _owner(view, facts, "lm_head"),
    }
    heads = read_heads(view, facts, body)
    _drop_unread(checkpoint, facts)
    spec = None
    if not facts.missing:
        architecture = family(**body, **heads)
        spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    moves = with_map(_moves(view, vocab_size == draft_vocab_size), view, vocabulary_map)
    return make_plan(layout.name, checkpoint, facts, spec, moves)


def read_convolution(view: Checkpoint, facts: Facts) -> BlockConvolution | None:
    """DFlash2's convolutions, where the layers have them."""
    kernel = "layers.0.attention_conv.base_kernel"
    if kernel not in view.tensors:
        return None
    shape = view.shape(kernel)
    if len(shape) != 3:
        raise FormatError(f"tensor {kernel} has shape {list(shape)}", where=view.source.path, expected="[2, taps, H]")
    return BlockConvolution(
        conv_taps=facts.from_tensors("conv_kernel_size", shape[1], "rows of base_kernel"),
        conv_group_size=facts.size("conv_group_size"),
    )


def _windows(view: Checkpoint, facts: Facts, num_layers: int) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    """The window, the layers without one, and those that `layer_types` calls sliding.

    `use_swa` gives a window to all layers where those are called full (MiMo, ModelOpt); `swa_window_size` is its width.
    """
    kinds = facts.names("layer_types") or ()
    sliding = tuple(layer for layer, kind in enumerate(kinds[:num_layers]) if kind == SLIDING)
    forced, width = facts.optional("use_swa", bool), facts.optional("swa_window_size", int)
    switch, window = facts.optional("use_sliding_window", bool), facts.optional("sliding_window", int)
    if forced and not sliding:
        width = width or window
        if not width:
            raise FormatError(
                "use_swa is true, and swa_window_size and sliding_window are missing", where=view.config_path
            )
        return facts.record("sliding_window", width, "stated", "use_swa: in all layers"), (), ()
    if (sliding and width is None and switch is False) or (switch and window is not None and not kinds):
        raise FormatError(
            f"use_sliding_window is {str(switch).lower()}, and layer_types are {list(kinds)}",
            where=view.config_path,
            expected="true with layers of sliding_attention, or neither: transformers drops a window that is not used",
            hint="ask its author how the draft was trained, and correct the key that is wrong",
        )
    facts.drop("use_swa", "layer_types tells")
    if not sliding:
        facts.drop("swa_window_size", "no layer of the draft has a window")
    return *read_windows(facts, num_layers, width=width), sliding


def _vocab_size(facts: Facts, target: TargetFacts | None) -> int | None:
    """The target's number of tokens; transformers' assistants do not state it."""
    if facts.optional("vocab_size", int) is not None:
        return facts.size("vocab_size")
    if target is not None:
        return facts.record("vocab_size", target.vocab_size, "from target")
    given = facts.require("vocab_size", "pass --target, whose vocabulary it is")
    return None if given is None else facts.as_integers("vocab_size", [given])[0]


def _aux_layer_ids(
    view: Checkpoint, facts: Facts, target_hidden: int, num_layers: int, target_layers: int | None
) -> tuple[int, ...]:
    """The captured layers in convention S. `target_layer_ids` number layer outputs, one less, −1 the embedding's.

    Raises `FormatError` where `fc` reads another number of states, and for layers in another order than engines feed
    them.
    """
    states = next((ids for key in STATES if (ids := facts.integers(key)) is not None), None)
    outputs = next((ids for key in OUTPUTS if (ids := facts.integers(key)) is not None), None)
    if states is not None:
        ids = states
        facts.record("aux_layer_ids", str(list(ids)), "stated", "states before the layers of these numbers")
    elif outputs is not None:
        ids = tuple(i + 1 for i in outputs)
        facts.record("aux_layer_ids", str(list(ids)), "stated", f"the outputs of layers {list(outputs)}")
    elif target_layers is not None:
        ids = default_block_layer_ids(target_layers, num_layers)
        note = f"the reference's layers of {target_layers} for a draft of {num_layers}"
        facts.record("aux_layer_ids", str(list(ids)), "from target", note)
    else:
        given = facts.require("aux_layer_ids", "pass --target, so that they can be computed from its number of layers")
        ids = () if given is None else facts.as_integers("aux_layer_ids", given if isinstance(given, list) else [given])
    if list(ids) != sorted(set(ids)):
        raise FormatError(
            f"the captured layers are named in the order {list(ids)}: vLLM feeds them in ascending order whatever the "
            "file says, and each once, so that fc would read other states than it was trained on",
            where=view.source.path,
            hint="permute the columns of fc.weight, and the ids with them, into ascending order",
        )
    if ids and "fc.weight" in view.tensors and view.matrix("fc.weight")[1] != target_hidden * len(ids):
        columns = view.matrix("fc.weight")[1]
        raise FormatError(
            f"{len(ids)} captured layers are named, {list(ids)}, and fc.weight has {columns} columns, "
            f"{columns / target_hidden:g} states of {target_hidden}",
            where=view.source.path,
            hint="set the right ones with --set aux_layer_ids=…, or correct target_hidden_size",
        )
    return ids


def _slots(facts: Facts, layout: BlockLayout) -> Slots | None:
    """Whether rows predict their own token or the next one: as stated, as the layout has it, or as the user says."""
    keys = ("sample_from_anchor", "dspark_bonus_anchor", "shift_label")
    anchor, bonus, shifted = (facts.optional(key, bool) for key in keys)
    statements = {
        "sample_from_anchor": anchor,
        "dspark_bonus_anchor": None if bonus is None else not bonus,
        "shift_label": shifted if layout.shifts else None,
    }
    if not layout.shifts:
        facts.drop("shift_label", "nothing reads it here")
    for key, first in statements.items():
        if first is not None:
            facts.record("slots", SLOTS[first], "stated", f"config {key}")
            return SLOTS[first]
    if layout.slots is not None:
        facts.record("slots", layout.slots, "format default", f"{layout.name} files have no other")
        return layout.slots
    said = facts.require(
        "slots",
        "the file does not tell whether rows predict their own token or the next one: pass --set slots=fill-in "
        "(DFlash) or --set slots=anchor-first (DSpark); draftkit doctor tells a wrong choice",
    )
    return next((slots for slots in SLOTS if slots == said), "fill-in") if said is not None else None


def _mask_token(facts: Facts) -> int | None:
    """The token whose embedding stands in for tokens to come."""
    facts.drop("mask_token", "mask_token_id tells")
    token = facts.optional("mask_token_id", int)
    if token is not None:
        return facts.record("mask_token_id", token, "stated")
    hint = "ask its author for the mask token of the training and pass --set mask_token_id=…"
    given = facts.require("mask_token_id", hint)
    return None if given is None else facts.as_integers("mask_token_id", [given])[0]


def _causal_layers(view: Checkpoint, facts: Facts, sliding: tuple[int, ...], layout: BlockLayout) -> tuple[int, ...]:
    """The layers in which a row does not see later rows of its block.

    `is_causal` and `causal` are one value for all, `sliding_window_non_causal` one for the layers with a window, which
    are causal without any.
    """
    layers = tuple(range(view.count_layers()))
    outer, inner = facts.optional("is_causal", bool), facts.optional("causal", bool)
    non_causal = facts.optional("sliding_window_non_causal", bool)
    if outer is not None and inner is not None and outer != inner:
        if outer:
            raise FormatError(f"is_causal is {outer} and {NESTED}.causal is {inner}", where=view.config_path)
        note = "NeMo Automodel's JetSpec says is_causal false as well, which vLLM follows; it trains causally"
        return _recorded(facts, layers, "stated", note)
    for key, causal in (("is_causal", outer), ("causal", inner)):
        if causal is not None:
            return _recorded(facts, layers if causal else (), "stated", f"{key} is {str(causal).lower()}")
    if non_causal is not None:
        found = () if non_causal else sliding
        note = f"of the layers with a window: sliding_window_non_causal is {str(non_causal).lower()}"
        return _recorded(facts, found, "stated", note)
    if layout.causal is not None:
        return _recorded(facts, layers if layout.causal else (), "format default", "in all layers")
    return _recorded(facts, sliding, "format default", "those with a window")


def _recorded(
    facts: Facts, layers: tuple[int, ...], origin: Literal["stated", "format default"], note: str
) -> tuple[int, ...]:
    facts.record("causal_layers", str(list(layers)), origin, note)
    return layers


def _drop_unread(checkpoint: Checkpoint, facts: Facts) -> None:
    """Account for keys of the body that change nothing, and refuse those of bodies that draftkit does not have."""
    if facts.optional("use_aux_hidden_state", bool) is False:
        raise FormatError(
            "use_aux_hidden_state is false: the draft reads a hidden state without fc", where=checkpoint.config_path
        )
    if facts.optional("is_neox_style", bool) is False or facts.optional("rope_is_neox_style", bool) is False:
        raise FormatError(
            "the draft turns pairs of neighboring features (is_neox_style false), which draftkit cannot run",
            where=checkpoint.config_path,
        )
    for reason, keys in UNREAD.items():
        for key in keys:
            facts.drop(key, reason)


def _rows_of_head(view: Checkpoint, vocab_size: int) -> int:
    return view.matrix("lm_head.weight")[0] if "lm_head.weight" in view.tensors else vocab_size


def _owner(view: Checkpoint, facts: Facts, module: str) -> Owner:
    owner: Owner = "draft" if f"{module}.weight" in view.tensors else "target"
    facts.record(module, owner, "from tensors")
    return owner


def _moves(view: Checkpoint, whole_vocabulary: bool) -> list[Move]:
    dropped = {"t2d": "the mask follows from d2t (checked)"}
    if whole_vocabulary:
        dropped["d2t"] = "all zero: the draft has the whole vocabulary"
    return [
        drop(handle, dropped[name]) if name in dropped else _move(name, handle) for name, handle in view.tensors.items()
    ]


def _move(name: str, handle: TensorHandle) -> Move:
    """A copy; an embedding of the mask may have more dimensions."""
    if name == "mask_embedding" and len(handle.shape) != 1:
        return Move("reshape", (handle.name,), name, handle.dtype, (math.prod(handle.shape),))
    return copy(handle, name)
