"""The rotary positions of a target, from its configuration."""

from __future__ import annotations

from typing import cast

from transformers import PretrainedConfig


def target_rope(config: PretrainedConfig) -> tuple[float | None, dict[str, object] | None]:
    """Base and scaling (None: plain) of a target; of several kinds of layers, those with full attention."""
    parameters: dict[str, object] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if nested:
        parameters = cast("dict[str, object]", parameters.get("full_attention", nested[0]))
    rest = {key: value for key, value in parameters.items() if key != "rope_theta"}
    plain = rest.keys() <= {"rope_type"} and rest.get("rope_type", "default") == "default"
    return cast("float | None", parameters.get("rope_theta")), None if plain else rest
