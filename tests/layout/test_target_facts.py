"""What conversions read of a target: its config as published, with what transformers' classes add to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from draftkit.errors import TargetError
from draftkit.layout.target import TargetFacts, read_target_facts
from draftkit.prepare.vocabulary import _text_config

QWEN2 = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "max_position_embeddings": 32768}
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int | None, bool]]] = {
    "google/gemma-3-4b-it": (
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34},
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        },
        (2560, 262208, 34, 131072, True),
    ),
    "llava-hf/llava-1.5-7b-hf": (
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
            "vision_config": {"model_type": "clip_vision_model", "vocab_size": 32000},
        },
        (4096, 32064, 32, 4096, False),
    ),
    "openai-community/gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        (768, 50257, 12, 1024, True),
    ),
    "OpenGVLab/InternVL2_5-1B": (
        {"model_type": "internvl_chat", "hidden_size": 1, "llm_config": QWEN2 | {"vocab_size": 151674}},
        (896, 151674, 24, 32768, False),
    ),
    "a wrapper of the author's own, a size left out": (
        {"model_type": "foreign", "language_config": QWEN2 | {"tie_word_embeddings": True}},
        (896, 151936, 24, 32768, True),
    ),
    "a wrapper that is null": (QWEN2 | {"vocab_size": 7, "text_config": None}, (896, 7, 24, 32768, False)),
}


def facts_of(config: dict[str, Any], folder: Path) -> TargetFacts:
    (folder / "config.json").write_text(json.dumps(config))
    return read_target_facts(folder, "target", None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_targets(name: str, tmp_path: Path) -> None:
    config, expected = PUBLISHED[name]
    facts = facts_of(config, tmp_path)
    sizes = facts.hidden_size, facts.vocab_size, facts.num_hidden_layers, facts.max_position_embeddings
    assert (*sizes, facts.tied) == expected
    assert _text_config(tmp_path)["vocab_size"] == facts.vocab_size


@pytest.mark.parametrize(
    "config", [{"model_type": "foreign"}, {}, {"model_type": "llama", "vocab_size": "many"}], ids=str
)
def test_what_no_class_knows_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no usable (hidden_size \(found None\)|vocab_size \(found 'many'\))"):
        facts_of(config, tmp_path)


def test_a_config_that_says_all_needs_no_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"vocab_size": 7, "tie_word_embeddings": True}))
    code = (
        "import sys, pathlib; from draftkit.layout.target import read_target_facts; "
        "assert read_target_facts(pathlib.Path('.'), 'target', None).tied; "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_infinities_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    """Nemotron-H's configuration has one, and leaves the number of its layers to its class."""
    CONFIG_MAPPING["nemotron_h"](layer_types=["linear_attention", "mlp", "full_attention"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["time_step_limit"][1] == {"__float__": "Infinity"}
    assert read_target_facts(tmp_path, "target", None).num_hidden_layers == 3
