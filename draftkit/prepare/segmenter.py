"""A tokenizer's own way to write given bytes, without what it does to the beginning of a text."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftkit.errors import FormatError
from draftkit.targets.tokens import CHARACTER_OF, SPACE, is_byte_level, words_of

ASCII = set(range(0x20, 0x7F))


class Segmenter:
    """Cuts bytes into a tokenizer's tokens with its merges or scores alone.

    Normalization and pre-tokenization, with the space that some tokenizers put before a text, belong to texts and not
    to the tokens that a text consists of. Raises `FormatError` for tokenizers whose tokens do not go down to bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        check_kind(tokenizer, name)
        backend = tokenizer.backend_tokenizer
        self._model = backend.model
        self._ids = {word: token for token, word in words_of(tokenizer).items()}
        self._byte_level = is_byte_level(self._ids)
        alphabet = CHARACTER_OF if self._byte_level else {byte: f"<0x{byte:02X}>" for byte in range(0x100)}
        self._bytes = {byte: self._ids[word] for byte, word in alphabet.items() if word in self._ids}
        falls_back = self._byte_level or json.loads(backend.to_str())["model"].get("byte_fallback")
        if not falls_back or not self._bytes.keys() >= ASCII:  # rare bytes are missing in many, as 0xF1 in SmolLM2's
            raise FormatError(
                f"the tokenizer of {name} has no tokens for single bytes, so there is text that it cannot write",
                expected="byte-level BPE, or BPE or unigrams with byte fallback",
            )

    def pieces(self, text: bytes) -> tuple[int, ...]:
        """The tokens that `text` is cut into; bytes that are not UTF-8 are tokens of their own. Bytes that
        no token stands for are missing."""
        if self._byte_level:
            return self._cut("".join(CHARACTER_OF[byte] for byte in text))
        try:
            return self._cut(text.decode().replace(" ", SPACE))
        except UnicodeDecodeError:
            return tuple(self._bytes[byte] for byte in text if byte in self._bytes)

    def _cut(self, word: str) -> tuple[int, ...]:
        return tuple(piece.id for piece in self._model.tokenize(word))


def check_kind(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `FormatError` for a tokenizer whose tokens do not stand for bytes: WordPiece, words, word endings."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise FormatError(
            f"{name} has a {type(tokenizer).__name__}, which the tokenizers library does not run",
            expected="a model with a tokenizer.json",
        )
    kind = type(backend.model).__name__
    if kind not in ("BPE", "Unigram"):
        raise FormatError(f"the tokenizer of {name} is of the kind {kind}", expected="BPE or Unigram")
    for marker in ("continuing_subword_prefix", "end_of_word_suffix"):
        if written := getattr(backend.model, marker, None):
            raise FormatError(f"the tokenizer of {name} marks words: {marker} is {written!r}", expected="no such mark")
