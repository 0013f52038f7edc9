"""The processor of a target that reads images: how many tokens each stands for, and the pixels that the model takes.

transformers expands a placeholder in the rendered text into what stands for the image, and tokenizes the whole. Of a
processor only tokenizer and image processor are loaded: that of videos often demands torchvision, and no video is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from draftkit.errors import TargetError, UnsupportedTarget
from draftkit.io.jsonfile import read_object
from draftkit.media import ImageFile, MediaSpan, RefusedMedia, for_templates, media_of, require_pillow
from draftkit.targets.chat import render, token_ids
from draftkit.targets.media import TYPES
from draftkit.targets.pretrained import trusts_remote_code
from draftkit.version import with_extra

if TYPE_CHECKING:
    from PIL.Image import Image

FILES = ("processor_config.json", "preprocessor_config.json")
OFFSETS = "text_replacement_offsets"
OF_TEXT = ("input_ids", "attention_mask", OFFSETS, *TYPES)


@dataclass(frozen=True)
class ReadImages:
    """What a processor makes of images, in their order: `texts` that stand for each, `counts` of the tokens in each
    that get a row of the image's, and the model's `inputs`, as pixel_values. `types_name`: the input that says which
    tokens these are, where the model takes one."""

    texts: tuple[str, ...]
    counts: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    types_name: str | None = None

    def first(self, number: int) -> ReadImages:
        """The first images alone, of which there are no inputs."""
        return ReadImages(self.texts[:number], self.counts[:number], {}, self.types_name)


@dataclass(frozen=True)
class MediaTokens:
    """A conversation with images as the target takes it: T `tokens`, the `spans` of them that stand for images, and the
    model's other `inputs`, of a batch of one: pixels, and the type of each token (0 text, 1 image) where it takes that.
    """

    tokens: tuple[int, ...]
    spans: tuple[MediaSpan, ...]
    inputs: Mapping[str, Tensor]


class Placeholders(TargetError):
    """A rendered conversation has another number of placeholders than of images."""


class Vision:
    """Reads images for a target with its `processor` of transformers, and `tokenizer`."""

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase):
        self.processor = processor
        self.tokenizer = tokenizer

    @cached_property
    def image_ids(self) -> frozenset[int]:
        """The ids of tokens that stand for a row of an image."""
        return frozenset(token for token in self.processor.image_token_ids if token is not None)

    def read(self, images: Sequence[ImageFile | Image]) -> ReadImages:
        """What the processor makes of images. Raises `RefusedMedia` for a damaged one, and where it fails."""
        if not images:
            return ReadImages((), (), {})
        pixels = [image.pixels() if isinstance(image, ImageFile) else image for image in images]
        placeholders = " ".join([self.processor.image_token] * len(pixels))
        try:
            made = dict(
                self.processor(
                    text=[placeholders], images=pixels, return_tensors="pt", return_text_replacement_offsets=True
                )
            )
            texts = tuple(one["replacement"] for one in made[OFFSETS][0])
        except Exception as error:  # of sizes, of missing settings, of older releases of transformers
            what = "the image" if len(pixels) == 1 else f"the {len(pixels)} images"
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise RefusedMedia(f"the target's processor fails on {what}: {said}") from error
        counts = tuple(sum(id in self.image_ids for id in self._ids(text)) for text in texts)
        inputs = {name: made[name] for name in made if name not in OF_TEXT}
        typed = getattr(self.processor, "return_mm_token_type_ids", False)
        return ReadImages(texts, counts, inputs, next((name for name in TYPES if typed and name in made), None))

    def expand(self, text: str, images: ReadImages) -> str:
        """A rendered conversation with each placeholder replaced by what stands for its image.

        Raises `Placeholders` where there are more or fewer of them than images, as in a text that spells one.
        """
        pieces = text.split(self.processor.image_token)
        if len(pieces) - 1 != len(images.texts):
            raise Placeholders(
                f"the rendered text has {len(pieces) - 1} placeholders {self.processor.image_token} for "
                f"{len(images.texts)} images: the chat template does not place them, or a text spells one"
            )
        return "".join(piece + stands for piece, stands in zip(pieces, (*images.texts, ""), strict=True))

    def ids(self, text: str, images: ReadImages) -> list[int]:
        """The ids of a rendered conversation with its images. Raises `Placeholders`."""
        ids = self._ids(self.expand(text, images))
        self.spans(ids, images)
        return ids

    def encode(self, text: str, images: ReadImages) -> MediaTokens:
        """The tokens of a rendered conversation with its images. Raises `Placeholders`."""
        return self.of_tokens(self._ids(self.expand(text, images)), images)

    def of_tokens(self, tokens: Sequence[int], images: ReadImages) -> MediaTokens:
        """The tokens of a conversation with its images. Raises `Placeholders` as `spans`."""
        types = torch.tensor([[int(token in self.image_ids) for token in tokens]])
        typed = {} if images.types_name is None else {images.types_name: types}
        return MediaTokens(tuple(tokens), self.spans(tokens, images), {**images.inputs, **typed})

    def spans(self, tokens: Sequence[int], images: ReadImages) -> tuple[MediaSpan, ...]:
        """Where tokens stand for images. Raises `Placeholders` where other text holds such a token."""
        places = [place for place, token in enumerate(tokens) if token in self.image_ids]
        if len(places) != sum(images.counts):
            raise Placeholders(f"{len(places)} tokens stand for images, and these take {sum(images.counts)}")
        owners = [index for index, count in enumerate(images.counts) for _ in range(count)]
        spans: list[MediaSpan] = []
        for place, index in zip(places, owners, strict=True):
            last = spans[-1] if spans else None
            if last is not None and last.index == index and last.start + last.length == place:
                spans[-1] = replace(last, length=last.length + 1)
            else:
                spans.append(MediaSpan(place, 1, "image", index))
        return tuple(spans)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[ImageFile | Image], **settings: Any
    ) -> MediaTokens:
        """What the target reads of messages that it is to answer; `settings` are the chat template's.

        Raises `TemplateRejection`, and as `read` and `encode`.
        """
        assert len(media_of(messages)) == len(images)
        text = render(self.tokenizer, for_templates(messages), add_generation_prompt=True, **settings)
        return self.encode(text, self.read(images))

    def _ids(self, text: str) -> list[int]:
        return token_ids(self.tokenizer, text, special=False)


def reads_images(folder: Path) -> bool:
    """Whether a model's folder has a processor of images, which needs neither Pillow nor transformers to be told."""
    return any(
        "image_processor" in found or "image_processor_type" in found or "image_mean" in found or "patch_size" in found
        for found in map(_stated, (folder / name for name in FILES))
    )


def _stated(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def load_vision(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Vision:
    """What reads images for the target in `folder`. Raises `UnsupportedTarget` for one of text alone, or whose
    processor transformers does not have, `DraftkitError` where Pillow or what else it takes is not installed."""
    if not reads_images(folder):
        raise UnsupportedTarget("the target reads text alone: it has no image processor", where=folder)
    require_pillow()
    kind = _processor_class(folder, tokenizer)
    try:
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trusts_remote_code())
        facts, _ = kind.get_processor_dict(folder)
        given = {"image_processor": images, "tokenizer": tokenizer}
        processor = kind.from_args_and_dict([given.get(name) for name in kind.get_attributes()], facts)
    except ImportError as error:
        said = " ".join(str(error).split())
        raise TargetError(
            f"the target's processor takes a package that is not installed: {said}",
            where=folder,
            hint=with_extra("vision") + ", and torchvision for a processor that has no other way",
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TargetError(
            f"transformers cannot load the target's processor: {(str(error) or type(error).__name__).splitlines()[0]}",
            where=folder,
            hint="copy processor_config.json and preprocessor_config.json of the original model into the folder",
        ) from error
    if getattr(processor, "image_token", None) is None or not hasattr(processor, "replace_image_token"):
        raise UnsupportedTarget("the target's processor names no placeholder of images", where=folder)
    return Vision(processor, tokenizer)


def _processor_class(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The target's class of processors, which takes none of videos where it would have one."""
    stated = [*(_stated(folder / name) for name in FILES), tokenizer.init_kwargs]
    model = str(_stated(folder / "config.json").get("model_type"))
    named = next((str(found["processor_class"]) for found in stated if found.get("processor_class")), None)
    kind = getattr(transformers, named or str(PROCESSOR_MAPPING_NAMES.get(model)), None)
    if not isinstance(kind, type) or not issubclass(kind, ProcessorMixin):
        raise UnsupportedTarget(f"transformers has no processor {named or f'for {model}'}", where=folder)

    class ImagesOnly(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            given = argument is not None
            return super().check_argument_for_proper_class(argument_name, argument) if given else type(None)

    ImagesOnly.__name__ = kind.__name__
    return ImagesOnly
