"""The Llama-style decoder layers that drafts of several families are made of: their facts, tensors and config keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftkit.errors import FormatError, LayoutError
from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_REPEATS, Rope, check_range, check_window
from draftkit.layout.schema import Shape

# Causal LMs whose tensors follow from the config without transformers: model_type → (bias on q/k/v, q_norm and k_norm).
DENSE_MODEL_TYPES = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes and options of the decoder layers of a draft. All widths are numbers of features."""

    hidden_size: int = setting("The width of the layers' input and output.", unit="features")
    intermediate_size: int = setting("The width within the MLP.", unit="features")
    num_hidden_layers: int = setting("How many decoder layers there are.")
    num_attention_heads: int = setting("The heads of the queries.")
    num_key_value_heads: int = setting("The heads of keys and values.")
    head_dim: int = setting("The width of an attention head.", unit="features")
    hidden_act: str = setting("The activation of the MLP, as transformers names it.")
    rms_norm_eps: float = setting("What an RMSNorm adds to the mean square.")
    qkv_bias: bool = setting("Whether the projections of queries, keys and values have a bias.")
    output_bias: bool = setting("Whether the attention's output projection has a bias.")
    mlp_bias: bool = setting("Whether the projections of the MLP have a bias.")
    qk_norm: bool = setting("Whether each head's queries and keys are normed.")
    sliding_window: int | None = setting(
        "The tokens that a layer attends to, its own among them; none for all.", unit="tokens"
    )
    rope: Rope
    full_attention_layers: tuple[int, ...] = setting(
        "The layers that attend to all tokens where the others have a window.", (), later=True
    )
    sink_tokens: int = setting(
        "The first tokens of a sequence to which layers with a window attend besides.", 0, later=True, unit="tokens"
    )

    def __post_init__(self) -> None:
        check_range(self, MAX_REPEATS, "num_hidden_layers")
        check_window(self.sliding_window, self.sink_tokens)
        full = self.full_attention_layers
        sliding = set(range(self.num_hidden_layers)) - set(full)
        if full and (self.sliding_window is None or not sliding or list(full) != sorted(set(full)) or full[0] < 0):
            raise LayoutError(
                f"full_attention_layers are {list(full)} of {self.num_hidden_layers} with sliding_window "
                f"{self.sliding_window}",
                expected="layers in ascending order, besides some that have a window",
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        layers = range(self.num_hidden_layers)
        return tuple(None if layer in self.full_attention_layers else self.sliding_window for layer in layers)

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer, as transformers names it."""
        return ["full_attention" if window is None else "sliding_attention" for window in self.windows]

    @property
    def cached_numbers(self) -> int:
        """How many numbers the keys and values of one position are, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


def layer_tensors(decoder: Decoder, prefix: str, attention_input: int | None = None) -> dict[str, Shape]:
    """One Llama-style decoder layer; `attention_input` is the width that q, k and v read, H unless given."""
    h, i, d = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    queries, keys = decoder.num_attention_heads * d, decoder.num_key_value_heads * d
    wide = attention_input or h
    tensors: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, wide),
        "self_attn.k_proj.weight": (keys, wide),
        "self_attn.v_proj.weight": (keys, wide),
        "self_attn.o_proj.weight": (h, queries),
        "mlp.gate_proj.weight": (i, h),
        "mlp.up_proj.weight": (i, h),
        "mlp.down_proj.weight": (h, i),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    if decoder.qkv_bias:
        tensors |= {
            f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (queries, keys, keys), strict=True)
        }
    if decoder.output_bias:
        tensors["self_attn.o_proj.bias"] = (h,)
    if decoder.mlp_bias:
        tensors |= {"mlp.gate_proj.bias": (i,), "mlp.up_proj.bias": (i,), "mlp.down_proj.bias": (h,)}
    if decoder.qk_norm:
        tensors |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
    return {prefix + name: shape for name, shape in tensors.items()}


def layer_keys(decoder: Decoder) -> dict[str, object]:
    """The sizes of decoder layers under the names of transformers, which every config of the EAGLE family uses."""
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_hidden_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.hidden_act,
        "rms_norm_eps": decoder.rms_norm_eps,
    }


def rope_keys(rope: Rope) -> dict[str, object]:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of older engines."""
    scaling = rope.scaling or {"rope_type": "default"}
    return {
        "max_position_embeddings": rope.max_position_embeddings,
        "rope_theta": rope.base,
        "rope_scaling": rope.scaling,
        "rope_parameters": {**scaling, "rope_theta": rope.base},
    }


def decoder_of_config(config: dict[str, object]) -> Decoder:
    """Read the sizes of a dense causal LM (llama, mistral, qwen2, qwen3) from its transformers configuration.

    Raises `FormatError` naming a size that is missing or not a positive integer.
    """
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    qkv_bias, qk_norm = DENSE_MODEL_TYPES[str(config["model_type"])]
    attention_bias = bool(config.get("attention_bias", False))
    return Decoder(
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_hidden_layers=_size(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        hidden_act=str(config.get("hidden_act", "silu")),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
        sliding_window=None,
        rope=rope_of_config(config),
    )


def rope_of_config(config: dict[str, object]) -> Rope:
    """Rope facts in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""
    parameters = dict(_mapping(config.get("rope_scaling"))) | dict(_mapping(config.get("rope_parameters")))
    nested = parameters.pop("rope_theta", None)
    declared = nested if config.get("rope_theta") is None else config["rope_theta"]
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    scaling = None if parameters.get("rope_type", "default") == "default" else parameters
    base = _number({"rope_theta": declared}, "rope_theta", 10000.0)
    return Rope(
        base=base,
        declared_base=None if declared is None else base,
        scaling=scaling,
        max_position_embeddings=_size(config, "max_position_embeddings", 2048),
    )


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def check_layers(config: dict[str, object]) -> None:
    """Raise `FormatError` for a number of layers or experts that no model has: all of them will be counted off."""
    for key, value in config.items():
        if ("layer" in key or "experts" in key) and isinstance(value, int) and value > MAX_REPEATS:
            raise FormatError(f"config key {key} is {value!r}", expected=f"at most {MAX_REPEATS:,}")


def _number(config: dict[str, object], key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise FormatError(f"config key {key} is {value!r}", expected="a finite number")
    return float(value)


def _size(config: dict[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise FormatError(f"config key {key} is {value!r}", expected="a positive integer")
    return value
