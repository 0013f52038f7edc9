"""Targets that are larger than a device, spread over what there is: on the CPU, over memory and disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.recurrent_targets import COMMON, KINDS
from transformers import CONFIG_MAPPING

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError, UnsupportedTarget
from draftkit.loading import load_model
from draftkit.runtime.engine import Engine
from draftkit.runtime.graphs import capturable
from draftkit.targets.device_map import (
    DISK,
    is_spread,
    layer_shares,
    map_layers,
    room_from,
    spread_targets,
    weight_shares,
)
from draftkit.targets.pretrained import empty_model
from draftkit.targets.states import FINAL, AuxLayers
from draftkit.targets.target import Target

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5], [40, 41, 42, 43])
ON_CPU = 3  # layers


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the ends and a few layers of the pico target; the others wait on the disk."""
    model = empty_model(pico.llama_config(), torch.float32)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    room = sum(p.nbytes for p in model.parameters()) - sum(layers) + ON_CPU * layers[0]
    for module in ("draftkit.targets.pretrained", "draftkit.evaluate.planning"):
        monkeypatch.setattr(f"{module}.room_from", lambda *_, **__: {"cpu": room, DISK: 1 << 40})


def loaded(folder: Path, *, spread: bool) -> Target:
    with spread_targets(spread):
        model, _ = load_model(str(folder), device="cpu", dtype=torch.float32)
    return Target(model, AuxLayers((2, 5, FINAL)))


@pytest.mark.slow
@pytest.mark.usefixtures("small_memory")
def test_greedy_output_is_that_of_the_target_in_one_place(running_target: Path) -> None:
    outputs = []
    for spread in (False, True):
        target = loaded(running_target, spread=spread)
        engine = Engine(target, None, num_speculative_tokens=0, num_slots=2)
        outputs.append([generation.tokens for generation in engine.generate(PROMPTS, max_new_tokens=16)])
        assert is_spread(target.model) == spread
    assert outputs[0] == outputs[1]
    places = target.model.hf_device_map
    assert sum(place == DISK for place in places.values()) == pico.LAYERS - ON_CPU
    assert {places[name] for name in ("model.embed_tokens", "model.norm", "lm_head")} == {"cpu"}
    assert target.device == torch.device("cpu")
    assert not capturable(target)


@pytest.mark.usefixtures("small_memory")
def test_states_are_those_of_the_target_in_one_place(running_target: Path) -> None:
    rows = torch.arange(12)[None], torch.arange(12)[None] % 6, torch.arange(12)[None] // 6
    found = []
    for spread in (False, True):
        with spread_targets(spread):
            model = load_training_target(str(running_target), device="cpu", dtype=torch.float32)
        found.append(OnlineStates(model, AuxLayers((2, 5, 8))).states(*rows))
    assert torch.equal(found[0].features, found[1].features)
    assert torch.equal(found[0].last, found[1].last)


@pytest.mark.long
@pytest.mark.usefixtures("small_memory")
def test_the_commands(
    draftkit: Command, running_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft, data = tmp_path / "draft", tmp_path / "data.jsonl"
    foreign = pico.write_checkpoint(tmp_path / "eagle3", pico.eagle3_config(), pico.eagle3_tensors())
    assert draftkit("convert", foreign, draft, "--target", running_target).code == 0
    command = (
        "eval",
        "--target",
        running_target,
        "--draft",
        draft,
        "--dataset",
        "zoo",
        "--device",
        "cpu",
        "--limit",
        2,
        "--json",
    )
    evaluated = [draftkit(*command, "--max-new-tokens", 8, *extra) for extra in ((), ("--device-map", "auto"))]
    assert [outcome.code for outcome in evaluated] == [0, 0]
    whole, spread = (json.loads(outcome.out)["cells"][0] for outcome in evaluated)
    assert whole["acceptance_length"] == spread["acceptance_length"]
    assert spread["matches_greedy"]
    assert "layers of the target: 3 on cpu, 5 on disk; rounds are not captured in CUDA graphs" in caplog.text
    tokenizer = load_tokenizer(str(running_target))
    origin = SamplesOrigin(str(running_target), tokenizer.sha256, tokenizer.template_sha256)
    write_samples(data, [Sample.of(f"s{n}", list(range(4, 40)), [(4, 36)]) for n in range(8)], origin)
    stored = [tmp_path / "whole", tmp_path / "spread"]
    for out, extra in zip(stored, ((), ("--device-map", "auto")), strict=True):
        command = ("data", "states", data, out, "--target", running_target, "--device", "cpu", *extra)
        assert draftkit(*command).code == 0
    shards = [(out / "states-00000.safetensors").read_bytes() for out in stored]
    assert shards[0] == shards[1]
    training = ("train", "--recipe", "eagle3", "--target", running_target, "--data", data, "--out", tmp_path / "out")
    settings = ("--set", "device=cpu", "--set", "optimization.max_steps=1", "--set", "validation.share=0.2")
    assert draftkit(*training, *settings, "--device-map", "auto").code == 0
    both = ("data", "states", data, tmp_path / "o", "--target", running_target, "--vllm-python", "python")
    refused = draftkit(*both, "--device-map", "auto")
    assert refused.code == 1
    assert "vLLM takes --tensor-parallel" in refused.err


def test_layers_go_on_to_the_next_device_in_their_order() -> None:
    model = empty_model(pico.llama_config(), torch.float32)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    ends = sum(p.nbytes for p in model.parameters()) - pico.LAYERS * layer
    placed = map_layers(model, {"cuda:0": ends + 3 * layer, "cuda:1": 2 * layer + 1, "cpu": 9 * layer})
    assert [placed[f"model.layers.{n}"] for n in range(8)] == ["cuda:0"] * 3 + ["cuda:1"] * 2 + ["cpu"] * 3
    assert {place for name, place in placed.items() if ".layers." not in name} == {"cuda:0"}
    with pytest.raises(DraftkitError, match="embedding and head alone"):
        map_layers(model, {"cuda:0": ends - 1, "cpu": 9 * layer})
    with pytest.raises(DraftkitError, match="do not fit on all devices together"):
        map_layers(model, {"cuda:0": ends, "cpu": 7 * layer})


def test_gpus_that_are_needed_share_a_model_evenly() -> None:
    """So that each has as much left for the caches of its layers; one that holds all of it keeps it."""
    model = empty_model(pico.llama_config(), torch.float32)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    total = sum(p.nbytes for p in model.parameters())
    room = {"cuda:0": total - 1, "cuda:1": total, "cuda:2": total, "cpu": total}
    placed = map_layers(model, room)
    assert set(placed.values()) == {"cuda:0", "cuda:1", "cuda:2"}
    shares, held = layer_shares(model, placed), weight_shares(model, placed)
    assert list(shares) == list(held) == [torch.device(f"cuda:{n}") for n in range(3)]
    assert sum(shares.values()) == pytest.approx(1)
    assert all(abs(share * total - total / 3) <= 2 * layer for share in held.values())
    assert set(map_layers(model, room | {"cuda:0": total}).values()) == {"cuda:0"}


def test_layers_that_wait_are_run_where_the_first_are() -> None:
    model = empty_model(pico.llama_config(), torch.float32)
    placed = {"model.embed_tokens": "cuda:0", "model.norm": "cuda:0", "lm_head": "cuda:0"}
    places = ["cuda:0", "cuda:1", "cuda:1", "cpu", "cpu", DISK, DISK, DISK]
    placed |= {f"model.layers.{n}": place for n, place in enumerate(places)}
    assert layer_shares(model, placed) == {torch.device("cuda:0"): 6 / 8, torch.device("cuda:1"): 2 / 8}
    assert torch.device("cpu") in weight_shares(model, placed)
    assert layer_shares(model, {"": "cpu"}) == {torch.device("cpu"): 1}


def test_recurrent_layers_stay_on_one_gpu() -> None:
    model = empty_model(CONFIG_MAPPING["qwen3_next"](**COMMON | KINDS["qwen3_next"]), torch.float32)
    size = sum(p.nbytes for p in model.parameters())
    with pytest.raises(UnsupportedTarget, match="recurrent layers"):
        map_layers(model, {"cuda:0": size - 1, "cuda:1": size})
    assert set(map_layers(model, {"cuda:0": size - 1, "cpu": size}).values()) == {"cuda:0", "cpu"}


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(DraftkitError, match="several processes"):
        room_from("cpu")


def test_rows_go_where_the_layer_is() -> None:
    """Caches are made where keys come from, and rows are copied there once for all layers of a device."""
    from draftkit.runtime.cache import SlotCache

    cache = SlotCache(2, 8)
    rows = cache.rows(torch.tensor([0, 1]), torch.tensor([[0], [0]]), 4)
    away = torch.device("meta")
    moved = rows.rows.on(away)
    assert moved.slots.device == moved.positions.device == away
    assert rows.rows.on(away) is moved
    assert rows.rows.on(torch.device("cpu")) is rows.rows
