"""Decoder facts of drafts, read from a flat Llama-style config and from tensor shapes.

Rotary position embedding is read as a trainer has used it, which is not always what its config says.
"""

from __future__ import annotations

from typing import Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.errors import FormatError
from draftkit.layout.architecture import Rope
from draftkit.layout.decoder import Decoder

# Where a trainer takes the rope base from. `config`: the config, 10000 without one. `reference`: the same, but always
# 10000 beside linear or dynamic scaling (SafeAILab). `multimodal`: 10000, but for multimodal rope (AngelSlim).
# `unscaled`: as `config`, with no kind of scaling (SpecForge's P-EAGLE).
RopeSource = Literal["config", "reference", "multimodal", "unscaled"]
SCALED = ("linear", "dynamic")  # kinds whose formula has nothing but a factor
SCALED_KEYS = {"rope_type", "factor", "original_max_position_embeddings"}
MULTIMODAL = "mrope_section"  # rope over three positions of a token; they are equal, and it is plain rope, for text

# Keys that trainers copy from the target's config, and that no draft class of the family reads.
UNREAD = {
    "names the target's kind": ("modal_type", "norm_type", "pool_type", "target_model_type"),
    "about a mixture of experts, which the draft is not": (
        "decoder_sparse_step",
        "num_experts_per_tok",
        "num_local_experts",
        "output_router_logits",
        "router_aux_loss_coef",
    ),
    "a token of the target": (
        "eod_token_id",
        "im_end_id",
        "im_newline_id",
        "im_start_id",
        "image_end_token_id",
        "image_newline_token_id",
        "image_start_token_id",
        "image_token_id",
        "mask_init_id",
        "pad_id",
        "sep_token_id",
        "text_end_id",
        "text_start_id",
        "video_token_id",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    ),
    "an option of the target's layers, which the draft's do not have": (
        "add_classification_head",
        "attention_head_dim",
        "cla_share_factor",
        "class_num",
        "dense_list",
        "max_sequence_length",
        "max_window_layers",
        "org_vocab_size",
        "use_cla",
        "use_mrope",
        "use_qk_norm",
        "use_rotary_pos_emb",
    ),
}


KINDS = {"full_attention", "sliding_attention"}
Windows = tuple[int | None, tuple[int, ...]]  # the window, and the layers without one where others have it


def read_decoder(
    checkpoint: Checkpoint,
    facts: Facts,
    prefix: str,
    num_layers: int,
    rope: RopeSource = "reference",
    windows: Windows | None = None,
) -> Decoder:
    """The decoder of a draft whose first layer's tensors begin with `prefix`.

    Biases, head width and the number of layers follow from the tensors, because published configs misstate them.
    `windows`: as read already, or those that `layer_types` name.
    """
    hidden = facts.size("hidden_size")
    heads = facts.size("num_attention_heads")
    rows, _ = checkpoint.matrix(f"{prefix}self_attn.q_proj.weight")
    drop_unread(facts)
    sliding_window, full_attention_layers = windows or read_windows(facts, num_layers)
    return Decoder(
        hidden_size=hidden,
        intermediate_size=facts.size("intermediate_size"),
        num_hidden_layers=facts.from_tensors("num_hidden_layers", num_layers, "counted in the tensor names"),
        num_attention_heads=heads,
        num_key_value_heads=facts.size("num_key_value_heads", heads, "absent means one per query head"),
        head_dim=facts.from_tensors("head_dim", rows // heads, "rows of q_proj / heads"),
        hidden_act=facts.stated_or("hidden_act", str, "silu", "the reference's activation"),
        rms_norm_eps=facts.stated_or("rms_norm_eps", float, 1e-6, "default of the reference's config class"),
        qkv_bias=has_bias(checkpoint, facts, "qkv_bias", f"{prefix}self_attn.q_proj.bias"),
        output_bias=has_bias(checkpoint, facts, "output_bias", f"{prefix}self_attn.o_proj.bias"),
        mlp_bias=has_bias(checkpoint, facts, "mlp_bias", f"{prefix}mlp.gate_proj.bias"),
        qk_norm=facts.record("qk_norm", f"{prefix}self_attn.q_norm.weight" in checkpoint.tensors, "from tensors"),
        sliding_window=sliding_window,
        full_attention_layers=full_attention_layers,
        rope=read_rope(facts, rope),
    )


def drop_unread(facts: Facts) -> None:
    """Account for the keys that a trainer copied from the target's config."""
    for reason, keys in UNREAD.items():
        for key in keys:
            facts.drop(key, reason)


def read_windows(facts: Facts, num_layers: int, *, own: bool = True, width: int | None = None) -> Windows:
    """The window of drafts whose `layer_types` name sliding layers, and the layers without; without that key no engine
    reads the window.

    `own`: whether `layer_types` are the draft's, and not the target's. `width`: the window, where another key than
    `sliding_window` states it.
    """
    named = (facts.names("layer_types") if own else None) or ()
    kinds = named[:num_layers]
    if "sliding_attention" not in kinds:
        for key in ("layer_types", "sliding_window", "use_sliding_window"):
            facts.drop(key, "no layer of the draft has a window")
        facts.record("sliding_window", "None", "stated" if named else "format default", "no layer has a window")
        return None, ()
    window = facts.optional("sliding_window", int) if width is None else width
    facts.drop("use_sliding_window", "layer_types tells")
    if window is None or len(kinds) < num_layers or not set(kinds) <= KINDS:
        raise FormatError(
            f"layer_types are {list(named)} with sliding_window {window}",
            expected=f"{' or '.join(sorted(KINDS))} for each of {num_layers} layers, and a window",
        )
    note = "" if len(named) == num_layers else f"layer_types names {len(named)} layers, and there are {num_layers}"
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    if full:
        facts.record("full_attention_layers", str(list(full)), "stated", "layer_types")
    return facts.record("sliding_window", window, "stated", note), full


def has_bias(checkpoint: Checkpoint, facts: Facts, name: str, tensor: str, key: str | None = None) -> bool:
    """Whether a bias is among the tensors, as fact `name`; a config `key` that has a say elsewhere is only noted."""
    key = key or name
    said = f"; config {key}: {checkpoint.config[key]}" if key in checkpoint.config else ""
    facts.drop(key, f"{tensor} itself tells")
    present = tensor in checkpoint.tensors
    return facts.record(name, present, "from tensors", f"the file has {'' if present else 'no '}{tensor}{said}")


def read_rope(facts: Facts, source: RopeSource = "reference") -> Rope:
    """Rope facts, with the base that a trainer which follows `source` has used. The target's plays no part."""
    scaling = dict(facts.mapping("rope_scaling") or {}) | dict(facts.mapping("rope_parameters") or {})
    nested = facts.optional("rope_theta", float, inside=scaling)
    stated = facts.optional("rope_theta", float)
    declared = nested if stated is None else stated
    scaling.pop("rope_theta", None)
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    kind = scaling.get("rope_type", "default")
    _check_scaling(facts, scaling)
    ignored = (source == "reference" and kind in SCALED) or (source == "multimodal" and MULTIMODAL not in scaling)
    if declared is not None and not ignored:
        base = facts.record("rope_theta", declared, "stated")
    else:
        said = "nothing" if declared is None else declared
        base = facts.record("rope_theta", 10000.0, "format default", f"the trainer's base; the config says {said}")
    if source == "unscaled" and kind != "default":
        facts.record("rope_scaling", "default", "format default", f"the config says {kind}, and its trainer ignores it")
        for key in ("rope_scaling", "rope_parameters"):
            facts.drop(key, "the trainer ignores it")
        scaling = {}
    else:
        note = _without_effect(scaling) if scaling else "none given"
        facts.record("rope_scaling", str(kind), "stated" if scaling else "format default", note)
    return Rope(
        base=base,
        declared_base=declared,
        scaling=_effective_scaling(scaling),
        max_position_embeddings=facts.size("max_position_embeddings", 2048, "the reference's default"),
    )


def _check_scaling(facts: Facts, scaling: dict[str, object]) -> None:
    """Raise `FormatError` for parameters that are missing, or that the layout cannot say."""
    if scaling.get("rope_type") in SCALED:
        facts.need("factor", scaling)
    if scaling.get("rope_type") == "mrope" and MULTIMODAL not in scaling:
        raise FormatError(f"rope_scaling is mrope without {MULTIMODAL}")
    if facts.optional("partial_rotary_factor", float, inside=scaling) not in (None, 1.0):
        raise FormatError("rope turns a part of each head only (partial_rotary_factor), which the layout cannot say")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise FormatError(f"rope has different parameters for {', '.join(scaling)}: the layers of a draft must agree")


def _without_effect(scaling: dict[str, object]) -> str:
    """The rope parameters without effect, which `_effective_scaling` leaves out, in words."""
    kept = _effective_scaling(scaling) or {}
    left_out = [f"{key} {value!r}" for key, value in scaling.items() if key not in kept and key != "rope_type"]
    return f"without effect: {', '.join(left_out)}" if left_out else ""


def _effective_scaling(scaling: dict[str, object]) -> dict[str, object] | None:
    """The rope parameters that enter the formula, in the spelling of transformers 5; None for plain rope."""
    kind = scaling.get("rope_type", "default")
    if kind in SCALED:
        return {key: value for key, value in scaling.items() if key in SCALED_KEYS}
    if kind == "mrope":
        return scaling | {"rope_type": "default"}
    return scaling if kind != "default" or scaling.keys() - {"rope_type"} else None
