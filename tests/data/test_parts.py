"""Messages in parts: their text is joined, and rows with images, audio or video are left out, told and not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from transformers.utils import logging

from draftkit.checks.evidence import Asked, Data, Evidence
from draftkit.checks.registry import findings, run_checks
from draftkit.checks.training_data import survey
from draftkit.data.loss_mask import Renderer
from draftkit.data.request_logs import read_request_logs
from draftkit.data.rows import Conversation, LeftOutRows, NotText, parse_row, read_rows, strict_rows
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError, FormatError
from draftkit.evaluate.prompts import load_prompt_set, load_prompts
from draftkit.loading import open_target
from draftkit.train.adapt import AdaptSettings, _requests

torch.set_num_threads(1)
logging.disable_progress_bar()

TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
ANSWER = {"role": "assistant", "content": "A cat."}


def user(content: object, **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


JOINED = {
    "one": ([TEXT], "What is it?"),
    "two": ([TEXT, {"type": "input_text", "text": "Say."}], "What is it?\nSay."),
    "plain": (["What", {"text": "is it?"}], "What\nis it?"),
    "none": ([], ""),
    "as vLLM": ([{"type": "refusal", "refusal": "No."}, {"type": "thinking", "thinking": "Hm."}], "No.\nHm."),
    "gaps of a table": ([TEXT | {"image_url": {"url": None}, "image": None, "index": None}], "What is it?"),
}


@pytest.mark.parametrize("case", JOINED)
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_text_parts_are_joined_as_vllm_joins_them(case: str, role: str) -> None:
    parts, text = JOINED[case]
    row = parse_row({"messages": [{"role": role, "content": parts}, ANSWER]}, "x")
    assert row.content == Conversation(({"role": role, "content": text}, ANSWER))


MEDIA = {
    "url": ({"messages": [user([TEXT, IMAGE]), ANSWER]}, ["image_url"]),
    "no url": ({"messages": [user([{"type": "image_url"}, IMAGE]), ANSWER]}, ["image_url"]),
    "several": ({"messages": [user([IMAGE, {"type": "input_audio"}]), ANSWER]}, ["image_url", "input_audio"]),
    "system": ({"messages": [{"role": "system", "content": [{"type": "video"}]}, user("q")]}, ["video"]),
    "tool": ({"messages": [user("q"), {"role": "tool", "content": [TEXT, {"type": "image"}]}]}, ["image"]),
    "answer": ({"prompt": "q", "completion": [{"role": "assistant", "content": [{"type": "audio"}]}]}, ["audio"]),
    "untyped": ({"messages": [user([{"image": "a.png"}, {"text": "q"}])]}, ["image"]),
    "mistyped": ({"messages": [user([TEXT | {"image_url": "http://x"}])]}, ["image_url"]),
    "a message's": ({"messages": [user("q", images=["iVBORw0KGgo="]), ANSWER]}, ["images"]),
    "a row's": ({"messages": [user("<image>q"), ANSWER], "images": [{"bytes": b"", "path": "a"}]}, ["images"]),
    "beside text": ({"text": "a cat", "image": {"bytes": b"x", "path": None}}, ["image"]),
    "what is new": ({"messages": [user([{"type": "smell", "smell": "rose"}])]}, ["smell"]),
}


@pytest.mark.parametrize("case", MEDIA)
def test_what_is_not_text_is_named_by_its_kind(case: str) -> None:
    record, kinds = MEDIA[case]
    with pytest.raises(NotText, match="the text of messages alone is used here") as caught:
        parse_row(record, "rows.jsonl, line 7")
    assert list(caught.value.kinds) == kinds
    assert "where: rows.jsonl, line 7" in str(caught.value)


@pytest.mark.parametrize(
    "row", [{"images": [], "image": None, "audio": ""}, {"video": {"bytes": None, "path": None}}, {"image_size": 3}]
)
def test_a_row_with_room_for_an_image_is_one_of_text(row: dict[str, object]) -> None:
    assert parse_row(row | {"prompt": "q"}, "x").content == Conversation((user("q"),))


@pytest.mark.parametrize("part", [3, {}, {"type": "text"}, {"type": "text", "text": 3}, {"type": 3, "text": "q"}, None])
def test_a_broken_part_is_named_by_its_place(part: object, tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "q"}, {"messages": [user("q"), user([TEXT, part])]})
    with pytest.raises(FormatError, match=r"rows\.jsonl, line 2, message 2, part 2"):
        list(read_rows(str(path), left_out=LeftOutRows()))


def written(folder: Path, *records: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


WITH_IMAGES: tuple[dict[str, Any], ...] = (
    {"id": "image", "messages": [user([TEXT, IMAGE]), ANSWER]},
    {"id": "text", "messages": [user([TEXT]), ANSWER]},
    {"id": "both", "messages": [user([IMAGE]), {"role": "tool", "content": [{"type": "audio"}]}]},
    {"id": "plain", "messages": [user("Why?"), ANSWER]},
)
TOLD = "2 rows are left out, with parts that are not used (image_url in 2, audio in 1; the first: "


def test_rows_that_are_not_text_are_counted_and_left_out(tmp_path: Path) -> None:
    path, left_out = written(tmp_path, *WITH_IMAGES), LeftOutRows()
    assert [row.id for row in read_rows(str(path), left_out=left_out, limit=2)] == ["text", "plain"]
    assert left_out.to_dict() == {"rows": 2, "kinds": {"image_url": 2, "audio": 1}, "first": f"{path}, line 1"}
    assert str(left_out).startswith(f"{TOLD}{path}, line 1)")
    for more in ({}, {"left_out": LeftOutRows()}):
        with strict_rows(), pytest.raises(NotText, match="without --strict such rows are left out"):
            list(read_rows(str(path), **more))
    with pytest.raises(NotText):
        list(read_rows(str(path)))
    images = written(tmp_path, WITH_IMAGES[0])
    with pytest.raises(FormatError, match=r"no row can be used: 1 row is left out, .*image_url in 1"):
        list(read_rows(str(images), left_out=LeftOutRows()))


def test_images_of_a_table_are_not_decoded(tmp_path: Path) -> None:
    """Whatever they hold, and whether the package that decodes them is installed."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stored = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    images = arrow.array([{"bytes": b"no image", "path": None}, None], stored)
    features = {"prompt": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
    table = arrow.table({"prompt": ["What is it?", "Why?"], "image": images})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, tmp_path / "rows.parquet")
    left_out = LeftOutRows()
    (row,) = read_rows(str(tmp_path / "rows.parquet"), left_out=left_out)
    assert (row.content, dict(left_out.kinds)) == (Conversation((user("Why?"),)), {"image": 1})


@pytest.mark.slow
@pytest.mark.parametrize("command", ["prepare", "regenerate"])
def test_commands_say_what_they_leave_out(command: str, draftkit: Command, tmp_path: Path) -> None:
    path, out = written(tmp_path, *WITH_IMAGES), tmp_path / "out.jsonl"
    asked = ("data", command, path, out, "--target", "zoo:target", "--json")
    strict = draftkit(*asked, "--strict")
    assert (strict.code, f"where: {path}, line 1" in strict.err, out.exists()) == (1, True, False)
    for more in (("--dry-run",), ("--max-new-tokens", 2) if command == "regenerate" else ()):
        ran = draftkit(*asked, *more)
        said = json.loads(ran.out)
        assert (said["rows"], said["left_out"]["rows"]) == (2, 2)
        assert ran.err == f"{TOLD}{path}, line 1): the target reads text alone\n"
    assert "image" not in out.read_text()


def test_requests_with_images_are_left_out_of_a_log(tmp_path: Path) -> None:
    answered = {"request": {"messages": [user("Draw.")]}, "response": {"model": "m", "choices": [{"message": None}]}}
    answered["response"]["choices"] = [{"message": {"role": "assistant", "content": [IMAGE]}}]
    path, left_out = written(tmp_path, *WITH_IMAGES, answered), LeftOutRows()
    found = list(read_request_logs(path, ("m",), left_out))
    assert [entry.row.content.messages[0]["content"] for entry in found] == ["What is it?", "Why?"]  # type: ignore[union-attr]
    assert left_out.rows == 3
    assert len(list(read_request_logs(path, (), LeftOutRows()))) == 3  # whose answer nobody wants may be an image
    with pytest.raises(NotText):
        list(read_request_logs(path))


def test_an_adaptation_says_what_it_leaves_out(tmp_path: Path) -> None:
    log = str(written(tmp_path, *WITH_IMAGES))
    settings = AdaptSettings(draft="d", target="zoo:target", traffic=log, replay=log, out=str(tmp_path / "out"))
    said: list[str] = []
    requests = _requests(settings, open_target("zoo:target"), said.append)
    assert (len(requests.logged), len(requests.general or ()), len(said)) == (2, 2, 2)
    assert all(text.startswith(TOLD) for text in said)
    written(tmp_path, WITH_IMAGES[0])
    with pytest.raises(DraftkitError, match="no requests in the log: 1 row is left out"):
        _requests(settings, open_target("zoo:target"), said.append)


def test_prompts_with_images_are_left_out_of_a_measurement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, *WITH_IMAGES)
    found = load_prompt_set(str(path))
    assert [prompt.text for prompt in found.prompts] == ["What is it?", "Why?"]
    asked = Asked(found.source, [1, 1], found.masked, (1,), None, found.left_out)
    (finding,) = findings(Evidence(asked=asked), "measurement")
    assert (finding.name, finding.severity, finding.message.startswith(TOLD)) == ("prompts-left-out", "warning", True)
    assert len(load_prompts(str(path))) == 2
    assert TOLD in caplog.text  # where no result says it
    with strict_rows(), pytest.raises(NotText):
        load_prompt_set(str(path))
    with pytest.raises(FormatError, match="the set holds no prompts: 1 row is left out"):
        load_prompt_set(str(written(tmp_path, WITH_IMAGES[0])))


@pytest.mark.parametrize(
    "content", [str([TEXT, IMAGE]), json.dumps([{"type": "input_image"}]), "data:audio/mp3;base64,AA"]
)
def test_images_that_were_written_into_samples_are_found(content: str) -> None:
    target = load_tokenizer("zoo:target")
    tokens = target.tokenizer(content).input_ids
    samples = [Sample.of("a", tokens, [(1, 2)]), Sample.of("b", tokens[:3], [(1, 2)])]
    origin = SamplesOrigin("zoo:target", target.sha256)
    data = Data(Path("data.jsonl"), origin, survey(samples, origin, target, 4096), target)
    found = dict(run_checks(Evidence(data=data), "training_data"))["media"]
    assert (found.severity, found.where) == ("error", "data.jsonl, a")


def test_a_message_without_content_is_no_word() -> None:
    row = parse_row({"messages": [{"role": "system", "content": None}, user("q")]}, "x")
    assert isinstance(row.content, Conversation)
    target = load_tokenizer("zoo:target")
    tokens = Renderer(target, template=False).prompt(row.content.messages)
    assert target.tokenizer.decode(tokens, skip_special_tokens=True).strip() == "q"
