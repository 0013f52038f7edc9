"""The nested `eagle_config` of EAGLE drafts, and the target's layers that a draft reads."""

from __future__ import annotations

from typing import NamedTuple

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.errors import FormatError, TargetError
from draftkit.layout.target import TargetFacts

IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_IDS = f"eagle_config.{IDS}"
PARALLEL_HEADS = {"parallel_draft_heads_num_layers", "parallel_draft_step"}


class EagleConfig(NamedTuple):
    """The nested `eagle_config` of ModelOpt, SpecForge and their descendants.

    `layer_ids`: as stated, numbering layer outputs. The norms are those of layer 0's hidden state and of the output;
    `paired_norms` those of embedding and hidden state before EAGLE-1's `fc`. None: not stated.
    """

    layer_ids: object
    use_aux_hidden_state: bool
    norm_before_fc: bool
    first_norm: bool | None
    last_norm: bool | None
    paired_norms: bool | None


def read_eagle_config(facts: Facts) -> EagleConfig:
    """The nested `eagle_config`. Raises `FormatError` for keys whose effect is unknown."""
    nested = facts.mapping("eagle_config") or {}
    if facts.optional("next_layer_regular", bool, inside=nested) is False:
        raise FormatError("eagle_config.next_layer_regular is false, a variant that no engine runs")
    nested.pop("next_layer_regular", None)
    for key in sorted(PARALLEL_HEADS & nested.keys()):
        facts.dropped[f"eagle_config.{key}"] = "their tensors, where there are any, are dropped with a reason"
        del nested[key]
    flags = {
        key: facts.optional(key, bool, inside=nested)
        for key in (
            "use_aux_hidden_state",
            "norm_before_fc",
            "use_input_layernorm_in_first_layer",
            "use_last_layernorm",
            "use_mtp_layernorm",
        )
    }
    layer_ids = nested.pop(IDS, None)
    if layer_ids and flags["use_aux_hidden_state"] is False:
        raise FormatError(f"{NESTED_IDS} is {layer_ids!r}, and use_aux_hidden_state is false")
    facts.refuse_unknown({f"eagle_config.{key}": value for key, value in nested.items() if key not in flags})
    return EagleConfig(
        layer_ids=layer_ids or None,
        use_aux_hidden_state=flags["use_aux_hidden_state"] is not False,
        norm_before_fc=flags["norm_before_fc"] is True,
        first_norm=flags["use_input_layernorm_in_first_layer"],
        last_norm=flags["use_last_layernorm"],
        paired_norms=flags["use_mtp_layernorm"],
    )


def read_aux_layer_ids(
    view: Checkpoint, facts: Facts, target: TargetFacts | None, target_hidden: int, nested: EagleConfig
) -> tuple[int, ...] | None:
    """The captured layers in convention S; None when the draft reads the last hidden state, or they are missing.

    The top-level key says it in convention S; the nested one numbers layer *outputs*, one less. Without either, the
    reference's 2, N//2, N−3 of the target hold.
    """
    top = facts.integers(IDS)
    facts.drop("num_aux_hidden_states", "the columns of fc tell")
    facts.drop("num_aux_layers", "the columns of fc tell")
    if not nested.use_aux_hidden_state:
        facts.record("aux_layer_ids", "None", "stated", "use_aux_hidden_state is false: the last hidden state")
        return None
    _, columns = view.matrix("fc.weight")
    count, rest = divmod(columns, target_hidden)
    if rest or not count:
        raise FormatError(
            f"fc.weight has {columns} columns, no multiple of the target's width {target_hidden}",
            where=view.source.path,
            hint="target_hidden_size in config.json may be missing or wrong",
        )
    if top is not None:
        ids: tuple[int, ...] | None = top
        facts.record("aux_layer_ids", str(list(top)), "stated", key=IDS)
    elif nested.layer_ids is not None:
        ids = _nested_ids(facts, target, nested)
    elif target is not None and count == 3:
        ids = _default_ids(view, facts, target)
    else:
        hint = (
            f"fc.weight has {columns} columns, {count} states of {target_hidden}: pass --set aux_layer_ids= with "
            f"{count} layers, or correct target_hidden_size"
        )
        hint = "pass --target, so that they can be computed from its number of layers" if count == 3 else hint
        given = facts.require("aux_layer_ids", hint)
        given = [given] if isinstance(given, int) else given
        ids = None if given is None else facts.as_integers("aux_layer_ids", given)
    if ids is not None and len(ids) != count:
        raise FormatError(
            f"{len(ids)} captured layers are named, {list(ids)}, and fc.weight reads {count}",
            where=view.source.path,
            hint="set the right ones with --set aux_layer_ids=…",
        )
    return ids


def _nested_ids(facts: Facts, target: TargetFacts | None, nested: EagleConfig) -> tuple[int, ...]:
    """The states after the layers whose outputs `eagle_config` numbers.

    Some NVIDIA files number states there (sgl-project/sglang #32334), which an output beyond the last layer gives away.
    """
    said = facts.as_integers(NESTED_IDS, nested.layer_ids)
    if target is not None and max(said) == target.num_hidden_layers:
        note = f"eagle_config says {list(said)}: states, as layer {max(said)} has no output"
        facts.record("aux_layer_ids", str(list(said)), "stated", note, NESTED_IDS)
        return said
    ids = tuple(i + 1 for i in said)
    note = f"eagle_config says {list(said)}: layer outputs"
    facts.record("aux_layer_ids", str(list(ids)), "stated", note, NESTED_IDS)
    return ids


def _default_ids(view: Checkpoint, facts: Facts, target: TargetFacts) -> tuple[int, ...]:
    ids = target.default_aux_layer_ids()
    if list(ids) != sorted(set(ids)):
        raise TargetError(
            f"{target.name} has {target.num_hidden_layers} layers, too few for the three that EAGLE-3 captures",
            where=view.source.path,
            expected="at least 7",
            hint="pass the target that the draft was trained for with --target",
        )
    facts.record("aux_layer_ids", str(list(ids)), "from target", f"2, N//2, N-3 for N = {target.num_hidden_layers}")
    return ids
