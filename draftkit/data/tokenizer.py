"""The tokenizer of a target, with what the data needs of its configuration; no weights are read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from draftkit.errors import TargetError
from draftkit.loading import OpenedTarget, open_target
from draftkit.targets.chat import template_sha256


@dataclass(frozen=True)
class TargetTokenizer:
    """A tokenizer and the ids that end a turn: the end-of-sequence tokens of tokenizer and generation config."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]

    @cached_property
    def sha256(self) -> str:
        """A digest of the vocabulary, ids included: equal digests read the same ids as the same text."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    @property
    def identity(self) -> dict[str, object]:
        """The marks by which two tokenizers are told apart: digests of vocabulary and chat template, the ids that end
        turns."""
        return {
            "tokenizer_sha256": self.sha256,
            "template_sha256": self.template_sha256,
            "end_ids": sorted(self.end_ids),
        }

    @property
    def template_sha256(self) -> str | None:
        """A digest of the chat template, None where there is none."""
        return template_sha256(self.tokenizer)


def load_tokenizer(target: str | OpenedTarget) -> TargetTokenizer:
    """The tokenizer of a target: a folder, Hub id or `zoo:target`. Raises `DraftkitError` where there is none."""
    target = open_target(target)
    return served_with(target, target.tokenizer)


def served_with(target: OpenedTarget, tokenizer: PreTrainedTokenizerBase) -> TargetTokenizer:
    """The target's tokenizer with the ids that end a turn; `tokenizer` has been loaded from the target's folder."""
    folder = target.config_folder
    end_ids = target.end_ids if (folder / "config.json").is_file() else frozenset()
    end_ids |= {tokenizer.eos_token_id} - {None}
    if not end_ids:
        raise TargetError(
            "nothing says which token ends a turn",
            where=folder,
            expected="eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
        )
    return TargetTokenizer(target.name, tokenizer, end_ids)
