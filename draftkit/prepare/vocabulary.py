"""A model's vocabulary: its tokenizer, the rows of its embedding, and what its special tokens are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftkit.errors import DraftkitError, FormatError, TargetError
from draftkit.hub.locate import Located
from draftkit.io.jsonfile import read_object
from draftkit.layout.target import class_defaults, language_model
from draftkit.targets.chat import TemplateRejection, load_tokenizer, render, token_ids
from draftkit.targets.tokens import TOKENIZERS, Name, named_tokens

ROLES = ("turn end", "turn start", "eos", "bos", "unk", "pad")  # the first that fits a token is its role
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# A conversation with marks that no tokenizer or template changes.
MESSAGES = [
    {"role": "user", "content": "QUESTION"},
    {"role": "assistant", "content": "ANSWER"},
    {"role": "user", "content": "FURTHER"},
]


@dataclass(frozen=True)
class Vocabulary:
    """What a model reads and writes. `size`: its rows, which may be more or fewer than the tokenizer has tokens."""

    name: str
    revision: str | None
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    size: int

    @cached_property
    def named(self) -> dict[int, Name]:
        """Token → what it stands for, in the order in which equal ones are preferred."""
        return dict(named_tokens(self.tokenizer, self.size))

    @property
    def unused(self) -> list[int]:
        """The rows that no token has: padding."""
        return [row for row in range(self.size) if row not in self.named]

    @property
    def beyond(self) -> list[int]:
        """The tokens that no row has."""
        return sorted(token for token in self.tokenizer.get_vocab().values() if token >= self.size)

    @cached_property
    def token_ids(self) -> dict[str, object]:
        """The bos, eos and pad ids that the model's configuration, or else its tokenizer, states."""
        stated = _text_config(self.folder)
        return {
            key: value
            for key in TOKEN_KEYS
            if (value := getattr(self.tokenizer, key) if stated.get(key) is None else stated[key]) is not None
        }

    @cached_property
    def roles(self) -> dict[str, int]:
        """Role → token, for the roles that the tokenizer, the chat template or the configuration give."""
        found: dict[str, object] = dict(zip(("turn end", "turn start"), self._turn_marks(), strict=False))
        for role in ("eos", "bos", "unk", "pad"):
            stated = self.token_ids.get(f"{role}_token_id")
            first = stated[0] if isinstance(stated, list) and stated else stated
            own = getattr(self.tokenizer, f"{role}_token_id")
            found[role] = first if own is None else own
        return {role: token for role in ROLES if isinstance(token := found.get(role), int) and token in self.named}

    def _turn_marks(self) -> Iterator[int]:
        """The special tokens between an answer and the next question: the first ends a turn, the second begins one."""
        if self.tokenizer.chat_template is None:
            return
        try:
            text = render(self.tokenizer, MESSAGES)
        except TemplateRejection:  # a template for conversations of another kind
            return
        between = text.partition(str(MESSAGES[1]["content"]))[2].partition(str(MESSAGES[2]["content"]))[0]
        for token in token_ids(self.tokenizer, between, special=False):
            if isinstance(self.named.get(token), str):
                yield token


def open_vocabulary(source: Located) -> Vocabulary:
    """The vocabulary of a model in a folder; no weights are read.

    Raises `FormatError` for a config without a size, `TargetError` where there is no tokenizer, or a damaged one.
    """
    size = _text_config(source.path).get("vocab_size")
    if type(size) is not int or size <= 0:
        raise FormatError(
            "its config has no vocab_size" if size is None else f"vocab_size is {size!r}",
            where=source.path / "config.json",
            expected="that of a language model",
        )
    if not any(path.name.startswith(TOKENIZERS) for path in source.path.iterdir()):
        raise TargetError("there is no tokenizer", where=source.path, expected="tokenizer.json beside config.json")
    try:
        tokenizer = load_tokenizer(source.path, "model")
    except DraftkitError:
        raise
    except Exception as error:  # whatever the tokenizers library stumbles over
        raise TargetError(f"the tokenizer cannot be read: {error!r}", where=source.path) from error
    return Vocabulary(source.name, source.revision, source.path, tokenizer, size)


def _text_config(folder: Path) -> dict[str, object]:
    """The configuration of the language model, which multi-modal ones keep in an object of its own."""
    config = read_object(folder / "config.json")
    stated = config | language_model(config)
    return stated if stated.get("vocab_size") is not None else stated | class_defaults(config)
