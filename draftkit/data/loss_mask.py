"""Conversations as the target reads them: the chat template is rendered, and the difference marks what it wrote.

For each assistant turn the template renders the messages before it, with the generation prompt, and the messages up to
it. What both begin with is the target's prompt; the rest, up to the end-of-turn token, is its answer. No header is
known by name, so any template works. Where a template has `{% generation %}` tags, they narrow the answer down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from draftkit.data.rows import Message
from draftkit.data.samples import Reason, Span, spans_of
from draftkit.data.tokenizer import TargetTokenizer
from draftkit.errors import TargetError
from draftkit.targets.chat import render, token_ids

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Turn:
    """One assistant turn: the tokens that the target has read and written at its end, and the spans it has written.

    `reasons`: what is not as it should be.
    """

    tokens: list[int]
    spans: list[Span]
    reasons: frozenset[Reason] = frozenset()


class Renderer:
    """Renders conversations with a target's chat template.

    `options` are the template's own arguments, as `enable_thinking`; `system` is put before conversations that have no
    system message. `template`: whether prompts are rendered; None where they are no plain text.
    """

    def __init__(
        self,
        target: TargetTokenizer,
        options: Mapping[str, object] | None = None,
        system: str | None = None,
        template: bool | None = None,
    ):
        self.template = template
        self.target = target
        self.options = dict(options or {})
        self.system = system
        self._tags = GENERATION_TAG.search(str(target.tokenizer.chat_template)) is not None

    def encode(self, text: str) -> list[int]:
        """Plain text as the tokenizer reads it, with the special tokens that it adds itself."""
        return token_ids(self.target.tokenizer, text)

    def continued(self, text: str) -> list[int]:
        """The ids of a plain text that the target goes on with; with the template, as a user's message."""
        return self.prompt([{"role": "user", "content": text}]) if self.template else self.encode(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> list[int]:
        """The ids that the target answers; without the template, the texts line by line. Raises `TemplateRejection`."""
        if self.template is False:
            return self.encode("\n".join(str(message["content"] or "") for message in messages))
        return self.ids(self.text(messages, tools, generate=True))

    def text(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None, *, generate: bool = False
    ) -> str:
        """What the template makes of a conversation; `generate`: up to where the answer begins.

        Raises `TemplateRejection`.
        """
        return self._text(self._prepared(messages), tools, generate=generate)

    def turns(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> list[Turn]:
        """The assistant turns of a conversation, in order; a turn before which nothing was said is only context.

        A turn whose history the template changes while rendering it is left without spans. Raises `TemplateRejection`.
        """
        messages = self._prepared(messages)
        answers = [index for index, message in enumerate(messages) if index and message["role"] == "assistant"]
        return [self._turn(messages[: index + 1], tools) for index in answers]

    def _turn(self, messages: Sequence[Message], tools: Sequence[object] | None) -> Turn:
        """The turn that the last message is."""
        before = self._text(messages[:-1], tools, generate=True)
        after = self._text(messages, tools)
        prompt, tokens = self.ids(before), self.ids(after)
        begin = len(prompt) if tokens[: len(prompt)] == prompt else common_length(prompt, tokens)
        reasons = set()
        if begin < len(prompt):
            history = common_length(before, self._text(messages[:-1], tools))
            if not after.startswith(before[:history]):
                return Turn([], [], frozenset({Reason.REWRITTEN}))
            reasons.add(Reason.UNPROMPTED)
        content = messages[-1].get("content")
        if isinstance(content, str) and content.strip() not in after:
            reasons.add(Reason.ALTERED)
        end = next((i + 1 for i in range(begin, len(tokens)) if tokens[i] in self.target.end_ids), None)
        if end is None:
            reasons.add(Reason.NO_END)
            end = len(tokens)
        spans = self._tagged(messages, tools, begin, end) if self._tags else [(begin, end)]
        return Turn(tokens[:end], spans, frozenset(reasons))

    def _tagged(self, messages: Sequence[Message], tools: Sequence[object] | None, begin: int, end: int) -> list[Span]:
        """What the template's generation tags mark of the tokens from `begin` to `end`, and all after it."""
        rendered = render(
            self.target.tokenizer,
            messages,
            tools=tools,
            tokenize=True,
            return_assistant_tokens_mask=True,
            return_dict=True,
            **self.options,
        )
        marked = np.array(rendered["assistant_masks"][:end], dtype=np.bool_)
        marked[:begin] = False
        if marked.any():  # tags often leave out the end-of-turn token, which the target has written too
            marked[np.flatnonzero(marked)[-1] :] = True
        return spans_of(marked)

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        if self.target.tokenizer.chat_template is None:
            raise TargetError(
                "the target's tokenizer has no chat template, and the data are conversations",
                where=self.target.name,
                hint="use rows of plain text (`data regenerate --no-template` takes any as that), or put the template "
                "into the folder as chat_template.jinja",
            )
        if self.system is None or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def _text(self, messages: Sequence[Message], tools: Sequence[object] | None, *, generate: bool = False) -> str:
        text: str = render(self.target.tokenizer, messages, tools=tools, add_generation_prompt=generate, **self.options)
        return text

    def ids(self, text: str) -> list[int]:
        """The ids of rendered text, which has its special tokens already."""
        return token_ids(self.target.tokenizer, text, special=False)


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """The number of equal items with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def merged(turns: Iterable[Turn]) -> list[Turn]:
    """Turns joined into the sequences that the target reads in one piece.

    A turn goes on with the one before it where its tokens begin with the other's. Where they do not, because the
    template has changed what was said before, it begins a sequence of its own.
    """
    sequences: list[Turn] = []
    for turn in turns:
        before = sequences[-1] if sequences else None
        if before is not None and turn.tokens[: len(before.tokens)] == before.tokens:
            sequences[-1] = Turn(turn.tokens, before.spans + turn.spans, before.reasons | turn.reasons)
        else:
            sequences.append(turn)
    return sequences
