"""Samples: what a draft is trained on, tokens and the loss mask, which says which of them the target has produced.

Stored as JSONL: a first line that says where the tokens come from, then one sample a line. `RowCounts` says what became
of the rows that they were made from: how many were used, and why others were not, or only in part.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit.errors import DraftkitError, FormatError, command
from draftkit.hub.local_paths import public_name
from draftkit.io.atomic import atomic_file
from draftkit.io.jsonl import dump_line, read_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "draftkit-documents"
MAX_TOKEN = 2**31 - 1
Span = tuple[int, int]  # [begin, end) of token indices


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of T tokens that the target reads in one piece.

    `tokens` int32 [T]; `loss_mask` bool [T]: True where the target produced the token, which is the text of its turns
    and their end-of-turn tokens. `id` is the row it was made from, with a suffix where a row made several.
    """

    id: str
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    category: str = "all"

    @classmethod
    def of(cls, id: str, tokens: Sequence[int], spans: Iterable[Span], category: str = "all") -> Sample:
        """A sample from token ids and the spans of its loss mask."""
        import numpy as np  # which rows of prompts do without

        loss_mask = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in spans:
            loss_mask[begin:end] = True
        return cls(id, np.asarray(tokens, dtype=np.int32), loss_mask, category)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def spans(self) -> list[Span]:
        """The spans of the loss mask, ascending."""
        return spans_of(self.loss_mask)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class SamplesOrigin:
    """Where the tokens of a file come from: the target, digests of its tokenizer and chat template, the length cut."""

    target: str
    tokenizer_sha256: str
    template_sha256: str | None = None
    max_length: int | None = None


def spans_of(mask: NDArray[np.bool_]) -> list[Span]:
    """The spans of True in bool [T], ascending."""
    import numpy as np

    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def write_samples(path: Path, samples: Iterable[Sample], origin: SamplesOrigin, *, force: bool = False) -> int:
    """Write samples as they come and return how many; the file appears complete or not at all.

    Raises `DraftkitError` when the file exists and `force` is not given, when the disk is full, and, before anything is
    left behind, whatever the samples raise.
    """
    count = 0
    with atomic_file(path, force) as file:
        file.write(
            dump_line(
                {"format": FORMAT, "version": 1, "origin": asdict(origin) | {"target": public_name(origin.target)}}
            )
        )
        for sample in samples:
            file.write(dump_line(_line(sample)))
            count += 1
    return count


def read_origin(path: Path) -> SamplesOrigin:
    """The first line of a file of samples. Raises `SourceError`, and `FormatError` for any other file."""
    _, header = next(read_lines(path), (1, {}))
    origin = header.get("origin")
    if header.get("format") != FORMAT or header.get("version") != 1 or not isinstance(origin, dict):
        raise FormatError(
            "not a file of prepared samples",
            where=f"{path}, line 1",
            expected="what `draftkit data prepare` writes, version 1",
            hint=command("draftkit", "data", "prepare", path, "OUT", "--target", "TARGET"),
        )
    try:
        return SamplesOrigin(**origin)
    except TypeError as error:
        raise FormatError(f"the origin is not valid: {error}", where=f"{path}, line 1") from error


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file, one at a time.

    Raises `SourceError` when the file cannot be read, `FormatError` naming the line that is damaged.
    """
    read_origin(path)
    for number, line in itertools.islice(read_lines(path), 1, None):
        try:
            yield _document(line)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(
                f"not a sample: {type(error).__name__} {error}",
                where=f"{path}, line {number}",
                expected="id, category, tokens and supervised spans [begin, end), ascending, within the tokens",
                hint="prepare the data again",
            ) from error


def read_training_samples(path: Path) -> list[Sample]:
    """All samples of a prepared file. Raises `DraftkitError` when all loss masks are empty."""
    samples = list(read_samples(path))
    if not any(sample.num_loss_tokens for sample in samples):
        raise DraftkitError(
            "the loss mask of every sample is empty", where=path, hint="draftkit data prepare … reports why"
        )
    return samples


def held_out(samples: Sequence[Sample], share: float) -> tuple[list[int], list[int]]:
    """The numbers of samples to train on and of a share that is held out, by their ids alone: more data leave the
    old samples on their side."""
    limit = int(share * 2**32)
    aside = [int.from_bytes(hashlib.sha256(s.id.encode()).digest()[:4], "big") < limit for s in samples]
    kept = [number for number, out in enumerate(aside) if not out]
    return kept, [number for number, out in enumerate(aside) if out]


def _line(sample: Sample) -> dict[str, object]:
    return {
        "id": sample.id,
        "category": sample.category,
        "tokens": sample.tokens.tolist(),
        "supervised": sample.spans,
    }


def _document(line: dict[str, object]) -> Sample:
    return Sample.of(str(line["id"]), *parse_tokens(line), str(line["category"]))


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


EXAMPLES = 5  # rows named for each reason


class Reason(StrEnum):
    """A reason why a row is not used as it is."""

    REJECTED = "rejected by the template"
    REFUSED = "refused by the target"
    NO_SPAN = "no assistant span"
    TOO_SHORT = "too short"
    TRUNCATED = "truncated"
    REWRITTEN = "history rewritten"
    ALTERED = "answer changed by the template"
    UNPROMPTED = "generation prompt not repeated"
    NO_END = "no end of turn"
    LOOPS = "repeats itself"


CONSEQUENCES = {
    Reason.REJECTED: "left out: the chat template raises an error for it",
    Reason.REFUSED: "left out: it has no response",
    Reason.NO_SPAN: "left out: no assistant has written anything in it, or the template's generation tags mark nothing",
    Reason.TOO_SHORT: "left out: no token of the loss mask after the first is left",
    Reason.TRUNCATED: "cut at the length limit: the end of its last turn is lost",
    Reason.REWRITTEN: "split where a later prompt reads earlier turns differently: samples are what the target reads",
    Reason.ALTERED: "kept as rendered: the template drops or changes a part, as the thought; regenerated rows keep it",
    Reason.UNPROMPTED: "kept: what the target reads before its answer is not all in the rendered turn, as <think>",
    Reason.LOOPS: "left out: most of what it would teach is a repetition",
    Reason.NO_END: "kept, without a label that ends the turn",
}


@dataclass
class Tally:
    """How many rows have something in common, and the first of them: ids, with details where there are any."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, row: str, detail: str = "") -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{row}: {detail}" if detail else row)


@dataclass
class RowCounts:
    """How many rows, samples and tokens a run has read and made. `tallies` holds the reasons that occurred."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    tallies: dict[Reason, Tally] = field(default_factory=dict)

    def note(self, reason: Reason, row: str, detail: str = "") -> None:
        """Count a row under a reason; `detail` is shown beside its id."""
        self.tallies.setdefault(reason, Tally()).add(row, detail)

    def add(self, sample: Sample) -> None:
        """Count a sample that is used."""
        self.samples += 1
        self.tokens += len(sample)
        self.loss_tokens += sample.num_loss_tokens

    def to_dict(self) -> dict[str, object]:
        """The counts as JSON values; each reason with its count, first rows and what was done with them."""
        return {
            "rows": self.rows,
            "documents": self.samples,
            "tokens": self.tokens,
            "supervised_tokens": self.loss_tokens,
            "reasons": [
                {
                    "reason": str(reason),
                    "rows": tally.count,
                    "examples": tally.examples,
                    "consequence": CONSEQUENCES[reason],
                }
                for reason, tally in self.tallies.items()
            ],
        }
