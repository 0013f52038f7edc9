"""Prompts with images are measured: by draftkit's own engine, by vLLM, and by servers that are sent the parts."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints.processors import data_uri, picture, save_visual_target
from fixtures.checkpoints.visual import IMAGE, visual_model
from fixtures.image_messages import SOUND, asks
from fixtures.servers.speaking import SpeakingServer, simulated
from transformers.utils import logging

from draftkit.data.rows import LeftOutRows
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.engines.server import ServerEngine
from draftkit.evaluate.engines.vllm import VllmEngine
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.evaluate.job import Job
from draftkit.evaluate.options import ServerSettings
from draftkit.evaluate.planning import plans_of
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.loading import open_target
from draftkit.results.settings import Settings, Sweep

torch.set_num_threads(1)
logging.disable_progress_bar()

FAKE = Path(__file__).parents[1] / "fixtures/engines/fake_vllm"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_visual_target(tmp_path_factory.mktemp("target"), "qwen2_5_vl")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """One with two turns and two images, one of text, one embedded; and some that are left out."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for number, name in enumerate(("a", "b")):
        (folder / f"{name}.png").write_bytes(picture(56 + 28 * number, 28, number))
    (tmp_path / "secret.png").write_bytes(picture())
    said = {"role": "assistant", "content": "A cat."}
    talks: dict[str, list[dict[str, Any]]] = {
        "two": [{"role": "system", "content": "Be brief."}, asks("What is it?", "a.png"), said, asks("b.png", "This?")],
        "text": [asks("Why?")],
        "embedded": [asks(data_uri(picture(28, 28, 2)), "?")],
        "outside": [asks("../secret.png")],
        "video": [asks({"type": "video_url", "video_url": {"url": "a.mp4"}})],
    }
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": id, "messages": said}) + "\n" for id, said in talks.items()))
    return path


def test_a_set_with_images(prompts: Path, tmp_path: Path) -> None:
    left_out = LeftOutRows(takes=frozenset({"image"}))
    found = load_prompt_set(str(prompts), left_out=left_out)
    assert [prompt.id for prompt in found.prompts] == ["two", "text", "embedded"]
    assert dict(left_out.kinds) == {"unreadable image": 1, "video_url": 1}
    assert [len(prompt.digests) for prompt in found.prompts] == [2, 0, 1]
    assert found.prompts[0].turns == ("What is it?", "This?")
    assert found.prompts[0].user(0, "Before. What is it?")["content"][:2] == [
        {"type": "text", "text": "Before. "}, {"type": "text", "text": "What is it?"}
    ]  # fmt: skip
    (prompts.parent / "a.png").write_bytes(picture(56, 28, 5))
    assert load_prompt_set(str(prompts), left_out=LeftOutRows(takes=frozenset({"image"}))).sha256 != found.sha256
    with pytest.raises(DraftkitError, match=r"\(unreadable image\): ../secret.png: the file is not below"):
        load_prompt_set(str(prompts), strict=True, left_out=LeftOutRows(takes=frozenset({"image"})))
    moved = prompts.rename(tmp_path / "elsewhere.jsonl")
    found = load_prompt_set(str(moved), left_out=LeftOutRows(takes=frozenset({"image"})), media_root=prompts.parent)
    assert [prompt.id for prompt in found.prompts] == ["two", "text", "embedded"]


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["first", "all", "recorded"])
def test_draftkits_own_engine_is_lossless_on_images(turns: str, target: Path, prompts: Path) -> None:
    asked = Settings(prompts=str(prompts), turns=turns, max_new_tokens=12, ignore_eos=True, device="cpu")  # type: ignore[arg-type]
    result = evaluate_draft(str(target), "ngram", asked=asked)
    (cell,) = result.cells
    assert cell.matches_greedy
    assert cell.num_prompts == {"first": 3, "all": 4, "recorded": 1}[turns]
    seen = {warning.name: warning.message for warning in result.warnings}
    assert "text and image parts are sent to what is measured" in seen["prompts-left-out"]


@pytest.mark.slow
def test_a_plan_counts_what_reads_images(prompts: Path, tmp_path: Path) -> None:
    """Of a target whose language model transformers builds alone too."""
    opened = open_target(str(save_visual_target(tmp_path / "target", "qwen3_5")))
    asked = Settings(prompts=str(prompts), max_new_tokens=4, device="cpu", dtype="float32")
    sizes = []
    for takes in (OwnEngine.takes, frozenset()):
        with ExitStack() as stack:
            job = Job(opened, ["ngram"], Sweep.of(asked), stack, takes=takes)
            sizes.append(plans_of(job, asked)["ngram"].fixed["target weights"])
    assert sizes[0] == sum(parameter.nbytes for parameter in visual_model("qwen3_5").parameters()) > sizes[1]


@pytest.mark.slow
def test_vllm_offline_is_given_the_pixels(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One placeholder stands for an image there, and the tokenizer is not skipped."""
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_VLLM_JOURNAL", str(tmp_path / "journal"))
    engine = VllmEngine(VllmSettings(python=sys.executable))
    asked = Settings(prompts=str(prompts), max_new_tokens=8, device="cpu", repeats=0)
    result = evaluate_draft(str(target), ["ngram"], asked=asked, engines=[engine])
    assert result.cells[0].num_prompts == 3
    entries = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    arguments = next(entry["arguments"] for entry in entries if "arguments" in entry)
    assert (arguments["skip_tokenizer_init"], arguments["limit_mm_per_prompt"]) == (False, {"image": 2, "video": 0})
    given = [prompt for entry in entries if "prompts" in entry for prompt in entry["prompts"]]
    with_image = [prompt for prompt in given if "multi_modal_data" in prompt]
    assert len(with_image) < len(given)
    for prompt in with_image:
        images = prompt["multi_modal_data"]["image"]
        assert prompt["prompt_token_ids"].count(IMAGE) == len(images) == 1


@pytest.mark.slow
@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai", "tensorrt_llm"])
def test_servers_are_sent_the_parts(with_target: bool, dialect: Any, target: Path, prompts: Path) -> None:
    more = {"heard": asks("Listen.", SOUND), "far": asks("https://host/c.png", "What?")}
    lines = [json.dumps({"id": id, "messages": [message]}) for id, message in more.items()]
    lines += prompts.read_text().splitlines()
    prompts.write_text("\n".join(lines) + "\n")
    asked = Settings(prompts=str(prompts), max_new_tokens=8, concurrency=2)
    with SpeakingServer(dialect, simulated(3), k=3) as server:
        engine = ServerEngine(ServerSettings(url=server.url))
        result = evaluate_draft(str(target) if with_target else None, [], asked=asked, engines=[engine])
    assert result.cells[0].num_prompts == 5
    contents = [json.dumps(body["messages"]) for body in server.bodies if "messages" in body]
    for part in (
        data_uri(picture(56, 28, 0)),
        data_uri(picture(28, 28, 2)),
        SOUND["input_audio"]["data"],
        "https://host/c.png",
    ):
        assert any(part in content for content in contents)
    assert not any('"a.png"' in content for content in contents)


def test_llama_cpp_is_not_sent_images(prompts: Path) -> None:
    asked = Settings(prompts=str(prompts), max_new_tokens=8)
    with SpeakingServer("llamacpp", simulated(3), k=3) as server:
        engine = ServerEngine(ServerSettings(url=server.url))
        with pytest.raises(DraftkitError, match=r"has images or sounds, which are not sent to llama.cpp"):
            evaluate_draft(None, [], asked=asked, engines=[engine])


@pytest.mark.slow
def test_a_target_of_text_leaves_images_out(prompts: Path, draftkit: Command) -> None:
    ran = draftkit(
        "eval", "--target", "zoo:target", "--draft", "ngram", "--dataset", prompts, "--max-new-tokens", 4, "--json"
    )
    said = json.loads(ran.out)
    (warning,) = [one for one in said["warnings"] if one["name"] == "prompts-left-out"]
    assert "image_url in 3" in warning["message"]
    assert said["cells"][0]["num_prompts"] == 1
