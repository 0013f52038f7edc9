"""Documents: what a draft is trained on, tokens and which of them the target has produced.

Stored as JSONL: a first line that says where the tokens come from, then one document a line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftkit.errors import DraftkitError, FormatError
from draftkit.io.atomic import atomic_file
from draftkit.io.jsonl import dump_line, read_lines

FORMAT = "draftkit-documents"
MAX_TOKEN = 2**31 - 1
Span = tuple[int, int]  # [begin, end) of token indices


@dataclass(frozen=True, eq=False)
class Document:
    """A sequence of T tokens that the target reads in one piece.

    `tokens` int32 [T]; `supervised` bool [T]: True where the target produced the token, which is the text of its turns
    and their end-of-turn tokens. `id` is the row it was made from, with a suffix where a row made several.
    """

    id: str
    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    category: str = "all"

    @classmethod
    def of(cls, id: str, tokens: Sequence[int], spans: Iterable[Span], category: str = "all") -> Document:
        """A document from token ids and the spans that are supervised."""
        supervised = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in spans:
            supervised[begin:end] = True
        return cls(id, np.asarray(tokens, dtype=np.int32), supervised, category)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def spans(self) -> list[Span]:
        """The supervised spans, ascending."""
        return spans_of(self.supervised)

    @property
    def num_supervised(self) -> int:
        return int(self.supervised.sum())


@dataclass(frozen=True)
class Origin:
    """Where the tokens of a file come from: the target, digests of its tokenizer and chat template, the length cut."""

    target: str
    tokenizer_sha256: str
    template_sha256: str | None = None
    max_length: int | None = None


def spans_of(supervised: NDArray[np.bool_]) -> list[Span]:
    """The spans of True in bool [T], ascending."""
    edges = np.flatnonzero(np.diff(supervised, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def write_documents(path: Path, documents: Iterable[Document], origin: Origin, *, force: bool = False) -> int:
    """Write documents as they come and return how many; the file appears complete or not at all.

    Raises `DraftkitError` when the file exists and `force` is not given, when the disk is full, and, before anything is
    left behind, whatever the documents raise.
    """
    count = 0
    with atomic_file(path, force) as file:
        file.write(dump_line({"format": FORMAT, "version": 1, "origin": asdict(origin)}))
        for document in documents:
            file.write(dump_line(_line(document)))
            count += 1
    return count


def read_origin(path: Path) -> Origin:
    """The first line of a file of documents. Raises `SourceError`, and `FormatError` for any other file."""
    _, header = next(read_lines(path), (1, {}))
    origin = header.get("origin")
    if header.get("format") != FORMAT or header.get("version") != 1 or not isinstance(origin, dict):
        raise FormatError(
            "not a file of prepared documents",
            where=f"{path}, line 1",
            expected="what `draftkit data prepare` writes, version 1",
            hint=f"draftkit data prepare {path} OUT --target TARGET",
        )
    try:
        return Origin(**origin)
    except TypeError as error:
        raise FormatError(f"the origin is not valid: {error}", where=f"{path}, line 1") from error


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a file, one at a time.

    Raises `SourceError` when the file cannot be read, `FormatError` naming the line that is damaged.
    """
    read_origin(path)
    for number, line in itertools.islice(read_lines(path), 1, None):
        try:
            yield _document(line)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(
                f"not a document: {type(error).__name__} {error}",
                where=f"{path}, line {number}",
                expected="id, category, tokens and supervised spans [begin, end), ascending, within the tokens",
                hint="prepare the data again",
            ) from error


def read_training_documents(path: Path) -> list[Document]:
    """All documents of a prepared file. Raises `DraftkitError` when none has a supervised token."""
    documents = list(read_documents(path))
    if not any(document.num_supervised for document in documents):
        raise DraftkitError(
            "no document has a supervised token", where=path, hint="draftkit data prepare … reports why"
        )
    return documents


def _line(document: Document) -> dict[str, object]:
    return {
        "id": document.id,
        "category": document.category,
        "tokens": document.tokens.tolist(),
        "supervised": document.spans,
    }


def _document(line: dict[str, object]) -> Document:
    return Document.of(str(line["id"]), *parse_tokens(line), str(line["category"]))


def parse_tokens(line: dict[str, object]) -> tuple[list[int], list[Span]]:
    """Token ids and spans of a stored object. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
    tokens, spans = line["tokens"], line["supervised"]
    if not isinstance(tokens, list) or not isinstance(spans, list):
        raise TypeError("tokens and supervised are lists")
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN for token in tokens):
        raise ValueError("a token id is a whole number from 0 on")
    edges = [edge for begin, end in spans for edge in (begin, end)]
    if edges != sorted(set(edges)) or any(type(edge) is not int or not 0 <= edge <= len(tokens) for edge in edges):
        raise ValueError(f"spans {spans} of {len(tokens)} tokens")
    return tokens, [(begin, end) for begin, end in spans]
