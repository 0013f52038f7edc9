"""Prompts: one question, the sets that hold them, which `datasets.json` describes, and how the target sees them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit import zoo
from draftkit.data.categories import category_of
from draftkit.data.request_logs import as_row
from draftkit.data.rows import (
    SHAPES,
    SUFFIXES,
    Conversation,
    LeftOutRows,
    Message,
    NotText,
    Place,
    media_root_of,
    read_file,
    strict_rows,
    undecoded,
)
from draftkit.errors import FormatError, SourceError, TargetError
from draftkit.hub.locate import keep_token
from draftkit.io.records import did_you_mean
from draftkit.media import (
    ImageFile,
    MediaFolder,
    Medium,
    RefusedMedia,
    media_of,
    text_of,
)
from draftkit.version import with_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftkit.targets.vision import MediaTokens, Vision

_log = logging.getLogger(__name__)

ChatMessage = dict[str, Any]
BUNDLED = "zoo"
WITHOUT_NETWORK = "--dataset FILE, with prompts of your own, and --dataset zoo, the bundled ones, need no network"
UNREADABLE = "unreadable image"
# What SPEED-Bench's published rows hold instead of texts that its license does not let it ship.
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"

PlacedRows = Iterable[tuple[str, Mapping[str, Any]]]  # where a row lies, and the row


@dataclass(frozen=True)
class Prompt:
    """One question: an id, a category for grouping, and the user's turns. `plain`: a text to go on with as it is, to
    which no chat template belongs. `system`: the system message, where there is one. `tools`: whether the row has some,
    or calls them. `said`: all that its row says, recorded answers included. `recorded`: the messages that a row has
    before one of its answers, which is asked for anew after them as they are; `schemas`: the tools it may call.
    `contents`: of each turn, its parts where some are images or sounds, whose files lie below `folder`; `digests` of
    these."""

    id: str
    category: str
    turns: tuple[str, ...]
    plain: bool = False
    system: str = ""
    tools: bool = False
    said: str = field(default="", compare=False)
    recorded: tuple[Message, ...] = ()
    schemas: tuple[object, ...] | None = None
    contents: tuple[object, ...] = ()
    folder: Path | None = field(default=None, compare=False)
    digests: tuple[str, ...] = ()

    @property
    def media(self) -> list[Medium]:
        """The images and sounds of all turns."""
        return media_of(self.recorded or [{"content": content} for content in self.contents])

    def user(self, turn: int, said: str | None = None) -> ChatMessage:
        """What the user says at a turn; `said` where that is its text behind another one."""
        text = self.turns[turn] if said is None else said
        if not self.contents or isinstance(self.contents[turn], str):
            return {"role": "user", "content": text}
        before = text.removesuffix(self.turns[turn])
        parts = [{"type": "text", "text": before}] if before else []
        return {"role": "user", "content": [*parts, *self.contents[turn]]}  # type: ignore[misc]

    @property
    def opening(self) -> list[ChatMessage]:
        """The messages before the first turn."""
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def text(self) -> str:
        """The text of the first turn."""
        return self.turns[0]

    def asked(self, said: str) -> list[ChatMessage]:
        """The messages of the first request: what is recorded, or else the opening, and what the user has `said`."""
        return [dict(message) for message in self.recorded] if self.recorded else [*self.opening, self.user(0, said)]


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a set that `load_prompt_set` takes; of rows that are left out, the log tells."""
    found = load_prompt_set(source, limit)
    if found.left_out.rows:
        _log.warning("%s", found.left_out)
    return found.prompts


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None, template: bool | None = None
) -> tuple[int, ...]:
    """The ids the target sees of the first turn, as `encode_messages` makes them; of a prompt of text."""
    template = False if template is None and prompt.plain else template
    return encode_messages(prompt.asked(prompt.text), tokenizer, thinking, template, prompt.schemas)


def encode_messages(
    messages: Sequence[ChatMessage],
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None = None,
    template: bool | None = None,
    schemas: Sequence[object] | None = None,
) -> tuple[int, ...]:
    """The ids of a conversation that the target is to go on with: the chat template applied once where there is one,
    else the texts line by line. `template` False takes the texts anyway, True raises `TargetError` where there is none.

    A template writes the beginning-of-sequence token itself, so the rendered text is not tokenized a second time.
    `thinking` is the template's `enable_thinking`; None leaves it to the template. `schemas`: of tools, for a template.
    """
    from draftkit.targets.chat import render, token_ids  # need transformers, as the tokenizer does

    if tokenizer.chat_template is None and template:
        raise TargetError(
            "the target's tokenizer has no chat template", where=tokenizer.name_or_path, hint="leave out template=true"
        )
    if tokenizer.chat_template is None or template is False:
        return tuple(token_ids(tokenizer, "\n".join(text_of(message["content"]) for message in messages)))
    with _rejections(messages, tokenizer):
        text = render(tokenizer, messages, add_generation_prompt=True, **_options(thinking, schemas))
    return tuple(token_ids(tokenizer, text, special=False))


def encode_images(
    messages: Sequence[ChatMessage],
    images: Sequence[ImageFile],
    vision: Vision,
    thinking: bool | None = None,
    schemas: Sequence[object] | None = None,
) -> MediaTokens:
    """A conversation with images that the target is to go on with, with the chat template. Raises `TargetError`, and
    `RefusedMedia` for an image that it does not read."""
    if vision.tokenizer.chat_template is None:
        raise TargetError("images take a chat template, and there is none", where=vision.tokenizer.name_or_path)
    with _rejections(messages, vision.tokenizer):
        return vision.prompt(messages, images, **_options(thinking, schemas))


def _options(thinking: bool | None, schemas: Sequence[object] | None) -> dict[str, Any]:
    """What a chat template is given besides the messages."""
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return options | ({"tools": list(schemas)} if schemas else {})


@contextmanager
def _rejections(messages: Sequence[ChatMessage], tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """The chat template's rejection of a prompt is a `TargetError`."""
    from draftkit.targets.chat import TemplateRejection

    try:
        yield
    except TemplateRejection as rejection:
        raise TargetError(
            f"the chat template does not take the prompt {text_of(messages[-1]['content'])[:60]!r}: {rejection}",
            where=tokenizer.name_or_path,
        ) from rejection


@dataclass(frozen=True)
class PromptSet:
    """Prompts and where they are from. `masked`: how many rows of the source had no text of their own. `left_out`:
    those with more than text. `conversations`: of every row, also those that a limit leaves out, the first turn → all
    that it says."""

    name: str
    source: str
    revision: str | None
    split: str | None
    prompts: list[Prompt]
    masked: int = 0
    left_out: LeftOutRows = field(default_factory=LeftOutRows)
    conversations: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """The digest of the texts, by which two runs are known to have asked the same."""
        asked = [
            [
                *prompt.turns,
                *([prompt.plain] if prompt.plain else []),
                *prompt.opening,
                *prompt.recorded,
                *(() if prompt.recorded else prompt.contents),
                *prompt.digests,
            ]
            for prompt in self.prompts
        ]
        return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class _Columns:
    """Which columns of a table hold what; `template` wraps each prompt."""

    prompt: str | None = None
    id: str | None = None
    category: str | None = None
    template: str = "{}"


def load_prompt_set(
    source: str,
    limit: int | None = None,
    *,
    strict: bool = False,
    recorded: bool = False,
    left_out: LeftOutRows | None = None,
    media_root: Path | None = None,
) -> PromptSet:
    """The bundled prompts (`zoo`), a set of `datasets.json`, a JSONL file, or a Hub dataset `org/name[@revision]`.

    A row of a file or an unnamed dataset has any shape that `data.rows` reads: its user messages are taken, or its
    plain text; the lines of a .txt file are prompts. `question_id` or `id` and `category` are optional. With `limit`,
    that many prompts are taken evenly over the set, so that every category stays represented. Rows with parts that
    `left_out` does not take are left out, and refused if `strict`, as are those with images that cannot be read.
    `media_root` as of `media_root_of`. `recorded`: each answer that a row holds is a prompt, of all that comes before
    it. Logs of requests to a server are rows too. Raises `SourceError` and `FormatError` naming file and line.
    """
    described = registry().get(source)
    path = zoo.prompts_path() if source == BUNDLED else Path(source)
    revision, split, columns = None, None, _Columns()
    if described is not None:
        columns = _Columns(
            **{key: described[key] for key in ("prompt", "id", "category", "template") if key in described}
        )
        split = described.get("split")
        where = described.get("hub") or described["url"]
        rows, revision = _published(described)
    elif source == BUNDLED or path.exists() or source.endswith(SUFFIXES) or source.count("/") != 1:
        where, rows = str(path), _read_file(path)
    else:
        where, _, revision = source.partition("@")
        rows, revision = _published({"hub": where, "revision": revision or None})
    left_out, folder = left_out or LeftOutRows(), media_root_of(source, media_root)
    with strict_rows() if strict else nullcontext():
        parsed = [
            prompt
            for number, (at, row) in enumerate(rows, start=1)
            for prompt in _prompts(columns, Place(at, dict(row), None, folder), number, left_out, recorded=recorded)
        ]
    prompts = [prompt for prompt in parsed if not any(MASKED in turn for turn in prompt.turns)]
    if not prompts:
        what = "answers, which turns=recorded asks for anew" if recorded else "prompts"
        raise FormatError(f"the set holds no {what}" + (f": {left_out}" if left_out.rows else ""), where=where)
    masked = len(parsed) - len(prompts)
    conversations = {prompt.text: prompt.said for prompt in prompts}
    if limit is not None and limit < len(prompts):
        prompts = [prompts[index * len(prompts) // limit] for index in range(limit)]
    return PromptSet(source, where, revision, split, prompts, masked, left_out, conversations)


@cache
def registry() -> dict[str, dict[str, str]]:
    """The named sets: Hub id or address, split, columns, and what each is."""
    text = resources.files("draftkit.evaluate").joinpath("datasets.json").read_text(encoding="utf-8")
    described: dict[str, dict[str, str]] = json.loads(text)
    return described


def _read_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.exists():
        raise SourceError(
            f"the prompts cannot be read: there is no such file{did_you_mean(path.name, ['zoo', *registry()])}",
            where=path,
            expected="a JSONL file, a Hub dataset org/name, zoo, or " + ", ".join(registry()),
            hint="--dataset zoo uses the bundled ones",
        )
    return ((place.where, place.record) for place in read_file(path))


def _published(described: Mapping[str, Any]) -> tuple[PlacedRows, str | None]:
    """The rows of a dataset on the Hub, or of a file at an address, and the commit they are from."""
    try:
        from datasets import load_dataset
        from huggingface_hub import HfApi
    except ImportError as error:
        raise SourceError(
            "published prompt sets are read with the package datasets, which is not installed",
            where=described.get("hub") or described["url"],
            hint=f"{with_extra('eval')}; {WITHOUT_NETWORK}",
        ) from error
    hub, url, split = described.get("hub"), described.get("url"), described.get("split")
    keep_token()
    try:
        if hub is None:
            table, revision = load_dataset("json", data_files=url, split="train"), None
        else:
            revision = HfApi().dataset_info(hub, revision=described.get("revision")).sha
            table = load_dataset(hub, described.get("subset"), split=split or "train", revision=revision)
        rows = [(f"{hub or url}, row {number}", dict(row)) for number, row in enumerate(undecoded(table), start=1)]
    except Exception as error:  # of the network, the Hub, a table, a missing split: all in many types
        first = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise SourceError(
            f"the prompts cannot be read: {first}",
            where=hub or url,
            hint=f"check the connection and the name; {WITHOUT_NETWORK}",
        ) from error
    return rows, revision


def _prompts(
    columns: _Columns, place: Place, number: int, left_out: LeftOutRows, *, recorded: bool
) -> Sequence[Prompt]:
    """The prompts of a row: one, or one for each recorded answer; none of a row that is left out."""
    conversation, row, where = None, place.record, place.where
    contents: tuple[object, ...] = ()
    if columns.prompt is None:
        parsed = left_out.read(place._replace(record=as_row(row, where)))
        if parsed is None:
            return ()
        conversation = parsed.content if isinstance(parsed.content, Conversation) else None
        turns, plain, system, contents = _turns(parsed.content)
        tools = category_of(parsed).endswith("tools=yes")
    else:
        turns, plain, system, tools = _texts(row.get(columns.prompt)), False, "", False
    if not turns or not all(isinstance(turn, str) and (turn or contents) for turn in turns):
        keys = f'"{columns.prompt}"' if columns.prompt else SHAPES
        raise FormatError("no prompt in this line", where=where, expected=f"an object with {keys}")
    known = (row.get(columns.id),) if columns.id else (row.get("question_id"), row.get("id"))
    own = next((value for value in known if value is not None), number)
    category = row.get(columns.category or "category")
    prompt = Prompt(
        str(own),
        "all" if category is None else str(category),
        tuple(columns.template.replace("{}", str(turn)) for turn in turns),
        plain,
        system,
        tools,
        contents=contents,
        folder=place.folder,
    )
    prompt = replace(prompt, said=_said(prompt, conversation))
    found = _replayed(prompt, conversation) if recorded else (prompt,)
    try:
        return [replace(one, digests=_digests(one, passed_on="audio" in left_out.takes)) for one in found]
    except RefusedMedia as refusal:
        left_out.leave_out(NotText([UNREADABLE], where, str(refusal)))
        return ()


def _digests(prompt: Prompt, *, passed_on: bool) -> tuple[str, ...]:
    """The digests of the images that lie here; addresses are `passed_on` to a server. Raises `RefusedMedia` for an
    image that cannot be read."""
    files = [MediaFolder(prompt.folder).image(one) for one in prompt.media if one.is_here or not passed_on]
    for file in files:
        file.pixels()
    return tuple(file.sha256 for file in files)


def _said(prompt: Prompt, conversation: Conversation | None) -> str:
    """All that a row says, but for its system message."""
    if conversation is None:
        return "\n\n".join(prompt.turns)
    spoken = (message["content"] for message in conversation.messages if message["role"] != "system")
    return "\n\n".join(text for content in spoken if (text := text_of(content)))


def _replayed(prompt: Prompt, conversation: Conversation | None) -> list[Prompt]:
    """A prompt for each answer of a conversation that something was said before, in their order."""
    found: list[Prompt] = []
    messages = () if conversation is None else conversation.messages
    for at, message in enumerate(messages):
        before = messages[:at]
        if message["role"] == "assistant" and any(said["role"] not in ("system", "assistant") for said in before):
            asked = text_of(before[-1]["content"]) or prompt.text
            schemas = None if conversation is None else conversation.tools
            turn = replace(prompt, id=f"{prompt.id}/{len(found) + 1}", turns=(asked,), recorded=before, schemas=schemas)
            found.append(turn)
    return found


def _turns(content: object) -> tuple[Sequence[object], bool, str, tuple[object, ...]]:
    """The user's turns of a row in any shape, whether it is plain text, its system message, and the contents of the
    turns where some have more than text."""
    match content:
        case Conversation(messages):
            system = "\n".join(text_of(message["content"]) for message in messages if message["role"] == "system")
            said = tuple(message["content"] for message in messages if message["role"] == "user")
            contents = said if any(isinstance(one, list) for one in said) else ()
            return [text_of(one) if contents else one for one in said], False, system, contents
        case _:
            return [content], True, "", ()


def _texts(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [value]
