"""Decoder facts of the EAGLE formats, read from a flat Llama-style config and from tensor shapes."""

from __future__ import annotations

from typing import Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.errors import FormatError, TargetError
from draftkit.layout.spec import Decoder, Rope
from draftkit.layout.target import TargetFacts

# Where a trainer takes the rope base from. `config`: the config, 10000 without one. `reference`: the same, but always
# 10000 beside linear or dynamic scaling (SafeAILab). `fixed`: 10000, whatever the config says.
RopeBase = Literal["config", "reference", "fixed"]

# What configs of other families say, and the reference's layers (SafeAILab/EAGLE `cnets1.py`, `cnets.py`) never read.
UNREAD = (
    "max_sequence_length",
    "max_window_layers",
    "num_experts_per_tok",
    "num_local_experts",
    "output_router_logits",
    "router_aux_loss_coef",
)


def read_decoder(
    checkpoint: Checkpoint, facts: Facts, prefix: str, num_layers: int, rope_base: RopeBase = "reference"
) -> Decoder:
    """The decoder of a draft whose first layer's tensors begin with `prefix` (`layers.0.`, `midlayer.`).

    Biases, head width and the number of layers follow from the tensors, because published configs misstate them.
    """
    hidden = facts.size("hidden_size")
    heads = facts.size("num_attention_heads")
    rows, _ = checkpoint.matrix(f"{prefix}self_attn.q_proj.weight")
    for key in UNREAD:
        facts.drop(key, "the reference's layers do not read it")
    return Decoder(
        hidden_size=hidden,
        intermediate_size=facts.size("intermediate_size"),
        num_hidden_layers=facts.measured("num_hidden_layers", num_layers, "counted in the tensor names"),
        num_attention_heads=heads,
        num_key_value_heads=facts.size("num_key_value_heads", heads, "absent means one per query head"),
        head_dim=facts.measured("head_dim", rows // heads, "rows of q_proj / heads"),
        hidden_act=facts.stated_or("hidden_act", str, "silu", "the reference's activation"),
        rms_norm_eps=facts.stated_or("rms_norm_eps", float, 1e-6, "default of the reference's config class"),
        qkv_bias=has_bias(checkpoint, facts, "qkv_bias", f"{prefix}self_attn.q_proj.bias"),
        output_bias=has_bias(checkpoint, facts, "output_bias", f"{prefix}self_attn.o_proj.bias"),
        mlp_bias=has_bias(checkpoint, facts, "mlp_bias", f"{prefix}mlp.gate_proj.bias"),
        qk_norm=f"{prefix}self_attn.q_norm.weight" in checkpoint.tensors,
        sliding_window=_sliding_window(facts, num_layers),
        rope=read_rope(facts, rope_base),
    )


def _sliding_window(facts: Facts, num_layers: int) -> int | None:
    """The window of drafts whose `layer_types` name sliding layers; without that key no reference reads the window."""
    kinds = facts.names("layer_types")
    window = facts.optional("sliding_window", int)
    facts.drop("use_sliding_window", "layer_types tells")
    if kinds is None or "sliding_attention" not in kinds[:num_layers]:
        return None
    if window is None or set(kinds[:num_layers]) != {"sliding_attention"}:
        raise FormatError(f"layer_types are {list(kinds)} with sliding_window {window}: layers must agree on a window")
    return facts.record("sliding_window", window, "stated")


def read_rope(facts: Facts, source: RopeBase = "reference") -> Rope:
    """Rope facts, with the base that a trainer which follows `source` has used. The target's plays no part."""
    scaling = dict(facts.mapping("rope_scaling") or {}) | dict(facts.mapping("rope_parameters") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    nested = facts.optional("rope_theta", float, inside=scaling)
    scaling.pop("rope_theta", None)
    stated = facts.optional("rope_theta", float)
    declared = nested if stated is None else stated
    kind = scaling.get("rope_type", "default")
    ignored = source == "fixed" or (source == "reference" and kind in ("linear", "dynamic"))
    if declared is not None and not ignored:
        base = facts.record("rope_theta", declared, "stated")
    else:
        said = "nothing" if declared is None else declared
        base = facts.record("rope_theta", 10000.0, "format default", f"the trainer's base; the config says {said}")
    if kind in ("linear", "dynamic"):
        facts.need("factor", scaling)
    if facts.optional("partial_rotary_factor", float, inside=scaling) not in (None, 1.0):
        raise FormatError("rope turns a part of each head only (partial_rotary_factor), which the layout cannot say")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise FormatError(f"rope has different parameters for {', '.join(scaling)}: the layers of a draft must agree")
    facts.record("rope_scaling", str(kind), "stated" if scaling else "format default", "" if scaling else "none given")
    return Rope(
        base=base,
        declared_base=declared,
        scaling=None if kind == "default" and scaling.keys() <= {"rope_type"} else scaling,
        max_position_embeddings=facts.size("max_position_embeddings", 2048, "the reference's default"),
    )


def check_target(checkpoint: Checkpoint, target: TargetFacts, *, hidden_size: int, vocab_size: int) -> None:
    """Raise `TargetError` when the draft was made for a target of other sizes."""
    problems = []
    if target.hidden_size != hidden_size:
        problems.append(f"hidden size: the draft reads {hidden_size}, the target has {target.hidden_size}")
    if target.vocab_size != vocab_size:
        problems.append(f"vocabulary: the draft has {vocab_size} tokens, the target {target.vocab_size}")
    if problems:
        raise TargetError(
            f"{checkpoint.source.name} is not a draft for {target.name}:\n    " + "\n    ".join(problems),
            where=checkpoint.source.path,
            hint="pass the target that the draft was trained for with --target",
        )


def has_bias(checkpoint: Checkpoint, facts: Facts, name: str, tensor: str, key: str | None = None) -> bool:
    """Whether a bias is among the tensors, as fact `name`; a config `key` that has a say elsewhere is only noted."""
    key = key or name
    said = f"; config {key}: {checkpoint.config[key]}" if key in checkpoint.config else ""
    facts.drop(key, f"{tensor} itself tells")
    present = tensor in checkpoint.tensors
    return facts.record(name, present, "from tensors", f"the file has {'' if present else 'no '}{tensor}{said}")
