"""Processors of targets that read images: what is expanded and marked is what transformers' own call makes."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints.processors import BEGIN, IMAGE, KINDS, picture, save_processor

from draftkit.errors import DraftkitError, UnsupportedTarget
from draftkit.media import ImageFile, RefusedMedia, for_templates, image_file
from draftkit.targets.chat import load_tokenizer, render
from draftkit.targets.vision import Placeholders, Vision, load_vision, reads_images

torch.set_num_threads(1)
WHAT, WHY = {"type": "text", "text": "What is it?"}, {"type": "text", "text": "Why?"}
SEEN = {"type": "image_url", "image_url": {"url": "a.png"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [WHAT, SEEN, SEEN]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": [SEEN, WHY]},
]
IMAGES = [image_file(picture(56, 28)), image_file(picture(84, 56, 1)), image_file(picture(28, 28, 2))]


def vision_of(kind: str, folder: Path) -> Vision:
    if kind == "smolvlm":
        pytest.importorskip("num2words")
    save_processor(folder, kind)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return load_vision(folder, load_tokenizer(folder, "target"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_target_reads_is_what_the_processor_makes(kind: str, tmp_path: Path) -> None:
    vision = vision_of(kind, tmp_path)
    made = vision.prompt(MESSAGES, IMAGES)
    text = render(vision.tokenizer, for_templates(MESSAGES), add_generation_prompt=True)
    pixels = [image.pixels() for image in IMAGES]
    whole = vision.processor(text=[text], images=pixels, return_tensors="pt", add_special_tokens=False)
    assert list(made.tokens) == whole.pop("input_ids")[0].tolist()
    whole.pop("attention_mask")
    if kind in ("llava", "smolvlm"):
        whole.pop("token_type_ids", None)  # of the tokenizer
    assert made.inputs.keys() == whole.keys()
    for name, value in made.inputs.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
    marked = {place for span in made.spans for place in range(span.start, span.start + span.length)}
    assert marked == {place for place, token in enumerate(made.tokens) if token == IMAGE}
    assert [span.index for span in made.spans] == sorted(span.index for span in made.spans)
    assert {span.index for span in made.spans} == {0, 1, 2}
    assert list(made.spans) == sorted(made.spans)


def test_a_tile_is_a_span_of_its_image(tmp_path: Path) -> None:
    made = vision_of("smolvlm", tmp_path).prompt([MESSAGES[0]], IMAGES[:2])
    assert [span.index for span in made.spans] == [0] * 3 + [1] * 5  # two tiles and four, and each image as a whole
    assert {span.length for span in made.spans} == {4}


def test_images_side_by_side_are_two_spans(tmp_path: Path) -> None:
    vision = vision_of("llava", tmp_path)
    made = vision.encode("<image><image>", vision.read(IMAGES[:2]))
    assert [astuple(span) for span in made.spans] == [(0, 16, "image", 0), (16, 16, "image", 1)]
    assert vision.encode("no image", vision.read([])).spans == ()


@pytest.mark.parametrize("text", ["", "<|image_pad|>", "<|image_pad|> <|image_pad|> <|image_pad|>"])
def test_placeholders_that_are_not_those_of_the_images(text: str, tmp_path: Path) -> None:
    vision = vision_of("qwen2_5_vl", tmp_path)
    with pytest.raises(Placeholders, match=r"placeholders <\|image_pad\|> for 2 images"):
        vision.encode(text, vision.read(IMAGES[:2]))


def test_a_text_that_spells_the_token_of_an_image(tmp_path: Path) -> None:
    vision = vision_of("gemma3", tmp_path)
    with pytest.raises(Placeholders, match="5 tokens stand for images, and these take 4"):
        vision.encode("<image_soft_token><start_of_image>", vision.read(IMAGES[:1]))
    assert vision.encode("<start_of_image>", vision.read(IMAGES[:1])).tokens.count(BEGIN) == 1


def test_a_processor_that_fails_says_so(tmp_path: Path) -> None:
    vision = vision_of("qwen2_5_vl", tmp_path)
    with pytest.raises(RefusedMedia, match=r"the target's processor fails on the image: absolute aspect ratio"):
        vision.read([image_file(picture(2100, 10))])
    whole = IMAGES[0]
    with pytest.raises(RefusedMedia, match="damaged"):
        vision.read([ImageFile(whole.data[:-60], whole.format, whole.width, whole.height)])


def test_both_forms_of_a_processors_files(tmp_path: Path) -> None:
    """In one file, as transformers writes it now; with the template where processors kept it once."""
    vision = vision_of("llava", tmp_path / "old")
    expected = vision.prompt(MESSAGES, IMAGES)
    new = tmp_path / "new"
    vision.processor.save_pretrained(new)
    assert "image_processor" in json.loads((new / "processor_config.json").read_text())
    assert not (new / "preprocessor_config.json").exists()
    (new / "chat_template.jinja").unlink()
    (new / "config.json").write_text(json.dumps({"model_type": "llava"}))
    assert load_tokenizer(new, "target").chat_template is None
    (new / "chat_template.json").write_text(json.dumps({"chat_template": vision.tokenizer.chat_template}))
    assert reads_images(new)
    made = load_vision(new, load_tokenizer(new, "target")).prompt(MESSAGES, IMAGES)
    assert (made.tokens, made.spans) == (expected.tokens, expected.spans)
    torch.testing.assert_close(made.inputs["pixel_values"], expected.inputs["pixel_values"], rtol=0, atol=0)


def test_targets_without_a_processor(tmp_path: Path) -> None:
    save_processor(tmp_path, "llava")
    tokenizer = load_tokenizer(tmp_path, "target")
    named = json.loads((tmp_path / "processor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps(named | {"processor_class": "NoSuchProcessor"}))
    with pytest.raises(UnsupportedTarget, match="transformers has no processor NoSuchProcessor"):
        load_vision(tmp_path, tokenizer)
    (tmp_path / "processor_config.json").write_text(json.dumps(named))
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchImageProcessor"}')
    with pytest.raises(DraftkitError, match="transformers cannot load the target's processor"):
        load_vision(tmp_path, tokenizer)
    assert reads_images(tmp_path)
    for file in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / file).unlink()
    with pytest.raises(UnsupportedTarget, match="reads text alone"):
        load_vision(tmp_path, tokenizer)
