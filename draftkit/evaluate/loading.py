"""From what a user names to what the engine runs: targets, and drafts of any known format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.convert.api import convert_checkpoint
from draftkit.errors import DraftkitError, TargetError
from draftkit.hub import locate
from draftkit.layout.atomic import temporary_folder
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.layout.spec import CausalLMSpec, EagleSpec, MedusaSpec, MlpSpeculatorSpec
from draftkit.models.chat import load_tokenizer
from draftkit.models.loading import load_causal_lm, load_eagle, load_medusa, load_mlp_speculator, load_pard2
from draftkit.models.target import load_target
from draftkit.models.tokens import same_vocabulary
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.medusa import MedusaDrafter
from draftkit.runtime.drafters.mlp_speculator import MlpSpeculatorDrafter
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.p_eagle import PEagleDrafter
from draftkit.runtime.drafters.pard import Pard2Drafter, PardDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.drafters.shared_vocabulary import SharedVocabulary

NGRAM = (2, 4)  # tokens looked up, where the user does not say
TOKENIZERS = ("tokenizer.", "tekken.", "vocab.", "spiece.")  # how the files begin that tokenizers are loaded from


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


def load_drafter(
    draft: Draft,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    target_features: bool = True,
) -> Drafter:
    """The drafter that runs a draft, on the target's device and in its dtype.

    With the target's `tokenizer`, a causal language model may have another one: it drafts the tokens that both share.
    `target_features` False runs PARD-2 without the target's hidden states. Raises `TargetError` when draft and target
    do not fit.
    """
    match draft.spec.architecture:
        case EagleSpec(parallel=None):
            return EagleDrafter(load_eagle(draft, target, attention=ATTENTION))
        case EagleSpec():
            return PEagleDrafter(load_eagle(draft, target, attention=ATTENTION))
        case MlpSpeculatorSpec():
            return MlpSpeculatorDrafter(load_mlp_speculator(draft, target))
        case MedusaSpec():
            return MedusaDrafter(load_medusa(draft, target))
        case CausalLMSpec(parallel=parallel, target_features=features) as lm:
            vocabulary = _shared_vocabulary(draft, lm.vocab_size, target, tokenizer)
            head_ids = None if lm.head_ids is None else torch.tensor(lm.head_ids, device=target.device)
            if parallel is None:
                return CausalLMDrafter(load_causal_lm(draft, target, attention=ATTENTION), vocabulary, head_ids)
            mask = parallel.mask_token_id
            if features is None or not target_features:
                return PardDrafter(load_causal_lm(draft, target, attention=ATTENTION), mask, vocabulary, head_ids)
            return Pard2Drafter(*load_pard2(draft, target, attention=ATTENTION), mask, vocabulary, head_ids)


def _shared_vocabulary(
    draft: Draft, draft_vocab_size: int, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> SharedVocabulary | None:
    """What draft and target share, None where their vocabularies are the same."""
    vocab_size = target.config.get_text_config().vocab_size
    has_tokenizer = any(path.name.startswith(TOKENIZERS) for path in draft.files)
    if tokenizer is None or not has_tokenizer:
        if draft_vocab_size == vocab_size:
            return None
        raise TargetError(
            f"the draft has {draft_vocab_size} tokens, the target {vocab_size}",
            where=draft.path,
            hint="pass a draft with the target's vocabulary, or one with its tokenizer",
        )
    own = load_tokenizer(draft.path, "draft")
    if draft_vocab_size == vocab_size and same_vocabulary(tokenizer, own, vocab_size):
        return None
    return SharedVocabulary.of(
        tokenizer, own, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, device=target.device
    )
