"""Prompts with images for vLLM's offline engine."""

from __future__ import annotations

import base64

from fixtures.checkpoints.processors import picture
from hypothesis import given
from hypothesis import strategies as st

from draftkit.engines.vllm.images import collapsed, image_arguments, image_prompt
from draftkit.engines.vllm.worker import media_of
from draftkit.media import MediaSpan, image_file

PLACE = 310


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(1, 5), min_size=1, max_size=3)), max_size=4))
def test_one_token_stands_for_each_image(images: list[tuple[int, list[int]]]) -> None:
    """Of an image with several spans, as of tiles, all between the first and the last goes with them."""
    tokens, spans, expected = [1], [], [1]
    for index, (before, tiles) in enumerate(images):
        tokens += [2] * before
        for size in tiles:
            spans.append(MediaSpan(len(tokens), size, "image", index))
            tokens += [PLACE] * size + [3]
        expected += [2] * before + [PLACE, 3]
    assert collapsed(tokens, spans) == expected


def test_the_worker_sees_the_pixels_that_draftkit_reads() -> None:
    image = image_file(picture(30, 20))
    spans = [MediaSpan(1, 2, "image", 0)]
    asked = image_prompt([5, PLACE, PLACE, 6], spans, [image], {"max_tokens": 1})
    assert asked["tokens"] == [5, PLACE, 6]
    (seen,) = media_of(asked)["multi_modal_data"]["image"]
    assert (seen.mode, seen.tobytes()) == ("RGB", image.pixels().tobytes())
    assert base64.b64decode(asked["images"][0])[:4] == b"\x89PNG"


def test_prompts_of_tokens_alone_are_as_they_were() -> None:
    assert image_prompt([5, 6], [], [], {}) == {"tokens": [5, 6], "sampling": {}}
    assert media_of({"tokens": [5], "sampling": {}}) == {}
    assert image_arguments(0) == {}
    assert image_arguments(2)["skip_tokenizer_init"] is False
