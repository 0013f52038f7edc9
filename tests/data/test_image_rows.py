"""Rows with images become samples: what the target reads, which tokens stand for which image, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints.processors import KINDS, data_uri, picture, save_processor, save_visual_target
from fixtures.checkpoints.visual import IMAGE, visual_config
from transformers.utils import logging

from draftkit.data.arrow import ArrowSamples
from draftkit.data.loss_mask import Renderer
from draftkit.data.prepare import prepare, samples_of
from draftkit.data.rows import Conversation, Row, read_rows, rows_read_by
from draftkit.data.sample_files import (
    media_folder,
    open_images,
    open_samples,
    read_samples,
    samples_sha256,
    write_samples,
)
from draftkit.data.samples import Reason, RowCounts, Sample, SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import FormatError
from draftkit.loading import OpenedTarget, open_target
from draftkit.media import FiledMedium, MediaSpan, RefusedMedia, for_templates, image_file
from draftkit.targets.chat import render

torch.set_num_threads(1)
logging.disable_progress_bar()


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(place: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": place}}


def turn(role: str, *parts: object) -> dict[str, Any]:
    return {"role": role, "content": parts[0] if isinstance(parts[0], str) else list(parts)}


ASKED = turn("user", text("What is it?"), image("pictures/a.png"))
ANSWERED = turn("assistant", "A cat.")
TWICE = [ASKED, ANSWERED, turn("user", image("pictures/b.png"), text("And this?")), turn("assistant", "A dog.")]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder with images beside a file of rows."""
    (tmp_path / "rows" / "pictures").mkdir(parents=True)
    for number, name in enumerate(("a", "b")):
        (tmp_path / "rows" / "pictures" / f"{name}.png").write_bytes(picture(56 + 28 * number, 28, number))
    return tmp_path / "rows"


def written(folder: Path, *records: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def target_of(kind: str, folder: Path) -> OpenedTarget:
    if kind == "smolvlm":
        pytest.importorskip("num2words")
    save_processor(folder / "target", kind)
    visual_config(kind).save_pretrained(folder / "target")
    return open_target(str(folder / "target"))


def renderer_of(target: OpenedTarget) -> Renderer:
    return Renderer(load_tokenizer(target), load_vision=lambda: target.vision)


def made(target: OpenedTarget, source: str, max_length: int | None = None) -> tuple[list[Sample], RowCounts]:
    report = RowCounts()
    given = read_rows(source, left_out=rows_read_by(target))
    return list(samples_of(given, renderer_of(target), report, max_length)), report


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_what_the_target_reads(kind: str, rows: Path, tmp_path: Path) -> None:
    target = target_of(kind, tmp_path)
    (sample,), report = made(target, written(rows, {"id": "two", "messages": TWICE}))
    assert not report.tallies
    vision = target.vision
    whole = render(target.tokenizer, for_templates(TWICE))
    folder = [rows / "pictures" / f"{name}.png" for name in "ab"]
    images = [image.place for image in sample.images]
    assert images == ["pictures/a.png", "pictures/b.png"]
    read = vision.read([image_file(path.read_bytes()) for path in folder])
    expected = vision.encode(whole, read)
    assert sample.tokens.tolist() == list(expected.tokens)[: len(sample)]
    assert len(expected.tokens) - len(sample) <= 1  # a line end after the last end of turn
    assert sample.media == expected.spans
    assert not sample.loss_mask[sample.tokens == IMAGE].any()
    labels = [target.tokenizer.decode(sample.tokens[begin:end].tolist()) for begin, end in sample.spans]
    assert labels == ["A cat.</s>", "A dog.</s>"]


def test_samples_are_stored_with_their_images(rows: Path, tmp_path: Path) -> None:
    target = target_of("qwen2_5_vl", tmp_path)
    uri = data_uri(picture(28, 28, 7))
    talks = {"two": TWICE, "text": [turn("user", "Why?"), ANSWERED]}
    talks["embedded"] = [turn("user", image(uri), text("?")), ANSWERED]
    source = written(rows, *({"id": id, "messages": messages} for id, messages in talks.items()))
    digests, tables = set(), []
    for out in (tmp_path / "data.jsonl", tmp_path / "data.arrow", tmp_path / "elsewhere" / "data"):
        given = read_rows(source, left_out=rows_read_by(target))
        report = prepare(given, renderer_of(target), out, media_root=rows)
        assert (report.samples, report.tallies) == (3, {})
        samples = list(read_samples(out))
        tables.append([(s.id, s.tokens.tolist(), s.spans, s.media, s.images) for s in samples])
        assert [len(sample.images) for sample in samples] == [2, 0, 1]
        assert samples[2].images[0].place == uri
        folder = media_folder(out)
        assert [found.data for found in open_images(samples[0], folder)] == [
            picture(56, 28, 0), picture(84, 28, 1)
        ]  # fmt: skip
        assert open_images(samples[2], folder)[0].data == picture(28, 28, 7)
        digests.add(samples_sha256(out))
        assert open_samples(out)[0].media == samples[0].media
    assert tables[0] == tables[1] == tables[2]
    assert len(digests) == 2  # of JSONL, and of Arrow however it lies
    (rows / "pictures" / "a.png").write_bytes(picture(56, 28, 3))
    with pytest.raises(RefusedMedia, match=r"sample two: pictures/a.png is another image than when it was prepared"):
        open_images(samples[0], folder)
    moved = rows.rename(tmp_path / "moved")
    with pytest.raises(RefusedMedia, match=r"sample two: .*cannot be read.*\n  next: .*--media-root names"):
        open_images(samples[0], folder)
    (moved / "pictures" / "a.png").write_bytes(picture(56, 28, 0))
    assert len(open_images(samples[0], media_folder(out, moved))) == 2


def test_the_digest_tells_images_apart(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    plain = Sample.of("a", [1, 2, 3], [(2, 3)])
    seen = replace(plain, media=(MediaSpan(0, 2, "image", 0),), images=(FiledMedium("a.png", "0" * 64),))
    digests = set()
    for number, sample in enumerate([plain, seen, replace(seen, images=(FiledMedium("a.png", "1" * 64),))]):
        write_samples(tmp_path / f"{number}.arrow", [sample], SamplesOrigin("t", "x"))
        digests.add(ArrowSamples(tmp_path / f"{number}.arrow").sha256())
    assert len(digests) == 3


DAMAGED: dict[str, dict[str, Any]] = {
    "beyond the tokens": {"media": [[0, 4, "image", 0]]},
    "nothing": {"media": [[0, 0, "image", 0]]},
    "before the first": {"media": [[-1, 2, "image", 0]]},
    "twice": {"media": [[0, 2, "image", 0], [1, 1, "image", 0]]},
    "of no image": {"media": [[0, 2, "image", 1]]},
    "of a sound": {"media": [[0, 2, "audio", 0]]},
    "true": {"media": [[True, 2, "image", 0]]},
    "no span": {"media": []},
    "no list": {"media": 3},
    "short": {"media": [[0, 2]]},
    "no digest": {"images": [{"place": "a.png", "sha256": "0"}]},
    "no place": {"images": [{"place": 3, "sha256": "0" * 64}]},
    "another key": {"images": [{"path": "a.png", "sha256": "0" * 64}]},
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_spans_are_named_by_their_line(case: str, tmp_path: Path) -> None:
    line = {"id": "a", "category": "all", "tokens": [1, 2, 3], "supervised": [[2, 3]]}
    line |= {"media": [[0, 2, "image", 0]], "images": [{"place": "a.png", "sha256": "0" * 64}]}
    header = {"format": "draftkit-documents", "version": 1, "origin": {"target": "t", "tokenizer_sha256": "x"}}
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(header)}\n{json.dumps(line)}\n")
    assert len(next(read_samples(path)).media) == 1
    path.write_text(f"{json.dumps(header)}\n{json.dumps(line | DAMAGED[case])}\n")
    with pytest.raises(FormatError, match=r"not a sample: .*\n  where: .*data\.jsonl, line 2"):
        list(read_samples(path))


REFUSED: dict[str, tuple[list[dict[str, Any]], Reason, str]] = {
    "outside": ([turn("user", image("../secret.png")), ANSWERED], Reason.BAD_IMAGE, "not below the folder"),
    "missing": ([turn("user", image("none.png")), ANSWERED], Reason.BAD_IMAGE, "none.png: the file cannot be read"),
    "address": ([turn("user", image("https://host/a.png")), ANSWERED], Reason.BAD_IMAGE, "never fetched here"),
    "truncated": ([turn("user", image("cut.png")), ANSWERED], Reason.BAD_IMAGE, "the image is damaged"),
    "too narrow": ([turn("user", image("narrow.png")), ANSWERED], Reason.BAD_IMAGE, "processor fails on the image"),
    "spelled": ([turn("user", text("<|image_pad|>"), image("pictures/a.png")), ANSWERED], Reason.UNPLACED, "2 place"),
    "no answer": ([ASKED], Reason.NO_SPAN, "no-answer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_are_refused_by_name_and_counted(case: str, rows: Path, tmp_path: Path) -> None:
    (rows.parent / "secret.png").write_bytes(picture())
    (rows / "cut.png").write_bytes(picture()[:-60])
    (rows / "narrow.png").write_bytes(picture(2100, 10))
    messages, reason, detail = REFUSED[case]
    target = target_of("qwen2_5_vl", tmp_path)
    good = {"id": "good", "messages": TWICE}
    samples, report = made(target, written(rows, {"id": case.replace(" ", "-"), "messages": messages}, good))
    assert ([sample.id for sample in samples], report.rows, [*report.tallies]) == (["good"], 2, [reason])
    assert report.tallies[reason].count == 1
    assert detail in report.tallies[reason].examples[0]


def test_the_length_limit_cuts_no_image(rows: Path, tmp_path: Path) -> None:
    target = target_of("llava", tmp_path)
    source = written(rows, {"id": "two", "messages": TWICE})
    (whole,), _ = made(target, source)
    first, second = whole.media
    for length in range(first.start, len(whole) + 1):
        samples: list[Sample] = []
        with suppress(FormatError):  # none of the rows can be used
            samples, _ = made(target, source, length)
        inside = [span for span in whole.media if span.start < length]
        cut = any(span.start + span.length > length for span in inside)
        assert bool(samples) == (not cut and whole.loss_mask[1:length].any())
        for sample in samples:
            assert sample.media == tuple(inside)
            assert sample.images == whole.images[: len(inside)]
            assert sample.tokens.tolist() == whole.tokens[:length].tolist()
    assert second.start > first.start


def test_a_template_that_places_no_image_refuses_the_row(rows: Path, tmp_path: Path) -> None:
    target = target_of("qwen2_5_vl", tmp_path)
    target.tokenizer.chat_template = target.tokenizer.chat_template.replace("<|image_pad|>", "")
    with pytest.raises(FormatError, match=r"images not placed: 1 .*0 placeholders <\|image_pad\|> for 1 images"):
        made(target, written(rows, {"id": "a", "messages": [ASKED, ANSWERED]}))


def test_generation_tags_count_from_the_end(rows: Path, tmp_path: Path) -> None:
    target = target_of("qwen2_5_vl", tmp_path)
    said = "{{ message.content }}"
    tagged = "{% if message.role == 'assistant' %}{% generation %}" + said + "{% endgeneration %}{% else %}"
    target.tokenizer.chat_template = target.tokenizer.chat_template.replace(said, tagged + said + "{% endif %}", 1)
    (sample,), _ = made(target, written(rows, {"id": "two", "messages": TWICE}))
    labels = [target.tokenizer.decode(sample.tokens[begin:end].tolist()) for begin, end in sample.spans]
    assert labels == ["A cat.</s>", "A dog.</s>"]


def test_a_target_of_text_leaves_images_out(rows: Path) -> None:
    left_out = rows_read_by(open_target("zoo:target"))
    source = written(rows, {"id": "a", "messages": TWICE}, {"id": "b", "prompt": "Why?"})
    assert [row.id for row in read_rows(source, left_out=left_out)] == ["b"]
    assert str(left_out).endswith("(image_url in 1; the first: " + source + ", line 1): the target reads text alone")


def test_an_empty_list_of_parts_is_no_text(rows: Path, tmp_path: Path) -> None:
    target = target_of("qwen2_5_vl", tmp_path)
    (sample,), _ = made(target, written(rows, {"id": "a", "messages": [{"role": "user", "content": []}, ANSWERED]}))
    assert sample.images == ()


def test_the_digest_of_a_row_is_of_its_images_too() -> None:
    rows = [Row("a", "all", "x", Conversation((turn("user", image(place)),))) for place in ("a.png", "b.png")]
    assert rows[0].sha256 != rows[1].sha256


@pytest.mark.slow
def test_commands_prepare_and_check(draftkit: Command, rows: Path, tmp_path: Path) -> None:
    target = save_visual_target(tmp_path / "target", "qwen2_5_vl")
    outside = {"id": "outside", "messages": [turn("user", image("/etc/passwd")), ANSWERED]}
    source = written(rows, {"id": "two", "messages": TWICE}, outside)
    out = tmp_path / "samples" / "data.jsonl"
    ran = draftkit("data", "prepare", source, out, "--target", target, "--json")
    said = json.loads(ran.out)
    assert (said["documents"], [reason["reason"] for reason in said["reasons"]]) == (1, ["image refused"])
    checked = ("data", "check", out, "--target", target, "--skip-model", "--json")
    found = {finding["name"]: finding for finding in json.loads(draftkit(*checked).out)["findings"]}
    assert found["images"]["message"] == "2 images of 1 samples are there, unchanged"
    rows.rename(tmp_path / "moved")
    ran = draftkit(*checked)
    found = {finding["name"]: finding for finding in json.loads(ran.out)["findings"]}
    assert (ran.code, found["images"]["severity"]) == (1, "error")
    assert "pictures/a.png: the file cannot be read: No such file" in found["images"]["where"]
    assert draftkit(*checked, "--media-root", tmp_path / "moved").code == 0
    ran = draftkit("data", "check", out, "--target", "zoo:target", "--skip-model", "--json")
    assert "reads text alone" in ran.out
