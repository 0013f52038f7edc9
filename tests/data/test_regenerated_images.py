"""The target answers rows with images, served or in this process, and what it has read is what is stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints.processors import data_uri, picture, save_visual_target
from fixtures.image_messages import SOUND, asks
from fixtures.servers.completions_server import CompletionsServer
from fixtures.servers.seeing import seeing
from transformers.utils import logging

from draftkit.data.sample_files import read_samples
from draftkit.loading import open_target
from draftkit.media import MediaSpan, image_file

torch.set_num_threads(1)
logging.disable_progress_bar()


OTHERS = {"role": "assistant", "content": "Words of another model."}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_visual_target(tmp_path_factory.mktemp("target"), "qwen2_5_vl")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for number, name in enumerate(("a", "b")):
        (folder / f"{name}.png").write_bytes(picture(56 + 28 * number, 28, number))
    return folder


def written(folder: Path, **talks: list[dict[str, Any]]) -> Path:
    lines = ({"id": id, "messages": messages} for id, messages in talks.items())
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


@pytest.mark.slow
def test_a_server_answers_and_its_ids_are_held_against_ours(
    target: Path, rows: Path, tmp_path: Path, draftkit: Command
) -> None:
    (tmp_path / "secret.png").write_bytes(picture())
    source = written(
        rows,
        two=[asks("What?", "a.png"), OTHERS, asks("b.png", "And this?")],
        text=[asks("Why?")],
        embedded=[asks(data_uri(picture(28, 28, 2)), "?")],
        outside=[asks("../secret.png")],
        heard=[asks("Listen.", SOUND)],
        fetched=[asks("http://127.0.0.1:1/c.png")],
        both=[asks("What?", "a.png"), OTHERS, asks("Listen.", SOUND)],
        seen=[asks({"type": "video_url", "video_url": {"url": "a.mp4"}})],
    )
    out = tmp_path / "answers" / "out.jsonl"
    with CompletionsServer(seeing(open_target(str(target)))) as server:
        asked = ("data", "regenerate", source, out, "--target", target, "--endpoint", server.endpoint, "--json")
        said = json.loads(draftkit(*asked).out)
        posted = len(server.requests)
        assert json.loads(draftkit(*asked).out)["resumed"] == 7  # nothing is asked again
        assert len(server.requests) == posted
    assert said["left_out"]["kinds"] == {"video_url": 1}
    reasons = {reason["reason"]: reason["examples"] for reason in said["reasons"]}
    assert reasons.keys() == {"image refused"}
    assert any("outside: ../secret.png: the file is not below" in row for row in reasons["image refused"])
    sent = [body["messages"][-1]["content"] for body in server.requests if "messages" in body]
    assert any(part == SOUND for content in sent for part in content)
    assert not any("a.png" in json.dumps(content) for content in sent)  # its bytes are sent
    lines = {line["id"]: line for line in map(json.loads, out.read_text().splitlines()[1:])}
    assert lines["two"]["messages"][1] == {"role": "assistant", "content": "A cat."}
    assert lines["two"]["messages"][0] == asks("What?", "a.png")
    assert [image["place"] for image in lines["two"]["images"]] == ["a.png", "b.png"]
    assert {id for id in lines if lines[id].get("unread")} == {"heard", "fetched", "both"}
    assert any("http://127.0.0.1:1/c.png" in json.dumps(content) for content in sent)  # for the server to fetch
    samples = tmp_path / "samples.arrow"
    said = json.loads(draftkit("data", "prepare", out, samples, "--target", target, "--json").out)
    assert {r["reason"]: r["rows"] for r in said["reasons"]} == {"not read here": 3, "refused by the target": 1}
    made = {sample.id: sample for sample in read_samples(samples)}
    assert made.keys() == {"two", "text", "embedded"}
    assert [span.index for span in made["two"].media] == [0, 1]
    assert [len(made[id].images) for id in ("two", "text", "embedded")] == [2, 0, 1]
    checked = json.loads(draftkit("data", "check", samples, "--target", target, "--skip-model", "--json").out)
    assert "3 images of 2 samples are there, unchanged" in {found["message"] for found in checked["findings"]}


@pytest.mark.slow
def test_rows_that_the_server_reads_otherwise_are_refused(
    target: Path, rows: Path, tmp_path: Path, draftkit: Command
) -> None:
    source, out = written(rows, one=[asks("What?", "a.png")], text=[asks("Why?")]), tmp_path / "out.jsonl"
    opened = open_target(str(target))
    template = opened.tokenizer.chat_template
    opened.tokenizer.chat_template = template.replace("{{ part.text }}", "{{ part.text }} ")
    with CompletionsServer(seeing(opened)) as server:
        ran = draftkit("data", "regenerate", source, out, "--target", target, "--endpoint", server.endpoint, "--json")
    (reason,) = json.loads(ran.out)["reasons"]
    assert (reason["reason"], reason["rows"]) == ("read as other tokens", 1)
    assert "the server reads the messages as" in reason["examples"][0]
    (tmp_path / "secret.png").write_bytes(picture())
    talks = {"outside": [asks("../secret.png")], "one": [asks("What?", "a.png")], "two": [asks("b.png", "And?")]}
    source, out = written(rows, **talks), tmp_path / "other.jsonl"
    with CompletionsServer(seeing(opened)) as server:
        ran = draftkit("data", "regenerate", source, out, "--target", target, "--endpoint", server.endpoint)
    counted = "rows can be answered: read as other tokens 2, image refused 1, as (one|two): the server reads"
    assert re.search(counted, ran.err), ran.err  # whichever was answered first
    assert (ran.code, out.exists()) == (1, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_the_target_answers_in_this_process(kind: str, rows: Path, tmp_path: Path, draftkit: Command) -> None:
    """As transformers generates; a row answers alike beside others."""
    folder = save_visual_target(tmp_path / kind, kind)
    source = written(
        rows,
        two=[asks("What?", "a.png"), OTHERS, asks("b.png", "And this?")],
        text=[asks("Why?")],
        heard=[asks(SOUND)],
    )
    out = tmp_path / "out.jsonl"
    asked = ("data", "regenerate", source, out, "--target", folder, "--max-new-tokens", 4, "--json")
    said = json.loads(draftkit(*asked).out)
    assert (said["rows"], said["left_out"]["kinds"]) == (2, {"input_audio": 1})
    lines = {line["id"]: line for line in map(json.loads, out.read_text().splitlines()[1:])}
    (sequence,) = lines["two"]["sequences"]  # the first answer has no end, which ends the row
    begin, end = sequence["supervised"][0]
    opened = open_target(str(folder)).with_images()
    vision, model = opened.vision, opened.load(device="cpu", dtype=torch.float32)
    read = vision.read([image_file((rows / "a.png").read_bytes())])
    given = vision.of_tokens(sequence["tokens"][:begin], read)
    assert [MediaSpan(*span) for span in sequence["media"]] == list(given.spans)
    ids = torch.tensor([sequence["tokens"][:begin]])
    model.set_attn_implementation("eager")
    generated = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **given.inputs, do_sample=False, max_new_tokens=4
    )
    assert sequence["tokens"][begin:end] == generated[0, begin:].tolist()
