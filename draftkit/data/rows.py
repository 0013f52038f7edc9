"""Rows of conversations or text, from files or a Hub dataset, in the shapes that are in use."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from draftkit.data.samples import Span, parse_media, parse_tokens
from draftkit.errors import FormatError, SourceError
from draftkit.hub.locate import keep_token
from draftkit.io.cache import local_file
from draftkit.io.jsonfile import decoded
from draftkit.io.jsonl import read_lines
from draftkit.io.records import excerpt
from draftkit.io.store import Store, is_address
from draftkit.media import IMAGE_PARTS, FiledMedium, MediaSpan, Modality, medium_of, openai_part
from draftkit.version import with_extra

if TYPE_CHECKING:
    from draftkit.loading import OpenedTarget  # with torch, which rows of prompts do without

REGENERATED = "draftkit-regenerated"  # the format that the first line of a file of served responses names
SYNTHESIZED = "draftkit-prompts"  # the format of a file of prompts that a target has written
SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bot": "assistant"}
TOOL_ROLES = ("tool", "function", "ipython")  # roles whose messages answer a call that the target may not make again
SHAPES = (
    'messages or conversations (lists of {"role", "content"} or {"from", "value"}), prompt with completion or '
    "response, turns (a list of user texts), prompt, data or question, or text, which is gone on with as it is"
)

# Parts of a message that are text, and which of their keys holds it, as vLLM takes them.
TEXTS = {
    "text": "text", "input_text": "text", "output_text": "text", "thinking": "thinking", "refusal": "refusal",
}  # fmt: skip
IMAGE_WORDS = tuple(f'"{kind}"'.encode() for kind in IMAGE_PARTS)
# Keys of a row, of a message and of a part that hold what is not text.
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
MEDIA_OF_PARTS = (
    *MEDIA, "image_url", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds",
    "video_url", "video_embeds", "prompt_embeds",
)  # fmt: skip

Message = Mapping[str, object]
TEXT_ALONE = "the text of messages alone is used here"


class Place(NamedTuple):
    """A `record` and `where` it lies; the digest of the `tokenizer` of served ids, and the `folder` below which those
    files lie that it names."""

    where: str
    record: dict[str, object]
    tokenizer: str | None = None
    folder: Path | None = None


_strict = ContextVar("strict", default=False)


@contextmanager
def strict_rows() -> Iterator[None]:
    """While the body runs, no row is left out: one with parts that are not used is an error wherever it is read."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


class NotText(FormatError):
    """A row with parts that are not used, as videos; `kinds` names them, `why` says what is."""

    def __init__(self, kinds: Iterable[str], where: str, why: str = TEXT_ALONE):
        self.kinds, self.where = tuple(dict.fromkeys(kinds)), where
        super().__init__(
            f"the row has parts that are not used ({', '.join(self.kinds)}): {why}",
            where=where,
            hint="remove the row; without --strict such rows are left out",
        )


@dataclass
class LeftOutRows:
    """Rows that were left out, as they have parts that are not used: how many, those of each kind, and the first.

    `takes`: what is used besides text; `why`: a sentence about that.
    """

    rows: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: str = ""
    takes: frozenset[Modality] = frozenset()
    why: str = TEXT_ALONE

    def read(self, place: Place) -> Row | None:
        """A record as `parse_row` reads it; None for one that is left out. Raises like `parse_row` under
        `strict_rows`."""
        try:
            return parse_row(place.record, place.where, place.tokenizer, place.folder, takes=self.takes, why=self.why)
        except NotText as row:
            self.leave_out(row)
            return None

    def leave_out(self, row: NotText) -> None:
        """Count a row; raise it under `strict_rows`."""
        if _strict.get():
            raise row
        self.rows += 1
        self.kinds.update(row.kinds)
        self.first = self.first or row.where

    def to_dict(self) -> dict[str, object]:
        """The counts as JSON values."""
        return {"rows": self.rows, "kinds": dict(self.kinds), "first": self.first or None}

    def __str__(self) -> str:
        rows = "1 row is" if self.rows == 1 else f"{self.rows:,} rows are"
        kinds = ", ".join(f"{kind} in {count:,}" for kind, count in self.kinds.most_common())
        return f"{rows} left out, with parts that are not used ({kinds}; the first: {self.first}): {self.why}"


def rows_read_by(target: OpenedTarget, *, served: bool = False) -> LeftOutRows:
    """Counts rows with parts that a target is not given: in this process none but images, where it reads them; a server
    is sent sounds too."""
    images: frozenset[Modality] = frozenset({"image"}) if target.reads_images else frozenset()
    if served:
        what = "images, and sounds" if images else "sounds"
        return LeftOutRows(takes=images | {"audio"}, why=f"a server of the target is sent text and {what}")
    if images:
        return LeftOutRows(takes=images, why="the target is given text and images; sounds are only sent to servers")
    return LeftOutRows(why="the target reads text alone")


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, and the schemas of the tools the assistant may call. Contents are text, or
    parts in OpenAI's words where some are images or sounds."""

    messages: tuple[Message, ...]
    tools: tuple[object, ...] | None = None


@dataclass(frozen=True)
class Served:
    """What a target has read and written, as token ids, each sequence with the spans it wrote.

    `media`: of each sequence, the tokens that stand for images, and these. `unread`: whether it has heard sounds, or
    seen images that lie on the network.
    """

    sequences: tuple[tuple[list[int], list[Span]], ...]
    tokenizer_sha256: str
    media: tuple[tuple[tuple[MediaSpan, ...], tuple[FiledMedium, ...]], ...] = ()
    unread: bool = False


@dataclass(frozen=True)
class Refused:
    """A row that the target was asked and has not answered."""

    reason: str


@dataclass(frozen=True)
class Row:
    """One row: a conversation, plain text, or what `draftkit data regenerate` made of one. `where` names its place,
    `folder` where the files lie that it names."""

    id: str
    category: str
    where: str
    content: Conversation | Served | Refused | str
    folder: Path | None = field(default=None, compare=False)

    @property
    def sha256(self) -> str:
        """A digest of what the row says, whatever it is called and wherever it lies."""
        said = asdict(self.content) if not isinstance(self.content, str) else self.content
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def read_rows(
    source: str,
    *,
    split: str = "train",
    subset: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
    left_out: LeftOutRows | None = None,
    media_root: Path | None = None,
) -> Iterator[Row]:
    """The rows of a JSONL, JSON or parquet file, of a .txt file with a prompt in each line, of a folder of these, of
    either in a store (`s3://…`), or of a Hub dataset; at most `limit`.

    `split`, `subset` and `revision` are those of a Hub dataset, which is streamed. `left_out` counts rows with parts
    that it does not take, which are then passed over; without it any part that is no text is an error. `media_root` as
    of `media_root_of`. Ids are the rows' own where they have some, else the name of the source and the row's number;
    repeated ones get a number. Raises `SourceError` for what cannot be reached, `FormatError` naming file and row for
    what cannot be understood, and where all are left out.
    """
    path = Path(os.path.expanduser(source))
    if is_address(source):
        places = _read_store(source)
    elif path.exists():
        places = itertools.chain.from_iterable(map(read_file, data_files(path)))
    elif source.startswith((".", "/", "~")) or source.endswith(SUFFIXES):
        raise SourceError(f"there is no file or folder {source}", where=path, hint="a Hub dataset is org/name")
    else:
        places = _read_hub(source.removeprefix("hf://").removeprefix("datasets/"), split, subset, revision)
    root = media_root_of(source, media_root)
    places = (place._replace(folder=root) for place in places)
    return _distinct(itertools.islice(_parsed(places, left_out), limit))


def media_root_of(source: str, named: Path | None = None) -> Path | None:
    """The folder below which the files lie that rows name: the one that is `named`, else the source, or that of the
    file; for regenerated rows, the one of the rows they were made from. None of a Hub dataset."""
    path = Path(os.path.expanduser(source))
    if named is not None or not path.exists():
        return named
    if path.is_dir():
        return path
    _, first = next(read_lines(path), (1, {})) if path.suffix == ".jsonl" else (1, {})
    settings = first.get("settings") if first.get("format") == REGENERATED else None
    stated = settings.get("media_root") if isinstance(settings, dict) else None
    return path.parent / stated if isinstance(stated, str) else path.parent


def may_name_images(source: str) -> bool:
    """Whether a part of some row may name an image: in JSON files by the words that such parts have, else unknown."""
    path = Path(os.path.expanduser(source))
    if not path.exists():
        return True
    for file in data_files(path):
        if file.suffix == ".parquet":
            return True
        with file.open("rb") as lines:
            if file.suffix != ".txt" and any(word in line for line in lines for word in IMAGE_WORDS):
                return True
    return False


def most_rows(source: str, limit: int | None = None) -> int | None:
    """How many rows `read_rows` gives at most, without reading them; None where only reading tells. Raises as it."""
    path = Path(os.path.expanduser(source))
    files = data_files(path) if path.exists() else []
    if not files or any(file.suffix not in (".jsonl", ".txt") for file in files):
        return limit
    lines = 0
    for file in files:
        with file.open("rb") as opened:
            lines += sum(1 for line in opened if line.strip())
    return lines if limit is None else min(lines, limit)


def _parsed(places: Iterable[Place], left_out: LeftOutRows | None) -> Iterator[Row]:
    taken = 0
    for place in places:
        if (row := read_row(place, left_out)) is not None:
            taken += 1
            yield row
    if left_out is not None and left_out.rows and not taken:
        raise FormatError(f"no row can be used: {left_out}")


def read_row(place: Place, left_out: LeftOutRows | None) -> Row | None:
    """The row of a place, or None for one that `left_out` counts. Raises as `parse_row`."""
    if left_out is not None:
        return left_out.read(place)
    return parse_row(place.record, place.where, place.tokenizer, place.folder)


def parse_row(
    record: dict[str, object],
    where: str,
    tokenizer_sha256: str | None = None,
    folder: Path | None = None,
    *,
    takes: Container[Modality] = (),
    why: str = TEXT_ALONE,
) -> Row:
    """The row of a `Place`, the text of parts joined as vLLM joins it, line by line, where all of them are text.

    `takes`: the modalities of which parts are kept. Raises `FormatError` naming the keys of one in no known shape, and
    `NotText`, saying `why`, for one with parts of others.
    """
    media = _Media(takes)
    if tokenizer_sha256 is None:
        _check_text(record, where)
        media.refused += [name for name in MEDIA if _holds(record.get(name))]
    known = {key: value for key, value in record.items() if value is not None}  # tables fill their gaps with None
    content = _content(known, where, tokenizer_sha256, media)
    if media.refused:
        raise NotText(media.refused, where, why)
    own = next((known[key] for key in ("id", "prompt_id", "question_id", "conversation_id") if key in known), None)
    own = PurePath(where).name if own is None else own
    return Row(str(own), str(known.get("category", "all")), where, content, folder)


@dataclass
class _Media:
    """Which modalities are taken of a row, and the kinds of its parts that are not."""

    takes: Container[Modality]
    refused: list[str] = field(default_factory=list)


def _check_text(record: dict[str, object], where: str) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer and no file takes."""
    try:
        said = {key: value for key, value in record.items() if key not in MEDIA}
        json.dumps(said, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"the row's text is not valid Unicode: {error.object[error.start : error.end]!r} is half of a character",
            where=where,
            hint="remove the row, or write the file again with whole characters",
        ) from error


def _holds(value: object) -> bool:
    """Whether something is there; of what it is, as an image or an array, nothing is asked."""
    if isinstance(value, dict):  # tables fill their gaps with None, at any depth
        return any(map(_holds, value.values()))
    return value is not None and not (isinstance(value, str | list | tuple | int) and not value)


def _content(
    record: dict[str, object], where: str, tokenizer: str | None, media: _Media
) -> Conversation | Served | Refused | str:
    """The content of a record; the kinds of its parts that are not taken are appended to those of `media`."""
    if tokenizer is not None:
        return _served(record, where, tokenizer)
    prompt = next((record[key] for key in ("prompt", "data", "question") if key in record), None)  # `data` is PARD's
    text = record.get("text")
    answer = record.get("completion", record.get("response"))
    turns = record.get("turns")
    for key in ("messages", "conversations", "conversation"):
        if isinstance(record.get(key), list):
            return _conversation(record[key], record, where, media)
    if prompt is not None and answer is not None:
        messages = [*_messages_of(prompt, "user"), *_messages_of(answer, "assistant")]
        return _conversation(messages, record, where, media)
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return _conversation([{"role": "user", "content": turn} for turn in turns], record, where, media)
    if prompt is not None:
        return _conversation(_messages_of(prompt, "user"), record, where, media)
    if isinstance(text, str):
        return text
    raise FormatError(
        f"the row has no known shape; its keys: {', '.join(record) or 'none'}", where=where, expected=SHAPES
    )


def _messages_of(value: object, role: str) -> list[object]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _conversation(messages: object, record: dict[str, object], where: str, media: _Media) -> Conversation:
    assert isinstance(messages, list)
    tools = record.get("tools")
    if isinstance(tools, str):  # tables hold nested schemas as text
        tools = decoded(tools, "the text of tools", where)
    parsed = tuple(_message(message, f"{where}, message {n}", media) for n, message in enumerate(messages, start=1))
    return Conversation(parsed, tuple(tools) if isinstance(tools, list) and tools else None)


def _message(message: object, where: str, media: _Media) -> Message:
    fields = dict(message) if isinstance(message, dict) else {}
    role = fields.pop("from", fields.get("role"))
    content = fields.pop("value", fields.get("content"))
    if not isinstance(role, str) or not (content is None or isinstance(content, str | list)):
        raise FormatError(
            f"not a message: {message if not fields else ', '.join(fields)}",
            where=where,
            expected='an object with "role" and "content", or "from" and "value"',
        )
    media.refused += [name for name in MEDIA if _holds(fields.get(name))]
    role = ROLES.get(role.lower(), role.lower())
    if isinstance(content, list):
        if role == "assistant":  # no target writes images
            media = replace(media, takes=())
        parts = [_part(part, f"{where}, part {n}", media) for n, part in enumerate(content, start=1)]
        content = _joined([part for part in parts if part is not None])
    return fields | {"role": role, "content": content}


def _joined(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The text of parts that are all text, or else the parts as such."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: object, where: str, media: _Media) -> str | dict[str, Any] | None:
    """The text of one part of a message, or a part that names an image or a sound, where that is taken; None for any
    other, whose kind is appended to those of `media`."""
    if isinstance(part, str):
        return part
    fields = part if isinstance(part, dict) else {}
    kind = fields.get("type") or "text"
    held = next((key for key in MEDIA_OF_PARTS if _holds(fields.get(key))), None)
    if isinstance(kind, str) and (kind not in TEXTS or held is not None):
        found = medium_of(fields)
        if found is not None and found.modality in media.takes:
            return openai_part(fields)
        media.refused.append(held if kind in TEXTS and held is not None else kind)
        return None
    text = fields.get(TEXTS[kind]) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise FormatError(
            f"not a part of a message: {excerpt(part)}",
            where=where,
            expected='text, or an object with its type, as {"type": "text", "text": "…"}',
        )
    return text


def _served(record: dict[str, object], where: str, tokenizer: str) -> Served | Refused:
    if "refused" in record:
        return Refused(str(record["refused"]))
    sequences = record.get("sequences")
    try:
        if not isinstance(sequences, list):
            raise TypeError("no sequences")
        parsed = tuple(parse_tokens(sequence) for sequence in sequences)
        media = [_media_of(record, sequence) for sequence in sequences] if record.get("images") else []
        return Served(parsed, tokenizer, tuple(media), record.get("unread") is True)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"not a regenerated row: {type(error).__name__} {error}", where=where, hint="regenerate this file again"
        ) from error


def _media_of(
    record: dict[str, object], sequence: dict[str, Any]
) -> tuple[tuple[MediaSpan, ...], tuple[FiledMedium, ...]]:
    """The spans and images of a sequence, which has read the first ones of its row."""
    images, media = record["images"], sequence.get("media") or []
    if not isinstance(images, list):
        raise TypeError("images are a list")
    number = max((span[-1] for span in media), default=-1) + 1
    return parse_media({"media": media, "images": images[:number]}, len(sequence["tokens"]))


def _distinct(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows with ids that differ: the second row of an id gets `-2`, and so on."""
    seen: Counter[str] = Counter()
    for row in rows:
        seen[row.id] += 1
        yield row if seen[row.id] == 1 else replace(row, id=f"{row.id}-{seen[row.id]}")


def data_files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder in the order of their names."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise FormatError(f"{path.name} has a suffix that is not known", where=path, expected=", ".join(SUFFIXES))
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        raise SourceError("the folder holds no data", where=path, expected=f"files ending in {', '.join(SUFFIXES)}")
    return files


def read_file(path: Path) -> Iterator[Place]:
    """The records of one file with their places, and the digest of the tokenizer that regenerated them, if one did.

    Raises `SourceError` and `FormatError`.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".txt":
        return (Place(where, row) for where, row in _read_text(path))
    return _read_json(path) if path.suffix == ".json" else _read_jsonl(path)


def _read_store(address: str) -> Iterator[Place]:
    """The records of the object at an address, or of all beneath it in the order of their names."""
    names = [name for name in Store(address).names() if not name or PurePath(name).suffix in SUFFIXES]
    if not names:
        raise SourceError("there is no data", where=address, expected=f"objects ending in {', '.join(SUFFIXES)}")
    for name in names:
        own = f"{address.rstrip('/')}/{name}".rstrip("/")
        path = local_file(own)
        for place in read_file(path):
            yield place._replace(where=place.where.replace(str(path), own))


def _read_text(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """The lines of a text file, each a prompt, with their places. Raises `SourceError` and `FormatError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", where=path) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{path.name} is not UTF-8 text", where=path) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}, line {number}", {"prompt": line}


def _read_jsonl(path: Path) -> Iterator[Place]:
    tokenizer = None
    for number, record in read_lines(path):
        where = f"{path}, line {number}"
        if number == 1 and record.get("format") == REGENERATED:
            settings = record.get("settings")
            tokenizer = str(settings.get("tokenizer_sha256")) if isinstance(settings, dict) else ""
        elif number > 1 or record.get("format") != SYNTHESIZED:
            yield Place(where, record, tokenizer)


def _read_json(path: Path) -> Iterator[Place]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", where=path) from error
    records = decoded(text, path.name, path)
    if not isinstance(records, list):
        raise FormatError(f"{path.name} holds {type(records).__name__}", where=path, expected="a list of rows")
    for number, record in enumerate(records, start=1):
        where = f"{path}, row {number}"
        if not isinstance(record, dict):
            raise FormatError(f"the row holds {type(record).__name__}", where=where, expected="an object")
        yield Place(where, record)


def _read_parquet(path: Path) -> Iterator[Place]:
    load_dataset = _datasets(path)
    try:
        rows = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, record in enumerate(undecoded(rows), start=1):
            yield Place(f"{path}, row {number}", dict(record))
    except Exception as error:  # pyarrow and datasets raise many types for a file that is not readable parquet
        raise FormatError(f"{path.name} is not valid parquet: {_first_line(error)}", where=path) from error


def _read_hub(source: str, split: str, subset: str | None, revision: str | None) -> Iterator[Place]:
    repo, _, named = source.partition("@")
    load_dataset = _datasets(source)
    keep_token()
    try:
        rows = load_dataset(repo, subset, split=split, revision=named or revision, streaming=True)
        for number, record in enumerate(undecoded(rows), start=1):
            yield Place(f"{repo}, {split} row {number}", dict(record))
    except Exception as error:  # the network, the Hub, a table and a missing split raise many types
        raise SourceError(
            f"the dataset {source} cannot be read: {_first_line(error)}",
            where=f"split {split}" + (f", subset {subset}" if subset else ""),
            hint="check id, --split and --subset; for a private or gated dataset, run `hf auth login`",
        ) from error


def undecoded(table: Any) -> Iterable[Mapping[str, object]]:
    """The rows of a dataset with images and sounds as they are stored: that they are there is all that is asked, and to
    decode them may fail, or take a package that is not installed."""
    table = table.to_iterable_dataset() if hasattr(table, "to_iterable_dataset") else table
    rows: Iterable[Mapping[str, object]] = table.decode(False) if hasattr(table, "decode") else table
    return rows


def _datasets(source: object) -> Callable[..., Iterable[Mapping[str, object]]]:
    """`datasets.load_dataset`, imported when it is needed."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SourceError(
            "parquet files and Hub datasets are read with the package datasets, which is not installed",
            where=source,
            hint=with_extra("train"),
        ) from error
    return load_dataset


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
