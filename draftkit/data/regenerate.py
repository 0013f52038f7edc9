"""Responses by the target itself: every assistant turn is written anew, on what the target has said before.

What is stored are the token ids that were read and drawn, so that training needs no rendering at all.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Literal

from draftkit.data.loss_mask import REFUSALS, Renderer, RowImages, Turn, merged
from draftkit.data.responses import MediaPrompt, Refusal, Responder, ResponseFile, RowPrompt, Sampling
from draftkit.data.rows import TOOL_ROLES, Conversation, Message, Row
from draftkit.data.samples import Reason, RowCounts, Sample
from draftkit.data.tokenizer import TargetTokenizer
from draftkit.errors import DraftkitError, require_count
from draftkit.hub.local_paths import public_name
from draftkit.media import MediaFolder, MediaSpan, media_of
from draftkit.requests import SamplingParameters

IN_VAIN = 64  # rows without an answer, after which none is expected

OnProgress = Callable[[int, int], None]


@dataclass
class Dialogue:
    """One row while its turns are being written. `questions`: what comes before each answer that is still to come.
    `images`: those of all of them. `media`: of each turn, the tokens that stand for images. `unread`: a server is to
    fetch or hear something of it, which is not read here."""

    row: Row
    questions: list[list[Message]]
    unread: bool = False
    history: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    refused: tuple[Reason, str] | None = None
    images: RowImages | None = None
    media: dict[tuple[int, ...], tuple[MediaSpan, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, *, served: bool = False) -> Dialogue:
        """The dialogue of a row that is yet to be asked; `served`: a server does, which may fetch images and hear
        sounds."""
        match row.content:
            case Conversation(messages):
                asked = questions(messages)
                unread = served and not all(one.is_here for one in media_of(itertools.chain(*asked)))
                dialogue = cls(row, asked, unread)
                if not dialogue.questions:
                    dialogue.refused = (Reason.NO_SPAN, "there is no user message to answer")
                return dialogue
            case str():
                return cls(row, [[]])
            case _:
                raise DraftkitError(
                    "the rows are responses already", where=row.where, hint="pass the source that they were made from"
                )

    def ask(self, renderer: Renderer) -> tuple[tuple[int, ...], MediaPrompt | None] | None:
        """The tokens of the next prompt, and what it is besides; None when the row is done."""
        if self.refused or not self.questions:
            return None
        self.history += self.questions.pop(0)
        try:
            tokens, media = self._prompt(renderer)
        except tuple(REFUSALS) as refusal:
            self.refuse(REFUSALS[type(refusal)], str(refusal).partition("\n")[0])
            return None
        if not tokens and media is None:
            self.refuse(Reason.TOO_SHORT, "the prompt is empty")
            return None
        return tuple(tokens), media

    def _prompt(self, renderer: Renderer) -> tuple[Sequence[int], MediaPrompt | None]:
        match self.row.content:
            case str() as text:
                return renderer.continued(text), None
            case Conversation(tools=tools):
                return self._media_prompt(renderer, tools) or (renderer.prompt(self.history, tools), None)
            case _:
                raise AssertionError("`of` takes no other rows")

    def _media_prompt(
        self, renderer: Renderer, tools: Sequence[object] | None
    ) -> tuple[Sequence[int], MediaPrompt] | None:
        """The next prompt where images or sounds are in it; of what is not read here a server knows the tokens."""
        if not media_of(self.history):
            return None
        messages, folder = renderer.prepared(self.history), MediaFolder(self.row.folder)
        chat: dict[str, object] = {"tools": list(tools)} if tools else {}
        chat |= {"chat_template_kwargs": renderer.options} if renderer.options else {}
        if self.unread:
            return (), MediaPrompt(tuple(messages), folder, {}, chat)
        if self.images is None:
            self.images = renderer.images([*self.history, *itertools.chain(*self.questions)], self.row.folder)
        assert self.images is not None
        tokens = renderer.prompt(self.history, tools, self.images)
        self.media[tuple(tokens)] = renderer.vision.spans(tokens, self.images.until(self.history))
        inputs = renderer.inputs(self.history, tokens, self.images)
        return tokens, MediaPrompt(tuple(messages), folder, inputs, chat)

    def answer(self, prompt: Sequence[int], response: Sequence[int], renderer: Renderer) -> None:
        """Take in a response; one without an end of turn ends the row."""
        tokens = [*prompt, *response]
        target = renderer.target
        ended = bool(response) and response[-1] in target.end_ids
        reasons = frozenset() if ended else frozenset({Reason.NO_END})
        spans = [(len(prompt), len(tokens))] if response else []
        self.turns.append(Turn(tokens, spans, reasons, len(media_of(self.history))))
        self.media[tuple(tokens)] = self.media.pop(tuple(prompt), ())
        text = target.tokenizer.decode(response[:-1] if ended else response, skip_special_tokens=True)
        self.history.append({"role": "assistant", "content": text})
        if not ended:
            self.questions.clear()

    def refuse(self, reason: Reason, detail: str) -> None:
        """End the row; what was answered before stays."""
        self.refused = (reason, detail)

    def to_dict(self) -> dict[str, object]:
        """The line that is stored: the messages to read, the sequences to train on, or why there are none."""
        line: dict[str, object] = {"id": self.row.id, "category": self.row.category, "row_sha256": self.row.sha256}
        if not self.turns:
            assert self.refused is not None
            return line | {"refused": f"{self.refused[0]}: {self.refused[1]}"}
        sequences: list[dict[str, object]] = []
        for turn in merged(self.turns):
            media = [[*astuple(span)] for span in self.media[tuple(turn.tokens)]]
            sequences.append({"tokens": turn.tokens, "supervised": turn.spans} | ({"media": media} if media else {}))
        line |= {"messages": self.history, "sequences": sequences}
        if self.images is not None:
            line["images"] = [asdict(file) for file in self.images.files[: self.turns[-1].images]]
        return line | ({"unread": True} if self.unread and media_of(self.history) else {})


def questions(messages: Iterable[Message]) -> list[list[Message]]:
    """The messages before each assistant turn, and those after the last where a user speaks.

    They end before the first tool result: it belongs to a call that another model made.
    """
    groups: list[list[Message]] = []
    group: list[Message] = []
    for message in messages:
        if message["role"] in TOOL_ROLES:
            return groups
        if message["role"] != "assistant":
            group.append(message)
        elif group:
            groups.append(group)
            group = []
    return [*groups, group] if any(message["role"] == "user" for message in group) else groups


@dataclass(frozen=True, kw_only=True)
class RegenerateSettings:
    """Settings of how responses are made; a file is continued only with the settings that it was begun with.

    `source`, `split` and `subset` are where the rows come from, `system` and `template_options` what the chat template
    gets beside them; `template` says whether it is applied, None to all rows but text. `dtype` None is the default
    of the device. Raises `SettingError` for values outside their range.
    """

    source: str
    split: str
    subset: str | None
    target: str
    served_by: Literal["draftkit", "endpoint"]
    dtype: str | None
    system: str | None
    template_options: Mapping[str, object]
    template: bool | None = None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_new_tokens: int

    def __post_init__(self) -> None:
        require_count("max_new_tokens", self.max_new_tokens)
        SamplingParameters(self.temperature, self.top_k, self.top_p, seed=self.seed)

    def header(
        self, tokenizer: TargetTokenizer, target_sha256: str | None = None, media_root: str | None = None
    ) -> dict[str, object]:
        """The settings as they are stored, with names instead of paths, and with what tells the same target: its
        tokenizer and the digest of its weights, None where a server has them. `media_root`: the folder of the images as
        it is reached from that of the file."""
        places = {"source": public_name(self.source), "target": public_name(self.target)}
        stated = asdict(self) | places | tokenizer.identity | {"target_sha256": target_sha256}
        return stated if media_root is None else stated | {"media_root": media_root}

    def sampling(self, tokenizer: TargetTokenizer) -> Sampling:
        """These settings in the form that a responder takes."""
        parameters = SamplingParameters(self.temperature, self.top_k, self.top_p)
        return Sampling(parameters, self.max_new_tokens, tokenizer.end_ids)


@dataclass
class RegenerateCost:
    """What a run would do: rows in all and already done, turns to answer, tokens to draw at most."""

    rows: int = 0
    done: int = 0
    turns: int = 0
    max_new_tokens: int = 0


def plan(rows: Iterable[Row], done: Container[str], max_new_tokens: int) -> RegenerateCost:
    """Count what is to be answered. Raises `DraftkitError` as `regenerate` does for rows that it does not take."""
    cost = RegenerateCost()
    for row in rows:
        dialogue = Dialogue.of(row)
        cost.rows += 1
        cost.done += row.id in done
        cost.turns += 0 if row.id in done else len(dialogue.questions)
    cost.max_new_tokens = cost.turns * max_new_tokens
    return cost


def regenerate(
    rows: Iterable[Row],
    renderer: Renderer,
    responder: Responder,
    out: ResponseFile,
    *,
    seed: int = 0,
    served: bool = False,
    on_progress: OnProgress = lambda rows, tokens: None,
) -> RowCounts:
    """Answer rows, as many together as the responder does, and append each to `out` within `ResponseFile.every` seconds
    of its end; rows that it has are passed over, whatever their order.

    `served`: a server answers, which may fetch images and hear sounds. `on_progress` is told of rows that are done, and
    of tokens that were drawn. The answer to a row depends on its id, its turn and `seed`, not on the other rows or on
    how often the run was interrupted, up to the numerics of batched matrix products. Returns counts of the rows of this
    run. Raises `DraftkitError` when none of the first `IN_VAIN` rows is answered and for a row of which `out` has the
    answer to another one, and what the responder and the file raise.
    """
    dialogues = _Dialogues(rows, renderer, out, seed, served)
    try:
        for prompt, answer in responder.respond(dialogues.ask):
            dialogues.answer(prompt, answer)
            on_progress(0, 0 if isinstance(answer, Refusal) else len(answer))
            on_progress(dialogues.write(out.every), 0)
    finally:
        on_progress(dialogues.write(), 0)
    dialogues.check_answered()
    return dialogues.counts


class _Dialogues:
    """The rows of a run: which turn is asked next, which are waited for, and those that are done but not yet written.

    `counts`: of those that are written.
    """

    def __init__(self, rows: Iterable[Row], renderer: Renderer, out: ResponseFile, seed: int, served: bool):
        self.counts = RowCounts()
        self._rows = iter(rows)
        self._renderer = renderer
        self._out = out
        self._seed = seed
        self._served = served
        self._begun: dict[str, str] = {}  # the digests of the rows of this run
        self._going_on: deque[Dialogue] = deque()
        self._asked: dict[str, Dialogue] = {}
        self._done: list[Dialogue] = []
        self._written = time.monotonic()

    def ask(self) -> RowPrompt | None:
        """The next turn of a row that goes on, else the first of another; None where there is neither now."""
        while (dialogue := self._going_on.popleft() if self._going_on else self._new()) is not None:
            asked = dialogue.ask(self._renderer)
            if asked is None:
                self._done.append(dialogue)
                continue
            (tokens, media), row, turn = asked, dialogue.row, len(dialogue.turns)
            self._asked[row.id] = dialogue
            return RowPrompt(row.id, tokens, row_seed(self._seed, row.id, turn), turn > 0, media)
        return None

    def _new(self) -> Dialogue | None:
        """The next row that is neither done nor under way."""
        for row in self._rows:
            if self._out.has(row, self._begun):
                continue
            self._begun[row.id] = row.sha256
            return Dialogue.of(row, served=self._served)
        return None

    def answer(self, prompt: RowPrompt, answer: tuple[int, ...] | Refusal) -> None:
        """Take in the answer to what was asked."""
        dialogue = self._asked.pop(prompt.id)
        if isinstance(answer, Refusal):
            dialogue.refuse(answer.kind, answer.reason)
        else:
            dialogue.answer(prompt.tokens, answer, self._renderer)
        self._going_on.append(dialogue)

    def write(self, every: float = 0.0) -> int:
        """Write what is done, unless the last time was less than so many seconds ago. Returns how many rows.

        A file is not begun with rows of which none is answered.
        """
        if not self._done or time.monotonic() - self._written < every:
            return 0
        if not self._out.begun and not any(dialogue.turns for dialogue in self._done):
            if len(self._done) >= IN_VAIN:
                self.check_answered()
            return 0
        self._out.append(dialogue.to_dict() for dialogue in self._done)
        for dialogue in self._done:
            _count(dialogue, self.counts)
        written, self._done, self._written = len(self._done), [], time.monotonic()
        return written

    def check_answered(self) -> None:
        """Raise `DraftkitError` where rows are left that were not written, as none was answered."""
        if self._done:
            refusals = [(*(dialogue.refused or (Reason.REFUSED, "")), dialogue.row) for dialogue in self._done]
            counts = Counter(reason for reason, _, _ in refusals).most_common()
            detail, row = next((detail, row) for reason, detail, row in refusals if reason == counts[0][0])
            raise DraftkitError(
                f"none of the first {len(refusals)} rows can be answered: "
                f"{', '.join(f'{reason} {count:,}' for reason, count in counts)}, as {row.id}: {detail}",
                where=row.where,
            )


def row_seed(seed: int, row: str, turn: int) -> int:
    """The seed of one answer, below 2⁶³, which is what servers take."""
    digest = hashlib.sha256(f"{seed}\0{row}\0{turn}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> 1


def _count(dialogue: Dialogue, report: RowCounts) -> None:
    report.rows += 1
    if dialogue.refused is not None:
        reason, detail = dialogue.refused
        report.note(reason, dialogue.row.id, detail)
    for reason in sorted({reason for turn in dialogue.turns for reason in turn.reasons}):
        report.note(reason, dialogue.row.id)
    for turn in merged(dialogue.turns):
        report.add(Sample.of(dialogue.row.id, turn.tokens, turn.spans))
