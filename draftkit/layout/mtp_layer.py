"""The tensors of a multi-token prediction head, with the shapes that its target's configuration gives them.

Of the kinds that draftkit runs, whose decoder layers are those of the target in transformers 5.23 (`modeling_*.py`). A
size that a configuration leaves to its class is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from draftkit.errors import LayoutError
from draftkit.layout.mtp import HeadKind, HeadParts
from draftkit.layout.target import language_model

Sizes = tuple[int | None, ...]
MAX_EXPERTS = 1 << 14

# For the modules beside the experts: the key that says whether there is any, and what it is called.
SHARED = {
    "n_shared_experts": "mlp.shared_experts",
    "num_shared_experts": "mlp.shared_mlp",
    "shared_expert_intermediate_size": "mlp.shared_expert",
}
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
FUSED = "mlp.experts.gate_up_proj"  # of all experts, as some checkpoints have them
ROUTERS = ("mlp.router.gate.weight", "mlp.gate.weight")


def shapes_around(parts: HeadParts, hidden_size: int) -> dict[str, Sizes]:
    """The shapes of what lies around a head's decoder layer: three norms and a projection of both halves."""
    norms = (parts.embedding_norm, parts.hidden_norm, parts.final_norm)
    shapes: dict[str, Sizes] = {f"{norm}.weight": (hidden_size,) for norm in norms}
    return shapes | {f"{parts.projection}.weight": (hidden_size, 2 * hidden_size)}


def shapes_of_layer(kind: HeadKind, config: Mapping[str, object], found: Collection[str]) -> dict[str, Sizes]:
    """The sizes of a head's decoder layer, by the names after its prefix; None for a size that is not known.

    `found`: what it has, which tells a layer with experts, and how they lie. Raises `LayoutError` for sizes that are
    none.
    """
    sizes = _LayerSizes(language_model(config))
    hidden = sizes.of("hidden_size")
    shapes: dict[str, Sizes] = {f"{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    attention = sizes.latent_attention() if sizes.of("kv_lora_rank") else sizes.attention(kind)
    shapes |= {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    if any(name.startswith("mlp.experts.") for name in found):
        shapes |= dict(sizes.experts(kind, found))
    else:
        shapes |= dict(_mlp("mlp", hidden, sizes.of("intermediate_size")))
    biased = kind.qkv_bias or sizes.text.get("attention_bias") is True
    with_bias = {f"self_attn.{name}_proj" for name in "qkv"} if biased else set()
    with_bias |= {name.removesuffix(".bias") for name in found if name.endswith(".bias")}
    biases = {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in with_bias if f"{name}.weight" in shapes}
    return shapes | dict(sorted(biases.items()))


class _LayerSizes:
    """The sizes that a language model's configuration states."""

    def __init__(self, text: Mapping[str, object]):
        self.text = text

    def of(self, *keys: str) -> int | None:
        """The first of these keys that is stated. Raises `LayoutError` for a value that is no size."""
        key = next((key for key in keys if self.text.get(key) is not None), None)
        value = None if key is None else self.text[key]
        if value is not None and (type(value) is not int or value < 0):
            raise LayoutError(f"the target's {key} is {value!r}", expected="a size")
        return value or None

    def attention(self, kind: HeadKind) -> dict[str, Sizes]:
        hidden, heads, width = self.of("hidden_size"), self.of("num_attention_heads"), self.of("head_dim")
        if width is None and kind.divided and hidden and heads:
            width = hidden // heads
        queries, keys = _times(heads, width), _times(self.of("num_key_value_heads", "num_attention_heads"), width)
        gates = 2 if kind.gated and self.text.get("attn_output_gate") is not False else 1
        normed = kind.qk_norm or self.text.get("use_qk_norm") is True
        shapes: dict[str, Sizes] = {
            "q_proj": (_times(queries, gates), hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
        }
        return shapes | ({"q_norm": (width,), "k_norm": (width,)} if normed else {})

    def latent_attention(self) -> dict[str, Sizes]:
        hidden, heads, rank = self.of("hidden_size"), self.of("num_attention_heads"), self.of("kv_lora_rank")
        plain, turned, values = (self.of(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        queries, ranked = _times(heads, _plus(plain, turned)), self.of("q_lora_rank")
        shapes: dict[str, Sizes] = {
            "kv_a_proj_with_mqa": (_plus(rank, turned), hidden),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (_times(heads, _plus(plain, values)), rank),
            "o_proj": (hidden, _times(heads, values)),
        }
        if ranked is None:
            return shapes | {"q_proj": (queries, hidden)}
        return shapes | {"q_a_proj": (ranked, hidden), "q_a_layernorm": (ranked,), "q_b_proj": (queries, ranked)}

    def experts(self, kind: HeadKind, found: Collection[str]) -> Iterator[tuple[str, Sizes]]:
        hidden, width = self.of("hidden_size"), self.of("moe_intermediate_size")
        count = self.of("n_routed_experts", "num_experts")
        if count is not None and count > MAX_EXPERTS:
            raise LayoutError(f"the target has {count} experts", expected=f"up to {MAX_EXPERTS:,}")
        yield next((name for name in ROUTERS if name in found), ROUTERS[-1]), (count, hidden)
        if kind.routing_bias is not None:
            yield kind.routing_bias, (count,)
        if FUSED in found:
            yield FUSED, (count, _times(width, 2), hidden)
            yield "mlp.experts.down_proj", (count, hidden, width)
        else:
            numbers = {int(match[1]) for name in found if (match := EXPERT.match(name))}
            for number in sorted(numbers) if count is None else range(count):
                yield from _mlp(f"mlp.experts.{number}", hidden, width)
        for key, module in SHARED.items():
            if (stated := self.of(key)) is not None:
                yield from _mlp(module, hidden, stated if key.endswith("_size") else _times(stated, width))
                if key.endswith("_size"):
                    yield f"{module}_gate.weight", (1, hidden)


def _mlp(module: str, hidden: int | None, width: int | None) -> Iterator[tuple[str, Sizes]]:
    for part in ("gate_proj", "up_proj"):
        yield f"{module}.{part}.weight", (width, hidden)
    yield f"{module}.down_proj.weight", (hidden, width)


def _times(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
