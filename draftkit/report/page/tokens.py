"""Generations token by token: what each round drafted, what the target kept of it, and what it put instead."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from draftkit.results.cell import Transcript, TranscriptRound

Kind = Literal["prefill", "accepted", "recovered", "bonus", "plain", "rejected", "unread"]

# Order and words of the legend.
KINDS: dict[Kind, str] = {
    "accepted": "accepted: drafted, and kept by the target",
    "recovered": "recovered: the target's token where it rejected the draft's",
    "bonus": "bonus: the target's token after a draft accepted in full",
    "rejected": "rejected: the draft's token that the target did not keep",
    "unread": "unread: drafted after a rejected token",
    "plain": "plain: nothing was drafted, or the token is the prompt's first",
}


@dataclass(frozen=True)
class Token:
    text: str
    kind: Kind


@dataclass(frozen=True)
class ShownRound:
    """`tokens` were added to the text; `proposal` is what the draft offered for their places."""

    tokens: tuple[Token, ...]
    proposal: tuple[Token, ...]

    @property
    def rejected(self) -> Token | None:
        return next((token for token in self.proposal if token.kind == "rejected"), None)

    @property
    def summary(self) -> str:
        if not self.proposal:
            return "nothing drafted"
        return f"{sum(token.kind == 'accepted' for token in self.proposal)} of {len(self.proposal)} accepted"


@dataclass(frozen=True)
class ShownTranscript:
    """A generation. `counts`: tokens of each kind in the text."""

    id: str
    category: str | None
    prompt: str
    first: str
    rounds: tuple[ShownRound, ...]
    counts: Counter[Kind]


def show_transcript(transcript: Transcript) -> ShownTranscript:
    rounds = tuple(show_round(round) for round in transcript.rounds)
    counts = Counter(token.kind for round in rounds for token in round.tokens)
    return ShownTranscript(transcript.id, transcript.category, transcript.prompt, transcript.first, rounds, counts)


def show_round(round: TranscriptRound) -> ShownRound:
    """Kinds of all tokens of a round. The end of a text may cut the tokens that a round adds."""
    accepted, drafted = round.accepted, len(round.drafted)
    last: Kind = "plain" if not drafted else "bonus" if accepted == drafted else "recovered"
    return ShownRound(
        tuple(Token(text, "accepted" if i < accepted else last) for i, text in enumerate(round.emitted)),
        tuple(Token(text, _fate(i, accepted)) for i, text in enumerate(round.drafted)),
    )


def _fate(position: int, accepted: int) -> Kind:
    return "accepted" if position < accepted else "rejected" if position == accepted else "unread"


def with_marks(text: str) -> str:
    """A token by itself: spaces and line ends are seen, and so is a token without text (a part of a character)."""
    return text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥") or "∅"


def with_line_ends(text: str) -> str:
    """A token in its text: the line ends, and it is seen which token holds the end."""
    return text.replace("\n", "↵\n")
