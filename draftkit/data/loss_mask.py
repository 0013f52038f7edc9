"""Conversations as the target reads them: the chat template is rendered, and the difference marks what it wrote.

For each assistant turn the template renders the messages before it, with the generation prompt, and the messages up to
it. What both begin with is the target's prompt; the rest, up to the end-of-turn token, is its answer. No header is
known by name, so any template works. Where a template has `{% generation %}` tags, they narrow the answer down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import numpy as np
from torch import Tensor

from draftkit.data.rows import Message
from draftkit.data.samples import Reason, Span, spans_of
from draftkit.data.tokenizer import TargetTokenizer
from draftkit.errors import TargetError
from draftkit.media import FiledMedium, ImageFile, MediaFolder, RefusedMedia, for_templates, media_of, text_of
from draftkit.targets.chat import TemplateRejection, render, token_ids
from draftkit.targets.vision import Placeholders, ReadImages, Vision

# Why a row is left out for which one of these is raised.
REFUSALS: dict[type[Exception], Reason] = {
    TemplateRejection: Reason.REJECTED, RefusedMedia: Reason.BAD_IMAGE, Placeholders: Reason.UNPLACED,
}  # fmt: skip
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Turn:
    """One assistant turn: the tokens that the target has read and written at its end, and the spans it has written.

    `reasons`: what is not as it should be. `images`: how many of the conversation's are among the tokens.
    """

    tokens: list[int]
    spans: list[Span]
    reasons: frozenset[Reason] = frozenset()
    images: int = 0


@dataclass(frozen=True)
class RowImages:
    """The images of a conversation, in their order: their files, and what the target's processor makes of them."""

    files: tuple[FiledMedium, ...]
    opened: tuple[ImageFile, ...]
    read: ReadImages

    def until(self, messages: Sequence[Message]) -> ReadImages:
        """What is made of those in the first messages of the conversation; where that are not all, without inputs."""
        number = len(media_of(messages))
        return self.read if number == len(self.opened) else self.read.first(number)


class Renderer:
    """Renders conversations with a target's chat template.

    `options` are the template's own arguments, as `enable_thinking`; `system` is put before conversations that have no
    system message. `template`: whether prompts are rendered; None where they are no plain text. `load_vision`: what
    reads images, of a target that does.
    """

    def __init__(
        self,
        target: TargetTokenizer,
        options: Mapping[str, object] | None = None,
        system: str | None = None,
        template: bool | None = None,
        load_vision: Callable[[], Vision] | None = None,
    ):
        self._load_vision = load_vision
        self.template = template
        self.target = target
        self.options = dict(options or {})
        self.system = system
        self._tags = GENERATION_TAG.search(str(target.tokenizer.chat_template)) is not None

    @cached_property
    def vision(self) -> Vision:
        """What reads the images of rows. Raises `DraftkitError` where what it takes is not installed."""
        assert self._load_vision is not None  # or no row with images is taken
        return self._load_vision()

    def encode(self, text: str) -> list[int]:
        """Plain text as the tokenizer reads it, with the special tokens that it adds itself."""
        return token_ids(self.target.tokenizer, text)

    def continued(self, text: str) -> list[int]:
        """The ids of a plain text that the target goes on with; with the template, as a user's message."""
        return self.prompt([{"role": "user", "content": text}]) if self.template else self.encode(text)

    def images(self, messages: Sequence[Message], folder: Path | None) -> RowImages | None:
        """The images of a conversation, whose files lie below `folder`; None where it has none.

        Raises `RefusedMedia` for one that cannot be read.
        """
        media = media_of(messages)
        if not media:
            return None
        opened = tuple(map(MediaFolder(folder).image, media))
        files = tuple(FiledMedium(one.place, image.sha256) for one, image in zip(media, opened, strict=True))
        return RowImages(files, opened, self.vision.read(opened))

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None, images: RowImages | None = None
    ) -> list[int]:
        """The ids that the target answers; without the template, the texts line by line.

        Raises `TemplateRejection`, and `Placeholders` where the template does not place the images.
        """
        if self.template is False:
            return self.encode("\n".join(text_of(message["content"]) for message in messages))
        return self.ids(self.text(messages, tools, generate=True), None if images is None else images.until(messages))

    def inputs(self, messages: Sequence[Message], tokens: Sequence[int], images: RowImages) -> Mapping[str, Tensor]:
        """What the target is given besides the tokens of a prompt, which are those of the first messages."""
        read = images.until(messages)
        if len(read.texts) < len(images.opened):
            read = self.vision.read(images.opened[: len(read.texts)])
        return self.vision.of_tokens(tokens, read).inputs

    def text(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None, *, generate: bool = False
    ) -> str:
        """What the template makes of a conversation; `generate`: up to where the answer begins.

        Raises `TemplateRejection`.
        """
        return self._text(self.prepared(messages), tools, generate=generate)

    def turns(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None, images: RowImages | None = None
    ) -> list[Turn]:
        """The assistant turns of a conversation, in order; a turn before which nothing was said is only context.

        A turn whose history the template changes while rendering it is left without spans. Raises `TemplateRejection`,
        and `Placeholders` where the template does not place the images.
        """
        messages = self.prepared(messages)
        answers = [index for index, message in enumerate(messages) if index and message["role"] == "assistant"]
        return [self._turn(messages[: index + 1], tools, images) for index in answers]

    def _turn(self, messages: Sequence[Message], tools: Sequence[object] | None, images: RowImages | None) -> Turn:
        """The turn that the last message is."""
        before = self._text(messages[:-1], tools, generate=True)
        after = self._text(messages, tools)
        seen = None if images is None else images.until(messages)
        prompt, tokens = self.ids(before, seen), self.ids(after, seen)
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
        spans = self._tagged(messages, tools, begin, end, len(tokens)) if self._tags else [(begin, end)]
        return Turn(tokens[:end], spans, frozenset(reasons), 0 if seen is None else len(seen.texts))

    def _tagged(
        self, messages: Sequence[Message], tools: Sequence[object] | None, begin: int, end: int, length: int
    ) -> list[Span]:
        """What the template's generation tags mark of the tokens from `begin` to `end`, and all after it. `length`: of
        all, where an image, which lies before `begin`, has more tokens than in the rendered text."""
        rendered = render(
            self.target.tokenizer,
            for_templates(messages),
            tools=tools,
            tokenize=True,
            return_assistant_tokens_mask=True,
            return_dict=True,
            **self.options,
        )
        mask = np.array(rendered["assistant_masks"], dtype=np.bool_)
        marked = np.pad(mask, (length - len(mask), 0))[:end]
        marked[:begin] = False
        if marked.any():  # tags often leave out the end-of-turn token, which the target has written too
            marked[np.flatnonzero(marked)[-1] :] = True
        return spans_of(marked)

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the system message. Raises `TargetError` for a target without a chat template."""
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
        said = for_templates(messages)
        text: str = render(self.target.tokenizer, said, tools=tools, add_generation_prompt=generate, **self.options)
        return text

    def ids(self, text: str, images: ReadImages | None = None) -> list[int]:
        """The ids of rendered text, which has its special tokens already, with its images.

        Raises `Placeholders` where it does not place them.
        """
        if images is not None:
            return self.vision.ids(text, images)
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
            spans, reasons = before.spans + turn.spans, before.reasons | turn.reasons
            sequences[-1] = Turn(turn.tokens, spans, reasons, turn.images)
        else:
            sequences.append(turn)
    return sequences
