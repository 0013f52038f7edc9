"""Decoder facts of the EAGLE formats, read from a flat Llama-style config and from tensor shapes."""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.rope import RopeSource, read_rope
from draftkit.errors import FormatError, TargetError
from draftkit.layout.decoder import Decoder
from draftkit.layout.target import TargetFacts

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


def read_decoder(
    checkpoint: Checkpoint,
    facts: Facts,
    prefix: str,
    num_layers: int,
    rope: RopeSource = "reference",
    windows: bool = True,
) -> Decoder:
    """The decoder of a draft whose first layer's tensors begin with `prefix`.

    Biases, head width and the number of layers follow from the tensors, because published configs misstate them.
    `windows`: whether `layer_types` are the draft's, and not the target's.
    """
    hidden = facts.size("hidden_size")
    heads = facts.size("num_attention_heads")
    rows, _ = checkpoint.matrix(f"{prefix}self_attn.q_proj.weight")
    drop_unread(facts)
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
        qk_norm=facts.record("qk_norm", f"{prefix}self_attn.q_norm.weight" in checkpoint.tensors, "from tensors"),
        sliding_window=_sliding_window(facts, num_layers, windows),
        rope=read_rope(facts, rope),
    )


def drop_unread(facts: Facts) -> None:
    """Account for the keys that a trainer copied from the target's config."""
    for reason, keys in UNREAD.items():
        for key in keys:
            facts.drop(key, reason)


def _sliding_window(facts: Facts, num_layers: int, own: bool) -> int | None:
    """The window of drafts whose `layer_types` name sliding layers; without that key no engine reads the window."""
    kinds = (facts.names("layer_types") if own else None) or ()
    if "sliding_attention" not in kinds[:num_layers]:
        for key in ("layer_types", "sliding_window", "use_sliding_window"):
            facts.drop(key, "no layer of the draft has a window")
        facts.record("sliding_window", "None", "stated" if kinds else "format default", "no layer has a window")
        return None
    window = facts.optional("sliding_window", int)
    facts.drop("use_sliding_window", "layer_types tells")
    if window is None or set(kinds[:num_layers]) != {"sliding_attention"}:
        raise FormatError(f"layer_types are {list(kinds)} with sliding_window {window}: layers must agree on a window")
    note = "" if len(kinds) == num_layers else f"layer_types names {len(kinds)} layers, and there are {num_layers}"
    return facts.record("sliding_window", window, "stated", note)


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
