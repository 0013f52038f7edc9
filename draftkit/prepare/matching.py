"""Which tokens of a donor each token of a target is made of."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from draftkit.errors import FormatError, SourceError
from draftkit.io.records import to_dict
from draftkit.prepare.vocabulary import ROLES, Vocabulary
from draftkit.targets.tokens import CHARACTER_OF, SPACE, Name, is_byte_level, words_of

MatchKind = Literal["exact", "role", "pieces", "average", "unused"]
KINDS: tuple[MatchKind, ...] = get_args(MatchKind)


@dataclass(frozen=True)
class Match:
    """Where the row of one token comes from; `donors` are the tokens of the donor in the order of the text.

    - `exact`: the same bytes, or a special token of the same name.
    - `role`: the special token for the same purpose.
    - `pieces`: the donor writes the token's bytes as several tokens.
    - `average`: nothing corresponds; no `donors`.
    - `unused`: a row without a token; `donors` is such a row of the donor, if one is left.
    """

    kind: MatchKind
    donors: tuple[int, ...] = ()


AVERAGE = Match("average")


def match_vocabularies(donor: Vocabulary, target: Vocabulary) -> list[Match]:
    """A match for every row of the target.

    Special tokens go by their role first, then tokens by what they stand for. A row of the donor is given once: of
    several target tokens for the same bytes the tokenizer writes only the first, and a copy at another of them would
    tie with it in every prediction. The others take what is left of the donor's own duplicates, then the average.
    Raises `FormatError` for a donor whose tokens do not go down to bytes.
    """
    segmenter = Segmenter(donor.tokenizer, donor.name)
    rows: dict[int, Match] = {}
    for token, other in _same_role(donor, target):
        same = donor.named[other] == target.named[token]
        rows[token] = Match("exact" if same else "role", (other,))
    given = {other for match in rows.values() for other in match.donors}
    free = _by_name((token, name) for token, name in donor.named.items() if token not in given)
    matched = {target.named[token] for token in rows}
    for token, name in target.named.items():
        if token in rows:
            continue
        if free[name]:
            rows[token] = Match("exact", (free[name].pop(0),))
        else:
            rows[token] = AVERAGE if name in matched or isinstance(name, str) else _pieces(segmenter, name, donor)
        matched.add(name)
    padding = iter(donor.unused)
    for row in target.unused:
        rows[row] = Match("unused", tuple(other for other in [next(padding, None)] if other is not None))
    return [rows[row] for row in range(target.size)]


def count_kinds(matches: Iterable[Match]) -> dict[MatchKind, int]:
    """How many rows have each kind of match."""
    counts = Counter(match.kind for match in matches)
    return {kind: counts[kind] for kind in KINDS}


def _same_role(donor: Vocabulary, target: Vocabulary) -> list[tuple[int, int]]:
    """Pairs of a target's and a donor's special token for the same purpose, each token once."""
    pairs: dict[int, int] = {}
    for role in ROLES:
        token, other = target.roles.get(role), donor.roles.get(role)
        if token is not None and other is not None and token not in pairs and other not in pairs.values():
            pairs[token] = other
    return list(pairs.items())


def _by_name(named: Iterable[tuple[int, Name]]) -> defaultdict[Name, list[int]]:
    tokens: defaultdict[Name, list[int]] = defaultdict(list)
    for token, name in named:
        tokens[name].append(token)
    return tokens


def _pieces(segmenter: Segmenter, text: bytes, donor: Vocabulary) -> Match:
    """The donor's tokens for a text, or the average where they are not all of it (characters it does not know)."""
    pieces = segmenter.pieces(text)
    written = b"".join(name for piece in pieces if isinstance(name := donor.named.get(piece), bytes))
    return Match("pieces", pieces) if pieces and written == text else AVERAGE


EXAMPLES = 10


@dataclass(frozen=True)
class Coverage:
    """The kinds of match of a text's tokens. `counts`: kind → how many; `examples`: the commonest that are no
    copies."""

    tokens: int
    counts: dict[MatchKind, int]
    examples: tuple[tuple[str, int], ...]

    def to_dict(self) -> dict[str, object]:
        return to_dict(self)


def measure_coverage(corpus: Path, target: Vocabulary, matches: Sequence[Match]) -> Coverage:
    """Tokenize a text file with the target's tokenizer, line by line, and count where its tokens come from.

    Raises `SourceError` for a file that cannot be read as text.
    """
    uses = _count_tokens(corpus, target)
    counts = Counter[MatchKind]()
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


ASCII = set(range(0x20, 0x7F))


class Segmenter:
    """Cuts bytes into a tokenizer's tokens with its merges or scores alone.

    Normalization and pre-tokenization, with the space that some tokenizers put before a text, belong to texts and not
    to the tokens that a text consists of. Raises `FormatError` for tokenizers whose tokens do not go down to bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        check_kind(tokenizer, name)
        backend = tokenizer.backend_tokenizer
        self._model = backend.model
        self._ids = {word: token for token, word in words_of(tokenizer).items()}
        self._byte_level = is_byte_level(self._ids)
        alphabet = CHARACTER_OF if self._byte_level else {byte: f"<0x{byte:02X}>" for byte in range(0x100)}
        self._bytes = {byte: self._ids[word] for byte, word in alphabet.items() if word in self._ids}
        falls_back = self._byte_level or json.loads(backend.to_str())["model"].get("byte_fallback")
        if not falls_back or not self._bytes.keys() >= ASCII:  # rare bytes are missing in many, as 0xF1 in SmolLM2's
            raise FormatError(
                f"the tokenizer of {name} has no tokens for single bytes, so there is text that it cannot write",
                expected="byte-level BPE, or BPE or unigrams with byte fallback",
            )

    def pieces(self, text: bytes) -> tuple[int, ...]:
        """The tokens that `text` is cut into; bytes that are not UTF-8 are tokens of their own. Bytes that
        no token stands for are missing."""
        if self._byte_level:
            return self._cut("".join(CHARACTER_OF[byte] for byte in text))
        try:
            return self._cut(text.decode().replace(" ", SPACE))
        except UnicodeDecodeError:
            return tuple(self._bytes[byte] for byte in text if byte in self._bytes)

    def _cut(self, word: str) -> tuple[int, ...]:
        return tuple(piece.id for piece in self._model.tokenize(word))


def check_kind(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `FormatError` for a tokenizer whose tokens do not stand for bytes: WordPiece, words, word endings."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise FormatError(
            f"{name} has a {type(tokenizer).__name__}, which the tokenizers library does not run",
            expected="a model with a tokenizer.json",
        )
    kind = type(backend.model).__name__
    if kind not in ("BPE", "Unigram"):
        raise FormatError(f"the tokenizer of {name} is of the kind {kind}", expected="BPE or Unigram")
    for marker in ("continuing_subword_prefix", "end_of_word_suffix"):
        if written := getattr(backend.model, marker, None):
            raise FormatError(f"the tokenizer of {name} marks words: {marker} is {written!r}", expected="no such mark")
