"""How long a sequence vLLM allows a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class PositionLimit(NamedTuple):
    """The `tokens` of a sequence, drafts included, from which on a model runner of vLLM puts token 0 in the place of
    drafts, as `V1`; it counts those rounds nevertheless."""

    tokens: int
    runner: str


FIRST = "V1"  # the runner that compares lengths with the draft's config as it was loaded (`_input_fits_in_drafter`)
LENGTH_KEYS = (  # those of vLLM's `derive_max_model_len_and_key`
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def longest_sequence(config: Mapping[str, object]) -> int | None:
    """The tokens that vLLM allows a model with this `config.json`, None where it does not say (`config/model.py`,
    `_get_and_verify_max_len`)."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    lengths = [length for key in LENGTH_KEYS if isinstance(length := config.get(key), int)]
    stated = config.get("model_max_length")
    length = stated if isinstance(stated, int) and stated else min(lengths, default=None)
    if length is None:
        return None
    factor = 1.0
    for rope in ropes_of(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "longrope":
            original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))
            return original if isinstance(original, int) else length
        if kind not in SCALED_ALREADY and "gemma3" not in str(config.get("model_type")):
            stretched = rope.get("factor")
            factor = float(stretched) if isinstance(stretched, int | float) else factor
    return int(length * factor)


def limit_of(config: Mapping[str, object]) -> PositionLimit | None:
    """Where vLLM stops to draft with this `config.json`; its second runner (V2) nowhere does."""
    tokens = longest_sequence(config)
    return None if tokens is None else PositionLimit(tokens, FIRST)


def ropes_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rope settings of all kinds of layers, under the name of transformers 5 or of older releases."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    parts = [part for part in rope.values() if isinstance(part, Mapping)]
    return parts or [rope]
