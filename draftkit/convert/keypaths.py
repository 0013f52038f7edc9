"""Config keys inside an object: `transformer_layer_config.dtype` is `dtype` in the object under the first name."""

from __future__ import annotations

from collections.abc import Mapping


def value_at(config: Mapping[str, object], path: str) -> object:
    """The value of a key that the config has."""
    holder, dot, key = path.partition(".")
    inner = config[holder]
    return inner[key] if dot and isinstance(inner, dict) else inner


def with_values(config: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """A copy of the config with the values at these paths."""
    result = dict(config)
    for path, value in values.items():
        holder, dot, key = path.partition(".")
        inner = result.get(holder, {})
        result[holder] = {**inner, key: value} if dot and isinstance(inner, dict) else value
    return result
