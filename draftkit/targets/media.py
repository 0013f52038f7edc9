"""What a prompt with images has besides its ids: pixels for the target, and what follows from them for the positions
and the masks of its layers.

The names are those of transformers' processors and of its models' forwards. T tokens of a prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from draftkit.errors import DraftkitError, TargetError, UnsupportedTarget

Media = Mapping[str, Tensor]  # of a batch of one prompt
PIXELS = "pixel_values"
TYPES = ("mm_token_type_ids", "token_type_ids")  # what classes of transformers call the type of each token
# Kinds of models whose answers about images were held against transformers' `generate` (tests/runtime/test_images.py).
HELD = frozenset({"qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "llava", "smolvlm"})
OTHERS = {"pixel_values_videos": "videos", "input_features": "audio", "input_values": "audio"}


def check_media(model: PreTrainedModel, media: Media, whose: str) -> None:
    """Raise `DraftkitError` for a prompt with something that the model does not read, or that is not run here yet;
    `whose` it is stands in the message."""
    others = sorted({what for name, what in OTHERS.items() if name in media})
    if others:
        raise DraftkitError(
            f"{whose} has {' and '.join(others)}, which draftkit does not run in its own process yet",
            expected="text and images",
            hint="a server may take it: --server URL, --endpoint URL",
        )
    if PIXELS not in inspect.signature(type(model).forward).parameters:
        raise UnsupportedTarget(
            f"{whose} has images, and {type(model).__name__} reads none",
            expected="a target that transformers builds with its vision tower",
        )


def arguments(model: PreTrainedModel, media: Media) -> dict[str, Tensor]:
    """What the model's forward is given of them; numbers in its dtype, all on its device. Raises as `check_media`."""
    check_media(model, media, "a prompt")
    known = inspect.signature(type(model).forward).parameters
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in media.items()
        if name in known
    }


def of_length(media: Media, length: int) -> Media:
    """The same for `length` tokens that have the same images: the prompt without its end, or with text after it."""
    return {
        name: pad(value[:, :length], (0, length - min(length, value.shape[1]))) if name in TYPES else value
        for name, value in media.items()
    }


@contextmanager
def explained_media(media: Media | None) -> Iterator[None]:
    """Say of what the model finds wrong with images in the body that it is the images."""
    try:
        yield
    except ValueError as error:
        if media is None:
            raise
        first_line = str(error).strip().split("\n", 1)[0]
        raise TargetError(
            f"the target does not take in the images of a prompt: {first_line}",
            hint="its ids and pixels are to come from the target's own processor",
        ) from error


def turns_by_images(model: PreTrainedModel) -> bool:
    """Whether an image moves the rotary positions of what follows it (M-RoPE)."""
    return hasattr(model.base_model, "get_rope_index")


def rotary_positions(model: PreTrainedModel, tokens: Tensor, media: Media) -> tuple[Tensor, Tensor]:
    """Where the layers of a model that `turns_by_images` turn a prompt's `tokens` int64 [1, T] to: int64 [3, 1, T], by
    time, height and width; and how far what follows it is from its place in the sequence: int64 [1]."""
    index = model.base_model.get_rope_index
    known = inspect.signature(index).parameters
    given = {name: value.to(tokens.device) for name, value in media.items() if name in known}
    places, shifts = index(tokens, **given)
    return places, shifts.view(1).to(tokens.device)


def prompt_masks(model: PreTrainedModel, tokens: Tensor, media: Media) -> dict[str, Any]:
    """The argument that says what layers see of a whole prompt, where that is not what came before: those of some
    models see the rows of an image together. bool [1, 1, T, T], or such a mask for each kind of layer, as transformers
    makes them; nothing for other models."""
    own = getattr(model, "create_masks_for_generate", None)
    if own is None or media.keys().isdisjoint(TYPES):
        return {}
    config = deepcopy(model.config.get_text_config())
    config._attn_implementation = "sdpa"  # whose masks are what each row sees
    masks = own(
        config=config,
        inputs_embeds=torch.empty(*tokens.shape, 0, dtype=model.dtype, device=tokens.device),
        attention_mask=None,
        past_key_values=None,
        position_ids=None,
        is_first_iteration=True,
        **{name: value.to(tokens.device) for name, value in media.items() if name in TYPES},
    )
    return {"attention_mask": masks}
