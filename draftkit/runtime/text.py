"""Text from tokens, at the end or as they come."""

from __future__ import annotations

from typing import Protocol

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for the first bytes of a character


class Tokenizer(Protocol):
    """What the engine needs of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """The text of one generation, piece by piece; the pieces joined are the text of all its tokens.

    A token's text may depend on the one before it (a leading space), so each piece is decoded with the piece before it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._previous = 0  # where the tokens of the last piece begin
        self._given = 0  # where those begin whose text was not given yet

    def next(self, tokens: list[int], *, last: bool) -> str:
        """What `tokens`, all so far, add to the text; a character that may be incomplete waits, unless they are all."""
        before = self._decode(tokens[self._previous : self._given])
        text = self._decode(tokens[self._previous :])
        if text.endswith(INCOMPLETE) and not last:
            return ""
        self._previous, self._given = self._given, len(tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
