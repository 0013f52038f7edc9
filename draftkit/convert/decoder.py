"""Decoder facts of the EAGLE formats, read from a flat Llama-style config and from tensor shapes."""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.errors import FormatError, TargetError
from draftkit.layout.spec import Decoder, Rope
from draftkit.layout.target import TargetFacts


def read_decoder(checkpoint: Checkpoint, facts: Facts, prefix: str, num_layers: int) -> Decoder:
    """The decoder of a draft whose first layer's tensors begin with `prefix` (`layers.0.`, `midlayer.`).

    Biases, head width and the number of layers follow from the tensors, because published configs misstate them.
    """
    hidden = facts.stated("hidden_size", int)
    heads = facts.stated("num_attention_heads", int)
    if hidden <= 0 or heads <= 0:
        raise FormatError("hidden_size and num_attention_heads must be positive", where=checkpoint.source.path)
    rows, _ = checkpoint.matrix(f"{prefix}self_attn.q_proj.weight")
    stated_layers = facts.stated_or("num_hidden_layers", int, num_layers, "counted in the tensor names")
    if stated_layers != num_layers:
        facts.record("num_hidden_layers", num_layers, "from tensors", f"the config says {stated_layers}")
    stated_head = facts.stated_or("head_dim", int, rows // heads, "rows of q_proj / heads")
    if stated_head != rows // heads:
        facts.record("head_dim", rows // heads, "from tensors", f"the config says {stated_head}")
    return Decoder(
        hidden_size=hidden,
        intermediate_size=facts.stated("intermediate_size", int),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=facts.stated_or("num_key_value_heads", int, heads, "absent means one per query head"),
        head_dim=rows // heads,
        hidden_act=facts.stated_or("hidden_act", str, "silu", "the reference's activation"),
        rms_norm_eps=facts.stated_or("rms_norm_eps", float, 1e-6, "default of the reference's config class"),
        qkv_bias=_has(checkpoint, facts, "qkv_bias", f"{prefix}self_attn.q_proj.bias"),
        output_bias=_has(checkpoint, facts, "output_bias", f"{prefix}self_attn.o_proj.bias"),
        mlp_bias=_has(checkpoint, facts, "mlp_bias", f"{prefix}mlp.gate_proj.bias"),
        qk_norm=False,
        sliding_window=None,
        rope=read_rope(facts),
    )


def read_rope(facts: Facts) -> Rope:
    """Rope facts. A config without `rope_theta` means base 10000, whatever the target uses (formats.md 1.2, 5.2)."""
    scaling = facts.mapping("rope_scaling")
    parameters = facts.mapping("rope_parameters")
    merged = dict(scaling or {}) | dict(parameters or {})
    nested = merged.pop("rope_theta", None)
    base = facts.stated_or(
        "rope_theta", float, float(str(nested)) if nested is not None else 10000.0,
        "stated in rope_parameters" if nested is not None else "the reference's default; the target's base is not used",
    )  # fmt: skip
    declared = base if nested is not None or facts.found[-1].origin == "stated" else None
    if "type" in merged:
        merged.setdefault("rope_type", merged.pop("type"))
    kind = merged.get("rope_type", "default")
    facts.record("rope_scaling", str(kind), "stated" if merged else "format default", "" if merged else "none given")
    return Rope(
        base=base,
        declared_base=declared,
        scaling=None if kind == "default" else merged,
        max_position_embeddings=facts.stated_or("max_position_embeddings", int, 2048, "the reference's default"),
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


def _has(checkpoint: Checkpoint, facts: Facts, name: str, tensor: str) -> bool:
    facts.drop(name, "the tensors tell which projections have a bias")
    return facts.record(name, tensor in checkpoint.tensors, "from tensors", f"{tensor} present or not")
