"""Targets that read images or sounds, without what reads them, where they are given text alone.

transformers builds the language model of some kinds by itself. Of the others it builds all parts; those beside the
language model are taken out as soon as they are built, when they have no memory yet, and their weights are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from draftkit.targets.states import decoder_of

# What transformers 5.23 calls the parts that lie beside a language model and that a forward of text does not enter.
PARTS = frozenset({
    "aligner", "audio_tower", "connector", "image_tower", "merger", "mm_projector", "multi_modal_projector",
    "projector", "video_tower", "vision_adapter", "vision_encoder", "vision_model", "vision_projection",
    "vision_tower", "visual",
})  # fmt: skip
ENTERED = {"qwen2_audio": {"audio_tower"}}  # by a forward of text, by type of model


@contextmanager
def text_alone(kind: type[PreTrainedModel] | None) -> Iterator[None]:
    """Models of a class are built in the body without what reads images and sounds; None changes nothing."""
    if kind is None:
        yield
        return
    usual = kind.__init__

    def build(model: PreTrainedModel, *arguments: object, **options: object) -> None:
        usual(model, *arguments, **options)
        _take_out(model)

    kind.__init__ = build
    try:
        yield
    finally:
        kind.__init__ = usual


def _take_out(model: PreTrainedModel) -> None:
    decoder, taken = decoder_of(model), PARTS - ENTERED.get(model.config.model_type, set())
    beside = [
        (part, name)
        for part in model.modules()
        if any(child is decoder for child in part.children())
        for name, _ in part.named_children()
        if name in taken
    ]
    for part, name in beside:
        delattr(part, name)
    names = {name for _, name in beside}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, *(rf"(^|\.){re.escape(name)}\." for name in names)}


def is_left_out(model: PreTrainedModel, weight: str) -> bool:
    """Whether a weight of the checkpoint is of what a model has no part for: what was taken out of it, or what
    transformers passes over for its kind."""
    return any(re.search(pattern, weight) for pattern in model._keys_to_ignore_on_load_unexpected or ())
