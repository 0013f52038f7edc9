"""The decoder facts of a Llama-style configuration."""

from __future__ import annotations

import math

from draftkit.errors import FormatError
from draftkit.layout.spec import MAX_REPEATS, Decoder, Rope

# Causal LMs whose tensors follow from the config without transformers: model_type → (bias on q/k/v, q_norm and k_norm).
DENSE_MODEL_TYPES = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}


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
