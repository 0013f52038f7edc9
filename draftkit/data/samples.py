"""Samples: what a draft is trained on, tokens and the loss mask, which says which of them the target has produced.

`RowCounts` says what became
of the rows that they were made from: how many were used, and why others were not, or only in part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from draftkit.errors import FormatError, command
from draftkit.hub.local_paths import public_name
from draftkit.media import FiledMedium, MediaSpan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "draftkit-documents"
MAX_TOKEN = 2**31 - 1
DIGEST = re.compile("[0-9a-f]{64}")
Span = tuple[int, int]  # [begin, end) of token indices


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of T tokens that the target reads in one piece.

    `tokens` int32 [T]; `loss_mask` bool [T]: True where the target produced the token, which is the text of its turns
    and their end-of-turn tokens. `id` is the row it was made from, with a suffix where a row made several. `media`: the
    tokens that stand for `images`, which the target reads with it, in the order of their spans.
    """

    id: str
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    category: str = "all"
    media: tuple[MediaSpan, ...] = ()
    images: tuple[FiledMedium, ...] = ()

    @classmethod
    def of(
        cls,
        id: str,
        tokens: Sequence[int] | NDArray[np.int32],
        spans: Iterable[Span],
        category: str = "all",
        media: tuple[MediaSpan, ...] = (),
        images: tuple[FiledMedium, ...] = (),
    ) -> Sample:
        """A sample from token ids and the spans of its loss mask."""
        import numpy as np  # which rows of prompts do without

        loss_mask = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in spans:
            loss_mask[begin:end] = True
        return cls(id, np.asarray(tokens, dtype=np.int32), loss_mask, category, media, images)

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
    """Where the tokens of a file come from: the target, digests of its tokenizer and chat template, the length cut, and
    the folder of the images as it is reached from that of the file."""

    target: str
    tokenizer_sha256: str
    template_sha256: str | None = None
    max_length: int | None = None
    media_root: str | None = None


def header(origin: SamplesOrigin) -> dict[str, object]:
    """What stands before samples in a file."""
    stated = asdict(origin) | {"target": public_name(origin.target)}
    if origin.media_root is None:
        del stated["media_root"]
    return {"format": FORMAT, "version": 1, "origin": stated}


def origin_of(header: Mapping[str, object], where: str) -> SamplesOrigin:
    """The origin in a `header` that was read at `where`. Raises `FormatError` for anything else."""
    origin = header.get("origin")
    if header.get("format") != FORMAT or header.get("version") != 1 or not isinstance(origin, dict):
        raise FormatError(
            "not a file of prepared samples",
            where=where,
            expected="what `draftkit data prepare` writes, version 1",
            hint=command("draftkit", "data", "prepare", where.partition(", line")[0], "OUT", "--target", "TARGET"),
        )
    try:
        return SamplesOrigin(**origin)
    except TypeError as error:
        raise FormatError(f"the origin is not valid: {error}", where=where) from error


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


def media_line(media: Sequence[MediaSpan], images: Sequence[FiledMedium]) -> dict[str, object]:
    """What is stored of tokens that stand for images; nothing where there are none."""
    if not images:
        return {}
    return {"media": [[*astuple(span)] for span in media], "images": [asdict(image) for image in images]}


def parse_media(line: Mapping[str, object], length: int) -> tuple[tuple[MediaSpan, ...], tuple[FiledMedium, ...]]:
    """The opposite of `media_line`, for `length` tokens. Raises `KeyError`, `TypeError` or `ValueError` for anything
    else."""
    media, images = line.get("media") or [], line.get("images") or []
    if not isinstance(media, list) or not isinstance(images, list):
        raise TypeError("media and images are lists")
    spans = tuple(MediaSpan(*span) for span in media)
    places = tuple(FiledMedium(**image) for image in images)
    if not all(isinstance(image.place, str) and DIGEST.fullmatch(str(image.sha256)) for image in places):
        raise ValueError("an image has a place and a SHA-256")
    end = 0
    for span in spans:
        whole = all(type(number) is int for number in (span.start, span.length, span.index))
        if not whole or span.modality != "image" or not 0 <= span.index < len(places):
            raise ValueError(f"{span} of {len(places)} images")
        if not end <= span.start < span.start + span.length <= length:
            raise ValueError(f"{span} of {length} tokens")
        end = span.start + span.length
    if {span.index for span in spans} != set(range(len(places))):
        raise ValueError("every image has tokens that stand for it")
    return spans, places


def spans_of(mask: NDArray[np.bool_]) -> list[Span]:
    """The spans of True in bool [T], ascending."""
    import numpy as np

    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


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
    NEAR = "near an excluded prompt"
    BAD_IMAGE = "image refused"
    UNPLACED = "images not placed"
    CUT_IMAGE = "image cut"
    OTHER_IDS = "read as other tokens"
    UNREAD = "not read here"


LEFT_OUT = "left out: "  # how the consequence begins of what keeps a row from being used
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
    Reason.NEAR: "left out: more than half of a prompt that is measured on is in it, by its runs of three words",
    Reason.NO_END: "kept, without a label that ends the turn",
    Reason.BAD_IMAGE: "left out: an image of it is unreadable, too large or not below the folder of the data",
    Reason.UNPLACED: "left out: the chat template does not place its images, or a text spells a placeholder",
    Reason.CUT_IMAGE: "left out: the length limit would cut the tokens of an image",
    Reason.OTHER_IDS: "left out: the server has read its prompt as other token ids than the target's processor makes",
    Reason.UNREAD: "left out: sounds, and images at addresses, are only sent to servers: no target here has them",
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
