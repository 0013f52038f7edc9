"""Which models could draft: judged by configs and tokenizers, with no weights anywhere near."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.checkpoints import pico
from fixtures.checkpoints.targets import target_model
from fixtures.checkpoints.vocabularies import WORDS, byte_level, sentencepiece, wordpiece
from fixtures.servers.hub_server import HubServer
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
from typer.testing import CliRunner, Result

from draftkit.cli.prepare import app
from draftkit.errors import DraftkitError
from draftkit.prepare.candidates import MAX_K, Survey, best_speed_up, find_candidates, overlap
from draftkit.targets.cost import read_cost

BIG = {"hidden_size": 128, "num_hidden_layers": 12}


def save_config(folder: Path, tokenizer: PreTrainedTokenizerFast, *, padding: int = 0, **changes: object) -> Path:
    """A model without weights: its config, its tokenizer, and a file of weights that is only the header of one."""
    config = pico.llama_config(vocab_size=len(tokenizer) + padding, num_hidden_layers=2, **changes)  # type: ignore[misc]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    config = pico.llama_config(vocab_size=len(tokenizer) + 8, **BIG)
    for name in ("target", "deep/copy-of-target"):
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    save_config(folder / "twin", tokenizer, padding=8)
    save_config(folder / "padded", tokenizer, padding=64)
    save_config(folder / "deep" / "cousin", sentencepiece((*WORDS, "others")))
    save_config(folder / "pieces", wordpiece())
    pico.llama_config().save_pretrained(folder / "bare")
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text("{")
    damaged = save_config(folder / "damaged", tokenizer)
    (damaged / "tokenizer.json").write_text('{"version": "1.0"}')
    save_config(folder / "unknown", tokenizer)
    (folder / "unknown" / "config.json").write_text('{"model_type": "of_tomorrow", "vocab_size": 300}')
    return folder


@pytest.fixture(scope="module")
def survey(models: Path) -> Survey:
    return find_candidates(str(models / "target"), folders=[models], acceptance=0.8)


def test_every_model_below_a_folder_is_judged(survey: Survey) -> None:
    assert [(found.name, found.tokenizer) for found in survey.candidates] == [
        ("twin", "same"),
        ("padded", "same, other padding"),
        ("deep/cousin", "other"),
    ]
    twin, _, cousin = survey.candidates
    assert twin.overlap == 1.0
    assert 0.1 < cousin.overlap < 1.0
    reasons = {model.name: model.reason for model in survey.left_out}
    assert reasons == {
        "bare": "there is no tokenizer",
        "damaged": reasons["damaged"],
        "deep/copy-of-target": "a token costs as much as one of the target",
        "odd": reasons["odd"],
        "pieces": "the tokenizer of pieces is of the kind WordPiece",
        "unknown": reasons["unknown"],
    }
    assert "not valid JSON" in reasons["odd"]
    assert "tokenizer" in reasons["damaged"]


def test_costs_are_the_weights_that_a_token_reads(models: Path, survey: Survey) -> None:
    twin = survey.candidates[0]
    config = LlamaConfig.from_pretrained(models / "twin")
    model = LlamaForCausalLM(config)
    assert twin.parameters == sum(weight.numel() for weight in model.parameters())
    read = twin.parameters - model.model.embed_tokens.weight.numel()  # one row of it
    assert read_cost(models / "twin").per_token == read
    assert twin.cost == read / read_cost(models / "target").per_token


def test_a_tied_head_is_read_whole(tmp_path: Path) -> None:
    config = pico.llama_config(tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    cost = read_cost(tmp_path)
    assert cost.parameters == cost.per_token == sum(p.numel() for p in LlamaForCausalLM(config).parameters())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "nemotron_h"])
def test_the_cost_is_that_of_the_language_model(kind: str, tmp_path: Path) -> None:
    model = target_model(kind)
    model.save_pretrained(tmp_path)
    text = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
    assert read_cost(tmp_path).parameters == sum(weight.numel() for weight in text)


def test_of_experts_a_token_reads_those_it_is_sent_to(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 100}
    costs = []
    for chosen in (2, 4, 8):
        Qwen3MoeConfig(num_experts=8, num_experts_per_tok=chosen, **sizes).save_pretrained(tmp_path)
        costs.append(read_cost(tmp_path))
    expert = 3 * 64 * 32 * 2  # three matrices, two layers
    assert len({cost.parameters for cost in costs}) == 1
    assert [costs[i + 1].per_token - costs[i].per_token for i in (0, 1)] == [2 * expert, 4 * expert]


@given(acceptance=st.floats(0, 0.99), cost=st.floats(0, 2))
def test_the_best_k(acceptance: float, cost: float) -> None:
    """Against the closed form of Leviathan et al., theorem 3.8."""
    factors = [(1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + cost * k) for k in range(1, MAX_K + 1)]
    best = best_speed_up(acceptance, cost)
    assert best.factor == pytest.approx(max(factors))
    assert factors[best.k - 1] == pytest.approx(best.factor)


def test_overlap_counts_what_the_target_has() -> None:
    assert overlap([b"a", b"b", "<s>"], [b"a", b"c", b"a", "<s>"]) == 0.5
    assert overlap([], []) == 0.0


def test_what_cannot_be_judged(models: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match="an acceptance of 1"):
        find_candidates("zoo:target", acceptance=1.0)
    with pytest.raises(DraftkitError, match="there is no folder"):
        find_candidates("zoo:target", folders=[tmp_path / "none"], acceptance=0.5)
    with pytest.raises(DraftkitError, match="kind WordPiece"):
        find_candidates(str(models / "pieces"), acceptance=0.5)


def test_the_hubs_cache_goes_by_the_names_of_repositories(tmp_path: Path) -> None:
    save_config(tmp_path / "models--org--small" / "snapshots" / ("ab" * 20), byte_level())
    survey = find_candidates("zoo:target", folders=[tmp_path], acceptance=0.5)
    assert [found.name for found in survey.candidates] == ["org/small@abababa"]


# --- The command


def prepare(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_the_command(models: Path) -> None:
    command = ("candidates", "--target", models / "target", "--dir", models / "deep", "--candidate", models / "twin")
    found = json.loads(prepare(*command, "--acceptance", 0.6, "--json").stdout)
    assert [candidate["tokenizer"] for candidate in found["candidates"]] == ["same", "other"]
    assert found["acceptance"] == 0.6
    shown = prepare(*command)
    assert "prepare transplant" in shown.stdout
    assert "left out: copy-of-target" in shown.stderr


@pytest.mark.long
def test_models_of_the_hub(models: Path, tmp_path: Path) -> None:
    """Of a repository, config and tokenizer are downloaded and nothing else."""
    script = "import sys; from draftkit.cli.prepare import app; app(sys.argv[1:])"
    with HubServer({"org/small": models / "twin", "org/gated": models / "twin"}, gated={"org/gated"}) as server:
        clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HTTP"))}
        settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        chosen = ["--candidate", "org/small", "--candidate", "org/gated", "--candidate", "org/none"]
        done = subprocess.run(
            [sys.executable, "-c", script, "candidates", "--target", str(models / "target"), *chosen, "--json"],
            env=clean | settings | {"HF_HUB_DISABLE_TELEMETRY": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert [(c["name"], c["tokenizer"]) for c in result["candidates"]] == [("org/small", "same")]
        assert [model["name"] for model in result["left_out"]] == ["org/gated", "org/none"]
        assert "is gated" in result["left_out"][0]["reason"]
        assert server.downloads()
        assert not any("safetensors" in file for file in server.downloads())
