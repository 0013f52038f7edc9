"""Text that fills a context: other conversations of the prompt set, none of them twice; and when they are used up, the
reference of the Python language, which is prose and code and part of every Python, so that no set needs the Hub.

Text that comes again is easier to draft than real text, and hides what length does to a draft.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from draftkit.errors import DraftkitError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFERENCE = f"the reference of Python {'.'.join(platform.python_version_tuple()[:2])}"


class Filler:
    """The texts of `conversations`: the first turn of each → all that is said in it. `borrowed`: the most tokens that a
    text has got of the reference."""

    def __init__(self, conversations: Mapping[str, str], tokenizer: PreTrainedTokenizerBase):
        self._conversations = conversations
        self._places = {first: number for number, first in enumerate(conversations)}
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}
        self.borrowed = 0

    def before(self, text: str, tokens: int) -> str:
        """About so many tokens of other texts, beginning with the conversation after the one that begins with `text`.

        Raises `DraftkitError` where there are not as many.
        """
        found: list[int] = []
        self._extend(found, self._others(text), tokens)
        own = len(found)
        self._extend(found, _reference(), tokens)
        if len(found) < tokens:
            raise DraftkitError(
                f"a prompt is to have {tokens:,} tokens before it, and the set and {REFERENCE} have {len(found):,}",
                hint="pass --dataset with more text, as a file of conversations, or a shorter --context",
            )
        self.borrowed = max(self.borrowed, tokens - own)
        return str(self._tokenizer.decode(found[: max(tokens, 0)]))

    def _extend(self, found: list[int], texts: Iterable[str], tokens: int) -> None:
        """Add texts until there are so many tokens."""
        for text in texts:
            if len(found) >= tokens:
                return
            found += self._encoded(text)

    def _others(self, text: str) -> Iterator[str]:
        texts = list(self._conversations.values())
        own = self._places.get(text)
        if own is None:
            return iter(texts)
        return iter([*texts[own + 1 :], *texts[:own]])

    def _encoded(self, text: str) -> list[int]:
        if text not in self._ids:
            from draftkit.targets.chat import token_ids  # needs transformers, as the tokenizer does

            self._ids[text] = token_ids(self._tokenizer, f"{text}\n\n", special=False)
        return self._ids[text]


def _reference() -> Iterable[str]:
    """The topics of the reference, in its order; none of a Python that was installed without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ()
    return topics.values()
