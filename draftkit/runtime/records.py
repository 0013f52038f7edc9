"""What a run gives: the record of every round, from which every statistic is derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from draftkit.requests import Request

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
    `time.perf_counter`. `finished` is None while the request runs.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finished: FinishReason | None = None
    started: float = 0.0
    times: list[float] = field(default_factory=list)

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
