"""From what a user names to what the engine runs: targets, and drafts of any known format."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.convert.api import convert_checkpoint
from draftkit.errors import DraftkitError
from draftkit.hub.locate import locate
from draftkit.io.atomic import temporary_folder
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.models.chat import load_tokenizer
from draftkit.models.target import load_target
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Drafter

NGRAM = (2, 4)  # tokens looked up, where the user does not say


def load_model(source: str, *, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target (path, Hub id or `zoo:target`) and its tokenizer. Raises `DraftkitError`."""
    folder = locate(source).path
    model = load_target(folder, device=device, dtype=dtype, attention=ATTENTION)
    return model, load_tokenizer(folder, "target")


def is_ngram(source: str) -> bool:
    """Whether a draft is `ngram` or `ngram:MIN-MAX`: no checkpoint, but a look-up of the last tokens in the text."""
    return source == "ngram" or source.startswith("ngram:")


def ngram_sizes(source: str) -> tuple[int, int]:
    """How many tokens `ngram` or `ngram:MIN-MAX` looks up. Raises `DraftkitError` for other sizes."""
    sizes = re.fullmatch(r"ngram(?::(\d+)-(\d+))?", source)
    if sizes is None:
        raise DraftkitError(f"draft {source}", expected="ngram, or ngram:MIN-MAX, as ngram:2-4")
    return (int(sizes[1]), int(sizes[2])) if sizes[1] else NGRAM


def ngram_drafter(source: str, target: PreTrainedModel) -> NgramDrafter:
    """The drafter of `ngram` or `ngram:MIN-MAX`. Raises `DraftkitError` for other sizes."""
    least, most = ngram_sizes(source)
    return NgramDrafter(target.config.get_text_config().vocab_size, min_n=least, max_n=most, device=target.device)


@contextmanager
def open_draft(source: str, target: str) -> Iterator[Draft]:
    """The unified draft of a source; a foreign checkpoint is converted into a temporary folder on the way."""
    located = locate(source)
    if is_unified(located.path):
        yield read_draft(located.path)
        return
    with temporary_folder() as scratch:
        yield read_draft(convert_checkpoint(source, scratch / "draft", target=target))


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Drafter:
    """The drafter that runs a draft, on the target's device and in its dtype.

    With the target's `tokenizer`, a causal language model may have another one: it drafts the tokens that both share.
    Raises `TargetError` when draft and target do not fit.
    """
    family = importlib.import_module(f"draftkit.runtime.drafters.{draft.spec.architecture.family}")
    drafter: Drafter = family.load_drafter(draft, target, tokenizer)
    return drafter
