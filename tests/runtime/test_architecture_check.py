"""What is asked of an architecture before it runs: tiny models, planted faults, and where answers are kept."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.targets import target_config
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from draftkit.errors import UnsupportedTarget
from draftkit.loading import load_drafter, load_model, open_draft, open_target
from draftkit.runtime import architecture_check, attention
from draftkit.runtime.architecture_check import Decoding, compare, decoding_of, require_equal_decoding
from draftkit.runtime.cache import StateRows
from draftkit.runtime.slot_rows import SlotRows
from draftkit.targets import target as targets
from draftkit.targets.tiny import CROSSED, HEADS, tiny_config

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [1 + i / 4 for i in range(48)],
    "original_max_position_embeddings": 4096,
}
# Where they are not those of published models already, the sizes of their classes' defaults.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "llama4": {},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4096, "max_position_embeddings": 131072},
    "qwen3_next": {},
}


def published(name: str) -> PretrainedConfig:
    return CONFIG_MAPPING[name](**PUBLISHED[name])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where answers are kept, of which there is none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "draftkit" / "architectures"


def answering(monkeypatch: pytest.MonkeyPatch, answer: Decoding) -> list[PretrainedConfig]:
    """Every architecture that is asked of gets this answer; returns the tiny configurations that it was given of."""
    asked: list[PretrainedConfig] = []

    def compare(tiny: PretrainedConfig) -> Decoding:
        asked.append(tiny)
        return answer

    monkeypatch.setattr(architecture_check, "compare", compare)
    return asked


# The question


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_architectures_decode_as_generate_does(name: str) -> None:
    assert compare(tiny_config(published(name))) == Decoding("equal")


def by_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4's layers count their positions in transformers' cache, as before draftkit did it."""
    monkeypatch.setattr(targets, "leave_temperatures", lambda model: None)
    monkeypatch.setattr(attention, "_tempered", lambda module, query, kv: query)


def one_more_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SlotRows.bias

    def bias(self: SlotRows, length: int, window: int | None, *others: Any, **named: Any) -> Tensor:
        return own(self, length, None if window is None else window + 1, *others, **named)

    monkeypatch.setattr(SlotRows, "bias", bias)


def one_more_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    own = attention.chunk_of
    monkeypatch.setattr(attention, "chunk_of", lambda module: None if own(module) is None else own(module) + 1)


def rope_of_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "give_rows_their_rope", lambda model: [])


def all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an indexer has chosen."""
    own = attention.Scoring
    monkeypatch.setattr(attention, "Scoring", lambda *of: own(*of)._replace(chosen=None))


def states_of_rejected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    own = StateRows.keep
    monkeypatch.setattr(StateRows, "keep", lambda self, key, state, row: own(self, key, state, -1))


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("plant", "name", "where"),
    [
        (by_their_count, "llama4", "token 2 after a prompt of 21"),
        (one_more_in_a_window, "gemma3_text", "token 1 after a prompt of 21"),
        (one_more_in_a_window, "gpt_oss", "token 1 after a prompt of 21"),
        (one_more_in_a_chunk, "llama4", "token 1 after a prompt of 21"),
        (rope_of_the_longest, "phi3", "token 1 after a prompt of 5"),
        (all_positions, "deepseek_v32", "token 1 after a prompt of 21"),
        (states_of_rejected_tokens, "qwen3_next", "with drafts"),
    ],
)
def test_planted_faults_are_found(plant: Any, name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    answer = compare(tiny_config(published(name)))
    assert answer.outcome == "different"
    assert where in answer.why


def test_nothing_is_disturbed(fresh: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), logging.getLogger("transformers").level
    assert decoding_of(published("gemma3_text")).outcome == "equal"
    now = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), logging.getLogger("transformers").level
    assert torch.equal(before[0], now[0])
    assert before[1:] == now[1:]


# Tiny configurations


def test_every_length_is_crossed_and_every_kind_of_layer_is_there() -> None:
    tiny = tiny_config(published("llama4")).get_text_config()
    assert (tiny.floor_scale, tiny.attention_chunk_size) == (CROSSED, CROSSED)
    assert tiny.no_rope_layers == [1, 1, 1, 0]
    assert set(tiny.layer_types) == {"chunked_attention", "full_attention"}
    assert tiny.moe_layers == [0, 1, 2, 3]
    tiny = tiny_config(published("phi3"))
    rope = tiny.rope_parameters
    assert (rope["original_max_position_embeddings"], tiny.original_max_position_embeddings) == (CROSSED, CROSSED)
    assert len(rope["long_factor"]) == len(rope["short_factor"]) == 16
    assert max(rope["long_factor"]) > 10


def test_layers_that_share_keys_and_values_are_there() -> None:
    """Gemma 4's last ones, which have those of an earlier layer of their kind."""
    tiny = tiny_config(CONFIG_MAPPING["gemma4_text"](num_kv_shared_layers=20))
    own = tiny.num_hidden_layers - tiny.num_kv_shared_layers
    assert set(tiny.layer_types[:own]) == set(tiny.layer_types[own:]) == {"sliding_attention", "full_attention"}


def test_quantization_and_sizes_do_not_matter() -> None:
    """One answer serves every model of a family that differs in nothing else; it depends on all that is no size."""
    plain = CONFIG_MAPPING["llama"](hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, vocab_size=128256)
    other = CONFIG_MAPPING["llama"](
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, quantization_config={"quant_method": "fp8"}
    )
    assert tiny_config(plain).to_dict() == tiny_config(other).to_dict()
    turned = CONFIG_MAPPING["llama"](rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert tiny_config(turned).to_dict() != tiny_config(plain).to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5", "mistral3"])
def test_multi_modal_models_are_asked_whole(kind: str) -> None:
    tiny = tiny_config(target_config(kind))
    assert type(tiny) is type(target_config(kind))
    assert tiny.get_text_config().num_attention_heads == HEADS
    assert compare(tiny).outcome == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chameleon", "qwen2_audio"])
def test_models_of_several_kinds_of_input(kind: str) -> None:
    """One has lists of layers without any, the other gives the logits of all rows whatever it is asked for."""
    details = {"vocabulary_map": {"<image>": 100, "IMGIMGA": 101}} if kind == "chameleon" else {}
    assert compare(tiny_config(CONFIG_MAPPING[kind](**details))) == Decoding("equal")


# The answer


def test_the_answer_is_kept_in_a_file(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, Decoding("equal"))
    for _ in range(2):
        assert decoding_of(pico.llama().config).outcome == "equal"
    (file,) = fresh.iterdir()
    assert json.loads(file.read_text()) == {"outcome": "equal", "why": ""}
    assert len(asked) == 1
    file.write_text('{"outcome": "fine"}')
    assert decoding_of(pico.llama().config).outcome == "equal"
    assert len(asked) == 2
    monkeypatch.setattr(architecture_check.transformers, "__version__", "5.24.0")
    decoding_of(pico.llama().config)
    monkeypatch.setattr(architecture_check, "code_digest", lambda *rooms: "another draftkit")
    decoding_of(pico.llama().config)
    assert len(asked) == 4


@pytest.mark.parametrize("home", ["/dev/null/cache", "/proc/cache"])
def test_without_a_file_the_question_is_asked_again(home: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    asked = answering(monkeypatch, Decoding("equal"))
    for number in range(2):
        assert decoding_of(pico.llama().config).outcome == "equal"
        assert len(asked) == number + 1


def test_a_model_that_decodes_otherwise_is_refused_by_name(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, running_target: Path, draftkit: Command
) -> None:
    answering(monkeypatch, Decoding("different", "the logits of token 3 after a prompt of 21 differ"))
    refusal = open_target(str(running_target)).refusal
    assert refusal is not None
    assert str(refusal).startswith(
        "draftkit's own engine does not decode LlamaForCausalLM as transformers does: the logits of token 3 after a"
    )
    with pytest.raises(UnsupportedTarget, match="--engine vllm"):
        load_model(str(running_target), device="cpu", dtype=torch.float32)
    run = draftkit("eval", "--target", running_target, "--draft", "ngram", "--dataset", "zoo", "--limit", 1)
    assert run.code == 1
    assert "does not decode LlamaForCausalLM" in run.err
    assert "--engine vllm" in run.err


def test_a_draft_that_decodes_otherwise_is_refused(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, running_target: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model(str(running_target), device="cpu", dtype=torch.float32)
    draft = shutil.copytree(running_target, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    answering(monkeypatch, Decoding("different", "the logits differ"))
    with (
        open_draft(str(draft), str(running_target)) as opened,
        pytest.raises(UnsupportedTarget, match="LlamaForCausal"),
    ):
        load_drafter(opened, model, tokenizer)


def test_what_cannot_be_found_out_is_said_and_refuses_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, running_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answering(monkeypatch, Decoding("not checked", "no tiny model, RuntimeError: the sizes do not go together"))
    for _ in range(2):
        assert open_target(str(running_target)).refusal is None
    assert caplog.messages == [
        "LlamaForCausalLM was not held against transformers' generate: no tiny model, RuntimeError: the sizes do not "
        "go together"
    ]


@pytest.mark.parametrize("broken", ["tiny_config", "random_model"])
def test_what_cannot_be_built_is_not_checked(broken: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the sizes do not go together\nat all")

    monkeypatch.setattr(architecture_check, broken, fail)
    answer = decoding_of(pico.llama().config)
    assert answer.outcome == "not checked"
    assert answer.why.endswith(", RuntimeError: the sizes do not go together")
    require_equal_decoding(pico.llama().config)
