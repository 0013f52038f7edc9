"""What hidden states take, told before they are computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.training.samples import samples
from transformers import CONFIG_MAPPING

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.data.states.encoding import costs_of_states
from draftkit.data.states.shards import read_manifest
from draftkit.targets.cost import _active_parameters, token_seconds
from draftkit.targets.pretrained import empty_model

SAMPLES = samples(30)
TOKENS = sum(map(len, SAMPLES))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pico.save_tokenizer(pico.save_llama(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    write_samples(path, SAMPLES, SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return path


def test_ways_by_hand() -> None:
    ways = costs_of_states(
        samples=10, tokens=1000, states=4, size=8, encoding="bf16", passes=2.5, waiting_tokens=200,
        token_seconds=0.5, estimate="by hand",
    )  # fmt: skip
    assert (ways.online.bytes, ways.store.bytes, ways.stream.bytes) == (0, 1000 * 4 * 16 + 80, 200 * 4 * 16 + 16)
    assert (ways.online.seconds, ways.store.seconds, ways.stream.seconds) == (1250, 500, 1250)
    assert (ways.store.sample_bytes, ways.store.sample_seconds) == (100 * 4 * 16 + 8, 50)
    assert ways.encodings["int8"] == 1000 * 4 * (8 + 4) + 80
    assert ways.encodings["int8-channel"] == 1000 * 4 * 8 + 10 * 4 * 8 * 4 + 80


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["bf16", "int8-channel"])
def test_stored_states_take_what_was_said(
    encoding: str, target: Path, data: Path, tmp_path: Path, draftkit: Command
) -> None:
    out = tmp_path / "states"
    command = ("data", "states", data, out, "--target", target, "--encoding", encoding, "--device", "cpu", "--json")
    said = json.loads(draftkit(*command, "--dry-run").out)
    assert not out.exists()
    assert draftkit(*command).code == 0
    written = sum(shard.bytes for shard in read_manifest(out).shards)
    assert said["ways"]["store"]["bytes"] <= written <= said["ways"]["store"]["bytes"] + 4096
    assert said["ways"]["encodings"][encoding] == said["ways"]["store"]["bytes"]
    assert said["ways"]["store"]["seconds"] == pytest.approx(said["plan"]["seconds"]) != 0


def test_training_says_what_its_states_take(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    command = ("train", "--recipe", "eagle3", "--target", target, "--data", data, "--out", tmp_path / "out")
    settings = ("optimization.epochs=3", "validation.share=0.2", "tokens_per_row=64", "stream.ahead=1", "device=cpu")
    ran = draftkit(*command, *(part for setting in settings for part in ("--set", setting)), "--dry-run")
    assert ran.code == 0
    assert ran.out.startswith("recipe: eagle3\n")  # the run alone, which can be saved
    assert f"30 samples, {TOKENS:,} tokens, each read" in ran.err
    for way in ("online", "stored first, in bf16", "streamed"):
        assert way in ran.err
    assert not (tmp_path / "out").exists()


def test_experts_that_a_token_does_not_meet_do_not_count() -> None:
    def active(chosen: int) -> float:
        config = CONFIG_MAPPING["qwen3_moe"](
            hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=chosen, vocab_size=64,
        )  # fmt: skip
        return _active_parameters(empty_model(config, torch.float32))

    expert = 2 * 3 * 32 * 16  # in two layers
    assert active(4) - active(2) == pytest.approx(2 * expert)


def test_larger_targets_take_longer() -> None:
    small, large = (empty_model(pico.llama_config(num_hidden_layers=n), torch.float32) for n in (1, 64))
    cpu = torch.device("cpu")
    assert token_seconds(large, cpu, torch.float32, 64) > 4 * token_seconds(small, cpu, torch.float32, 64) > 0
