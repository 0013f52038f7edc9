"""Prompts with images for vLLM's offline engine: it expands the placeholder of an image to its tokens by itself, and
would expand those again that are expanded already."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from itertools import groupby
from typing import Any

from draftkit.engines.vllm.worker import PromptTokens
from draftkit.media import ImageFile, MediaSpan


def collapsed(tokens: Sequence[int], spans: Sequence[MediaSpan]) -> list[int]:
    """The tokens with one in the place of all that stand for an image: from the first to the last of its spans."""
    kept: list[int] = []
    end = 0
    for _, group in groupby(spans, lambda span: span.index):
        own = list(group)
        kept += [*tokens[end : own[0].start], tokens[own[0].start]]
        end = own[-1].start + own[-1].length
    return [*kept, *tokens[end:]]


def image_prompt(
    tokens: Sequence[int], spans: Sequence[MediaSpan], images: Sequence[ImageFile], sampling: dict[str, Any]
) -> PromptTokens:
    """What `worker` is asked for a prompt: its images are sent as draftkit reads them, as PNG."""
    asked: PromptTokens = {"tokens": collapsed(tokens, spans), "sampling": sampling}
    return asked | {"images": [_png(image) for image in images]} if images else asked


def _png(image: ImageFile) -> str:
    written = BytesIO()
    image.pixels().save(written, "PNG", compress_level=1)
    return base64.b64encode(written.getvalue()).decode()


def image_arguments(most: int) -> dict[str, object]:
    """The arguments of `vllm.LLM` for prompts with at most so many images, beside those for prompts of tokens alone:
    a processor of images takes the tokenizer."""
    return {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": most, "video": 0}} if most else {}
