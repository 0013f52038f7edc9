"""Prompts, and how the target sees them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftkit.errors import TargetError
from draftkit.targets.chat import TemplateRejection, render, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One question: an id, a category for grouping, and the user's turns. `plain`: a text to go on with as it is, to
    which no chat template belongs. `system`: the system message, where there is one. `tools`: whether the row has some,
    or calls them."""

    id: str
    category: str
    turns: tuple[str, ...]
    plain: bool = False
    system: str = ""
    tools: bool = False

    @property
    def opening(self) -> list[Message]:
        """What stands before the first turn."""
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a set that `load_prompt_set` takes; of rows that are left out, the log tells."""
    from draftkit.evaluate.datasets import load_prompt_set

    found = load_prompt_set(source, limit)
    if found.left_out.rows:
        _log.warning("%s", found.left_out)
    return found.prompts


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None, template: bool | None = None
) -> tuple[int, ...]:
    """The ids the target sees of the first turn, as `encode_messages` makes them."""
    template = False if template is None and prompt.plain else template
    return encode_messages([*prompt.opening, {"role": "user", "content": prompt.text}], tokenizer, thinking, template)


def encode_messages(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None = None,
    template: bool | None = None,
) -> tuple[int, ...]:
    """The ids of a conversation that the target is to go on with: the chat template applied once where there is one,
    else the texts line by line. `template` False takes the texts anyway, True raises `TargetError` where there is none.

    A template writes the beginning-of-sequence token itself, so the rendered text is not tokenized a second time.
    `thinking` is the template's `enable_thinking`; None leaves it to the template.
    """
    if tokenizer.chat_template is None and template:
        raise TargetError(
            "the target's tokenizer has no chat template", where=tokenizer.name_or_path, hint="leave out template=true"
        )
    if tokenizer.chat_template is None or template is False:
        return tuple(token_ids(tokenizer, "\n".join(message["content"] for message in messages)))
    settings = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = render(tokenizer, messages, add_generation_prompt=True, **settings)
    except TemplateRejection as rejection:
        raise TargetError(
            f"the chat template does not take the prompt {messages[-1]['content'][:60]!r}: {rejection}",
            where=tokenizer.name_or_path,
        ) from rejection
    return tuple(token_ids(tokenizer, text, special=False))
