"""Drafts of targets that draftkit's own runtime may not run: training takes their states, however these are found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.targets import TARGETS, save_target, target_model
from fixtures.servers.completions_server import Answer, CompletionsServer
from fixtures.training.samples import samples
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.layout.folder import read_draft

FAKE_VLLM = Path(__file__).parents[1] / "fixtures/engines/fake_vllm"
torch.set_num_threads(1)
logging.disable_progress_bar()  # as the command does where it is the first to import transformers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    write_samples(path, samples(12), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return path


def train(target: Path, data: Path, out: Path, *more: object) -> list[object]:
    settings = ("optimization.max_steps=2", "tokens_per_row=128", "options.steps=2", "options.layers=[1,3,5]")
    flags = ["train", "--recipe", "eagle3", "--target", target, "--data", data, "--out", out]
    return [*flags, *(part for setting in settings for part in ("--set", setting)), *more]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_draft_is_trained_online_and_from_files(kind: str, data: Path, tmp_path: Path, draftkit: Command) -> None:
    target, states = save_target(kind, tmp_path / "target"), tmp_path / "states"
    stored = draftkit("data", "states", data, states, "--target", target, "--layers", "1,3,5", "--encoding", "float32")
    assert stored.code == 0, stored.err
    assert draftkit(*train(target, data, tmp_path / "dry"), "--dry-run").code == 0
    for out, more in ((tmp_path / "online", []), (tmp_path / "files", ["--states", states])):
        ran = draftkit(*train(target, data, out, *more))
        assert ran.code == 0, ran.err
    online, files = (load_file(tmp_path / name / "checkpoint-2" / "model.safetensors") for name in ("online", "files"))
    for name, weight in online.items():
        torch.testing.assert_close(files[name].float(), weight.float(), rtol=1e-2, atol=1e-3)
    spec = read_draft(tmp_path / "files" / "draft").spec.architecture
    assert spec.aux_layer_ids == (1, 3, 5)  # type: ignore[attr-defined]
    shard = next(states.glob("states-*.safetensors"))
    held = bytearray(shard.read_bytes())
    held[-100] ^= 1
    shard.write_bytes(held)
    ran = draftkit(*train(target, data, tmp_path / "run", "--states", states, "--set", "verify_states=true"))
    assert ran.code == 1
    assert "is damaged" in ran.err


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_from_prompts_to_a_measured_draft_in_draftkit_s_own_engine(
    kind: str, tmp_path: Path, draftkit: Command
) -> None:
    """Hybrid targets and latent attention: answers, states, training and measurement."""
    target = save_target(kind, tmp_path / "target")
    rows, answers, data, states = (tmp_path / name for name in ("rows.jsonl", "answers.jsonl", "data.jsonl", "states"))
    rows.write_text("".join(json.dumps({"text": f"number {i} of the texts"}) + "\n" for i in range(8)))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("number 3 of the texts\nnumber 4 of the texts\n")
    own = ("--target", target, "--device", "cpu")
    for command in (
        ["data", "regenerate", rows, answers, *own, "--max-new-tokens", 16, "--concurrency", 3],
        ["data", "prepare", answers, data, "--target", target],
        ["data", "states", data, states, *own, "--layers", "1,3,5"],
        train(target, data, tmp_path / "run", "--states", states, "--set", "validation.share=0"),
    ):
        ran = draftkit(*command)
        assert ran.code == 0, ran.err
    measured = draftkit(
        "eval", *own, "--draft", tmp_path / "run" / "draft", "--prompts", prompts, "--k", 2, "--max-new-tokens", 16,
        "--concurrency", "1,2", "--json",
    )  # fmt: skip
    assert measured.code == 0, measured.err
    cells = json.loads(measured.out)["cells"]
    assert [(cell["engine"], cell["method"], cell["num_prompts"]) for cell in cells] == [("draftkit", "eagle3", 2)] * 2
    assert all(cell["matches_greedy"] and cell["num_drafts"] > 0 for cell in cells)


def three_tokens(body: dict[str, object]) -> Answer:
    """What a server of the target answers: the last token twice, then the end."""
    prompt = body["prompt"]
    assert isinstance(prompt, list)
    answer = [prompt[-1], prompt[-1], 2]
    return 200, {"choices": [{"index": 0, "text": "x", "token_ids": answer, "prompt_token_ids": prompt}]}


@pytest.mark.slow
def test_a_draft_for_a_target_that_draftkit_never_runs(
    tmp_path: Path, draftkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From prompts to a measured draft: answers by a server, states and training in transformers, vLLM to measure."""
    target = save_target("falcon", tmp_path / "target")
    rows, answers, data = (tmp_path / name for name in ("rows.jsonl", "answers.jsonl", "data.jsonl"))
    rows.write_text("".join(json.dumps({"text": f"number {i} of the texts"}) + "\n" for i in range(12)))
    refused = draftkit("data", "regenerate", rows, answers, "--target", target, "--device", "cpu")
    assert refused.code == 1
    assert f"next: vllm serve {target}, and --endpoint http://HOST:PORT/v1" in refused.err
    assert not answers.exists()
    with CompletionsServer(three_tokens) as server:
        ran = draftkit("data", "regenerate", rows, answers, "--target", target, "--endpoint", server.endpoint)
        assert ran.code == 0, ran.err
    for command in (
        ["data", "prepare", answers, data, "--target", target],
        ["data", "check", data, "--target", target, "--device", "cpu"],
        train(target, data, tmp_path / "run", "--set", "validation.share=0.2"),
    ):
        ran = draftkit(*command)
        assert ran.code == 0, ran.err
    monkeypatch.setenv("PYTHONPATH", str(FAKE_VLLM))
    monkeypatch.setenv("FAKE_VLLM_JOURNAL", str(tmp_path / "journal"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("number 3 of the texts\nnumber 4 of the texts\n")
    measured = draftkit(
        "eval", "--target", target, "--draft", tmp_path / "run" / "draft", "--prompts", prompts, "--k", 2,
        "--max-new-tokens", 20, "--vllm-python", sys.executable, "--device", "cpu", "--json",
    )  # fmt: skip
    assert measured.code == 0, measured.err
    (cell,) = json.loads(measured.out)["cells"]
    assert (cell["engine"], cell["method"], cell["num_prompts"]) == ("vllm", "eagle3", 2)


def wrong_layers(target: Path, data: Path, folder: Path) -> list[object]:
    return ["--set", "options.layers=[1,3,9]"]


def other_samples(target: Path, data: Path, folder: Path) -> list[object]:
    return ["--data", folder / "none.jsonl"]


def long_rows(target: Path, data: Path, folder: Path) -> list[object]:
    return ["--set", "tokens_per_row=16"]


def no_states(target: Path, data: Path, folder: Path) -> list[object]:
    return ["--states", folder / "none"]


def other_draft(target: Path, data: Path, folder: Path) -> list[object]:
    return ["--draft", pico.write_checkpoint(folder / "draft", pico.eagle_config(), pico.eagle_tensors())]


def unknown_architecture(target: Path, data: Path, folder: Path) -> list[object]:
    (target / "config.json").write_text(json.dumps({"model_type": "of_tomorrow", "hidden_size": 64, "vocab_size": 320}))
    return []


def encoder_decoder(target: Path, data: Path, folder: Path) -> list[object]:
    (target / "config.json").write_text(json.dumps(CONFIG_MAPPING["t5"]().to_dict()))
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (wrong_layers, "target layers [1, 3, 9]"),
        (other_samples, "none.jsonl"),
        (long_rows, "a row 16"),
        (no_states, "none"),
        (other_draft, "the draft is of the kind eagle"),
        (unknown_architecture, "a newer release of transformers"),
        (encoder_decoder, "t5 is an encoder-decoder"),
    ],
)
def test_a_dry_run_refuses_what_the_run_does(
    wrong: Callable[[Path, Path, Path], list[object]], said: str, data: Path, tmp_path: Path, draftkit: Command
) -> None:
    target = pico.save_tokenizer(pico.save_llama(tmp_path / "target", num_hidden_layers=6))
    command = [*train(target, data, tmp_path / "run"), *wrong(target, data, tmp_path)]
    refused = [draftkit(*command, *more) for more in (["--dry-run"], [])]
    assert [ran.code for ran in refused] == [1, 1]
    assert refused[0].err.splitlines()[0] == refused[1].err.splitlines()[0]
    assert said in refused[0].err
    assert not (tmp_path / "run").exists()


def test_the_target_is_what_transformers_computes() -> None:
    """The fixture's models differ from each other, so that none of the above passes for nothing."""
    outputs = {kind: target_model(kind)(torch.arange(3, 9)[None], use_cache=False).logits for kind in TARGETS}
    assert all(logits.std() > 0.1 for logits in outputs.values())
