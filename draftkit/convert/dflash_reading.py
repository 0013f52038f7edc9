"""Reading block drafters: DFlash, DSpark and their relatives, which several trainers write with small differences.

A format module states its differences as a `BlockLayout`; names, shapes and heads are shared (z-lab/dflash `model.py`,
deepseek-ai/DeepSpec `modeling/dspark`, vLLM 0.32 `qwen3_dflash.py`, `qwen3_dspark.py`, `qwen3_dflash2.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.decoder_reading import read_decoder
from draftkit.convert.eagle_reading import Owner, with_unified_names
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.convert.quantization import read_quantization
from draftkit.convert.vocabulary_map import read_vocabulary_map, with_map
from draftkit.errors import FormatError
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.dflash import BlockConvolution, CandidateSelector, DFlashSpec, MarkovHead
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, default_block_layer_ids

NESTED = "dflash_config"
Slots = Literal["fill-in", "anchor-first"]
MarkovType = Literal["vanilla", "gated", "rnn"]
Confidence = Literal["none", "hidden", "hidden_and_token"]
SLOTS: tuple[Slots, ...] = ("fill-in", "anchor-first")
OUTPUTS, STATES = ("target_layer_ids",), ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
UNREAD = {
    "num_anchors": "used in training only",
    "num_target_layers": "the target tells",
    "dflash_block_size": "used in training only",
    "sample_from_anchor": "the slots",
    "dspark_bonus_anchor": "the slots",
    "speculative_algorithm": "names the method",
}


@dataclass(frozen=True)
class BlockLayout:
    """What one trainer's files mean where the layouts share their names.

    - `name`: the format. `renames`: the beginnings of its tensor names → those of the unified layout.
    - `slots`: the convention of its files that do not state one, None where they may have either.
    - `last_state`: which state its trainer reads after the target's last layer.
    """

    name: str
    slots: Slots | None
    last_state: Literal["before_norm", "after_norm"]
    renames: Mapping[str, str] = field(default_factory=dict)


def plan_block_draft(
    checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None, layout: BlockLayout, causal: bool | None = None
) -> Plan:
    """Plan the conversion of a block drafter, whose config keys stand side by side (`Facts.lift`).

    `causal`: what the layout says of rows and later rows of their block, in all layers; None: what the config says.
    """
    view = with_unified_names(checkpoint, layout.renames)
    decoder = read_decoder(view, facts, "layers.0.", view.count_layers(), "config")
    vocab_size = facts.size("vocab_size")
    draft_vocab_size = facts.size("draft_vocab_size", _rows_of_head(view, vocab_size), "rows of the head")
    target_hidden = facts.size("target_hidden_size", decoder.hidden_size, "absent means the draft's width")
    if target is not None:
        checkpoint.check_target(target, hidden_size=target_hidden, vocab_size=vocab_size)
    num_layers = facts.optional("num_target_layers", int) if target is None else target.num_hidden_layers
    aux_layer_ids = _aux_layer_ids(view, facts, target_hidden, decoder.num_hidden_layers, num_layers)
    vocabulary_map = read_vocabulary_map(view, facts, vocab_size, draft_vocab_size)
    block_size = facts.size("block_size")
    slots = _slots(facts, layout)
    mask = _mask_token(facts)
    causal_layers = _causal_layers(facts, decoder, causal)
    markov = _markov(view, facts)
    confidence = _confidence(view, facts, decoder, markov)
    convolution, selector = _dflash2(view, facts)
    quantization = read_quantization(checkpoint, facts)
    sinks = facts.record("attention_sinks", "layers.0.self_attn.attention_sink_bias" in view.tensors, "from tensors")
    facts.drop("attention_sink_bias", "the tensors tell")
    facts.drop("add_swa_attention_sink_bias", "the tensors tell")
    value_scale = facts.stated_or("attention_value_scale", float, 1.0, "none", "value_scale")
    last_state = layout.last_state if num_layers in aux_layer_ids else "before_norm"
    facts.record("last_state", last_state, "format default", "of the target, where it is read: what its trainer reads")
    own_mask = facts.record("mask_embedding", "mask_embedding" in view.tensors, "from tensors")
    scales = {
        "embedding_scale": facts.stated_or("input_embedding_scale", float, 1.0, "none", "embedding_scale"),
        "logit_scale": _logit_scale(facts, selector),
        "logit_softcap": facts.stated_or("final_logit_softcapping", float, 0.0, "none", "logit_softcap"),
    }
    embed_tokens, lm_head = (_owner(view, facts, name) for name in ("embed_tokens", "lm_head"))
    if facts.optional("is_neox_style", bool) is False or facts.optional("rope_is_neox_style", bool) is False:
        raise FormatError(
            "the draft turns pairs of neighboring features (is_neox_style false), which draftkit cannot run",
            where=checkpoint.config_path,
        )
    facts.drop("has_own_lm_head", "the tensors tell")
    for key, reason in UNREAD.items():
        facts.drop(key, reason)
    spec = None
    if not facts.missing:
        assert mask is not None
        assert slots is not None
        architecture = DFlashSpec(
            decoder=decoder,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target_hidden,
            aux_layer_ids=aux_layer_ids,
            last_state=last_state,
            slots=slots,
            block_size=block_size,
            parallel=ParallelDrafting(mask_token_id=mask, mask_state=False),
            mask_embedding=own_mask,
            causal_layers=causal_layers,
            window_rule="row",
            attention_sinks=sinks,
            value_scale=value_scale,
            markov=markov,
            confidence=confidence,
            convolution=convolution,
            selector=selector,
            embed_tokens=embed_tokens,
            lm_head=lm_head,
            **scales,
        )
        spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint), quantization=quantization)
    moves = with_map(_moves(view, vocab_size == draft_vocab_size), view, vocabulary_map)
    return make_plan(layout.name, checkpoint, facts, spec, moves)


def _aux_layer_ids(
    view: Checkpoint, facts: Facts, target_hidden: int, num_draft_layers: int, num_layers: int | None
) -> tuple[int, ...]:
    """The captured layers in convention S. `target_layer_ids` number layer outputs, one less, −1 the embedding's.

    Raises `FormatError` where `fc` reads another number of states.
    """
    states = next((ids for key in STATES if (ids := facts.integers(key)) is not None), None)
    outputs = next((ids for key in OUTPUTS if (ids := facts.integers(key)) is not None), None)
    if states is not None:
        ids = states
        facts.record("aux_layer_ids", str(list(ids)), "stated", "states before the layers of these numbers")
    elif outputs is not None:
        ids = tuple(i + 1 for i in outputs)
        facts.record("aux_layer_ids", str(list(ids)), "stated", f"the outputs of layers {list(outputs)}")
    elif num_layers is not None:
        ids = default_block_layer_ids(num_layers, num_draft_layers)
        note = f"the reference's layers of {num_layers} for a draft of {num_draft_layers}"
        facts.record("aux_layer_ids", str(list(ids)), "from target", note)
    else:
        given = facts.require("aux_layer_ids", "pass --target, so that they can be computed from its number of layers")
        ids = () if given is None else facts.as_integers("aux_layer_ids", given if isinstance(given, list) else [given])
    _, columns = view.matrix("fc.weight")
    if ids and columns != target_hidden * len(ids):
        raise FormatError(
            f"{len(ids)} captured layers are named, {list(ids)}, and fc.weight has {columns} columns, "
            f"{columns / target_hidden:g} states of {target_hidden}",
            where=view.source.path,
            hint="set the right ones with --set aux_layer_ids=…, or correct target_hidden_size",
        )
    return ids


def _slots(facts: Facts, layout: BlockLayout) -> Slots | None:
    """Whether rows predict their own token or the next one: as stated, as the layout has it, or as the user says."""
    stated = facts.optional("sample_from_anchor", bool)
    bonus = facts.optional("dspark_bonus_anchor", bool)
    if stated is None and bonus is not None:
        stated = not bonus
    if stated is not None:
        facts.record("slots", SLOTS[stated], "stated", "config sample_from_anchor")
        return SLOTS[stated]
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


def _causal_layers(facts: Facts, decoder: Decoder, causal: bool | None) -> tuple[int, ...]:
    """The layers in which a row does not see later rows of its block: as stated for all, else those with a window."""
    stated = facts.optional("is_causal", bool)
    nested = facts.optional("causal", bool)
    said = next((value for value in (causal, stated, nested) if value is not None), None)
    layers = tuple(range(decoder.num_hidden_layers))
    if said is None:
        found = tuple(layer for layer, window in enumerate(decoder.windows) if window is not None)
        facts.record("causal_layers", str(list(found)), "format default", "those with a window")
        return found
    found = layers if said else ()
    facts.record("causal_layers", str(list(found)), "stated", f"all layers are {'' if said else 'not '}causal")
    return found


def _markov(view: Checkpoint, facts: Facts) -> MarkovHead | None:
    """DSpark's head by its tensors, which tell rank and type."""
    rank, kind = facts.optional("markov_rank", int), facts.optional("markov_head_type", str)
    if "markov_head.markov_w1.weight" not in view.tensors:
        if rank:
            raise FormatError(
                f"config.json has a Markov head of rank {rank}, and markov_head.markov_w1.weight is missing",
                where=view.source.path,
                hint="fetch the checkpoint again",
            )
        facts.record("markov", "None", "from tensors", "the file has no Markov head")
        return None
    types: dict[str, MarkovType] = {"gate_proj": "gated", "joint_proj": "rnn"}
    present = (name for part, name in types.items() if f"markov_head.{part}.weight" in view.tensors)
    found: MarkovType = next(present, "vanilla")
    if kind is not None and kind.lower() != found:
        raise FormatError(f"markov_head_type is {kind}, and the tensors are those of {found}", where=view.source.path)
    _, columns = view.matrix("markov_head.markov_w1.weight")
    facts.record("markov_type", found, "from tensors")
    return MarkovHead(markov_type=found, markov_rank=facts.record("markov_rank", columns, "from tensors"))


def _confidence(view: Checkpoint, facts: Facts, decoder: Decoder, markov: MarkovHead | None) -> Confidence:
    for key in ("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"):
        facts.drop(key, "the tensors tell")
    found: Confidence = "none"
    if "confidence_head.proj.weight" in view.tensors:
        _, columns = view.matrix("confidence_head.proj.weight")
        reads_token = markov is not None and columns == decoder.hidden_size + markov.markov_rank
        found = "hidden_and_token" if reads_token else "hidden"
    facts.record("confidence", found, "from tensors")
    return found


def _dflash2(view: Checkpoint, facts: Facts) -> tuple[BlockConvolution | None, CandidateSelector | None]:
    convolution = selector = None
    if "layers.0.attention_conv.base_kernel" in view.tensors:
        taps = view.shape("layers.0.attention_conv.base_kernel")[1]
        convolution = BlockConvolution(
            conv_taps=facts.measured("conv_kernel_size", taps, "rows of base_kernel"),
            conv_group_size=facts.size("conv_group_size"),
        )
    if "candidate_selector.predecessor_codebook" in view.tensors:
        _, rank = view.matrix("candidate_selector.predecessor_codebook")
        selector = CandidateSelector(
            selector_rank=facts.measured("selector_rank", rank, "columns of the codebooks"),
            selector_top_k=facts.size("selector_top_k"),
        )
    return convolution, selector


def _logit_scale(facts: Facts, selector: CandidateSelector | None) -> float:
    """DFlash2 has a name of its own for it, and engines do not read the other one there."""
    if selector is None:
        return facts.stated_or("logit_scale", float, 1.0, "none")
    facts.drop("logit_scale", "DFlash2 has output_multiplier")
    return facts.stated_or("output_multiplier", float, 1.0, "none", "logit_scale")


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
        drop(handle, dropped[name]) if name in dropped else copy(handle, name) for name, handle in view.tensors.items()
    ]
