"""How much of a text the tokens are that a transplant could copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import SourceError
from draftkit.io.records import to_dict
from draftkit.prepare.matching import KINDS, Kind, Match
from draftkit.prepare.vocabulary import Vocabulary

EXAMPLES = 10


@dataclass(frozen=True)
class Coverage:
    """What the tokens of a text are. `counts`: kind → how many; `examples`: the commonest that are no copies."""

    tokens: int
    counts: dict[Kind, int]
    examples: tuple[tuple[str, int], ...]

    def to_dict(self) -> dict[str, object]:
        return to_dict(self)


def measure_coverage(corpus: Path, target: Vocabulary, matches: Sequence[Match]) -> Coverage:
    """Tokenize a text file with the target's tokenizer, line by line, and count where its tokens come from.

    Raises `SourceError` for a file that cannot be read as text.
    """
    uses = _count_tokens(corpus, target)
    counts = Counter[Kind]()
    for token, count in uses.items():
        counts[matches[token].kind] += count
    other = [(token, count) for token, count in uses.most_common() if matches[token].kind not in ("exact", "role")]
    return Coverage(
        tokens=uses.total(),
        counts={kind: counts[kind] for kind in KINDS},
        examples=tuple((target.tokenizer.decode([token]), count) for token, count in other[:EXAMPLES]),
    )


def _count_tokens(corpus: Path, target: Vocabulary) -> Counter[int]:
    uses = Counter[int]()
    try:
        with corpus.open(encoding="utf-8") as lines:
            for line in lines:
                ids = target.tokenizer.encode(line, add_special_tokens=False)
                uses.update(token for token in ids if token < target.size)
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"the corpus cannot be read: {error}", where=corpus, expected="a text file in UTF-8"
        ) from error
    return uses
