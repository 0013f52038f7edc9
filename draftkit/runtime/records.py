"""What a run gives: the record of every round, from which every statistic is derived, and text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from draftkit.requests import Request

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for the first bytes of a character
FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Round:
    """One draft–verify round of one request.

    `position`: tokens of prompt and output before it. `drafted` ≤ K and `accepted` count draft tokens, before any
    truncation; `emitted` tokens went into the output (at most accepted + 1, fewer where the generation ended).
    `expected[i]`: the probability that draft token i stands given that those before it do, from the same forwards.
    `proposal`: the draft tokens. `beyond`: the sequences were too long for the draft (`Drafter.max_positions`), and
    token 0 stood in the place of its tokens, or no tree grew. Where an engine keeps what the draft said (`estimates`),
    of each draft token `confidences`, what its own head said of the chance that it stands, and `probabilities`, the
    draft's of the token: in what it was drawn from, and at temperature 1 where it was chosen. Empty where the draft has
    none, and of a tree. Of a tree, `parents` are the numbers of each token's parent, counted from 1, 0 where it is the
    root; `expected[i]` is then that the walk goes on after i tokens.
    """

    position: int
    drafted: int
    accepted: int
    emitted: int
    expected: tuple[float, ...] = ()
    proposal: tuple[int, ...] = ()
    beyond: bool = False
    confidences: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()


@dataclass
class Generation:
    """The output of one request: token ids (the one that ended it included), and the rounds that made it.

    The first token comes from the prefill and belongs to no round. `started` is when the request got its slot, `times`
    when each chunk of tokens reached the host: the first token, then one entry a round; in seconds of
    `time.perf_counter`. `text` is there when the engine has a tokenizer. `finished` is None while the request runs.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finished: FinishReason | None = None
    started: float = 0.0
    times: list[float] = field(default_factory=list)
    text: str | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round: 1 + accepted drafts / rounds; None where no round was run."""
        return 1 + sum(r.accepted for r in self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def ttft(self) -> float:
        """Seconds from the start to the first token."""
        return self.times[0] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first, as vLLM counts them; None where there is no other."""
        others = len(self.tokens) - 1
        return (self.times[-1] - self.times[0]) / others if others else None

    @property
    def itl(self) -> list[float]:
        """Seconds between chunks; a chunk may carry several tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Tokenizer(Protocol):
    """What the engine needs of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """The text of one generation, piece by piece; the pieces joined are the text of all its tokens.

    A token's text may depend on the one before it (a leading space), so each piece is decoded with the piece before it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._previous = 0  # where the tokens of the last piece begin
        self._given = 0  # where those begin whose text was not given yet

    def next(self, tokens: list[int], *, last: bool) -> str:
        """What `tokens`, all so far, add to the text; a character that may be incomplete waits, unless they are all."""
        before = self._decode(tokens[self._previous : self._given])
        text = self._decode(tokens[self._previous :])
        if text.endswith(INCOMPLETE) and not last:
            return ""
        self._previous, self._given = self._given, len(tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
