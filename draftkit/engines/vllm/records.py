"""What a run of vLLM leaves: the answers, and its counts of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Progress = Callable[[int, float], None]  # answers done, acceptance length so far


@dataclass(frozen=True)
class DraftCounts:
    """vLLM's counters: steps of a request that had draft tokens, and what became of those.

    Entry i of `num_accepted_tokens_per_pos`: in how many steps draft token i+1 was accepted.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], num_draft_tokens: int) -> DraftCounts:
        """From entry j: the steps that accepted exactly j draft tokens."""
        return cls(
            sum(histogram),
            num_draft_tokens,
            sum(accepted * steps for accepted, steps in enumerate(histogram)),
            tuple(sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)),
        )

    @classmethod
    def total(cls, counts: Sequence[DraftCounts]) -> DraftCounts:
        """The sums of one or more, position by position."""
        return cls(
            sum(c.num_drafts for c in counts),
            sum(c.num_draft_tokens for c in counts),
            sum(c.num_accepted_tokens for c in counts),
            tuple(map(sum, zip(*(c.num_accepted_tokens_per_pos for c in counts), strict=True))),
        )

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        """What was counted since."""
        return DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(
                after - before
                for after, before in zip(
                    self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos, strict=True
                )
            ),
        )

    def follows(self, earlier: DraftCounts) -> bool:
        """Whether counters that only grow can have gone from `earlier` to these."""
        return all(
            after >= before
            for after, before in zip(
                (self.num_drafts, self.num_draft_tokens, *self.num_accepted_tokens_per_pos),
                (earlier.num_drafts, earlier.num_draft_tokens, *earlier.num_accepted_tokens_per_pos),
                strict=True,
            )
        )

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts; NaN without any draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else float("nan")


@dataclass(frozen=True)
class Answer:
    """One request's output.

    `ttft` and `latency`: seconds to the first and to the last token, from when the request was sent to a server, or the
    offline engine took it up. `gaps`: seconds between chunks, where they were seen. `drafts`: the request's own counts,
    where vLLM gives them.
    """

    tokens: tuple[int, ...]
    ttft: float | None
    latency: float | None
    gaps: tuple[float, ...] | None = None
    drafts: DraftCounts | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is no other."""
        if self.ttft is None or self.latency is None or len(self.tokens) < 2:
            return None
        return (self.latency - self.ttft) / (len(self.tokens) - 1)


@dataclass(frozen=True)
class VllmRun:
    """The answers of all requests, in order, and how many seconds they took together.

    `counted`: vLLM's counters over the run; None without a draft. `concerns`: what may be wrong with the figures.
    """

    answers: tuple[Answer, ...]
    seconds: float
    counted: DraftCounts | None
    version: str | None
    concerns: tuple[str, ...] = ()

    @property
    def output_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def counted_by_request(self) -> list[DraftCounts] | None:
        """The counts of each request; None unless vLLM gave all of them."""
        known = [answer.drafts for answer in self.answers if answer.drafts is not None]
        return known if len(known) == len(self.answers) else None

    @property
    def drafts(self) -> DraftCounts | None:
        """The counts of these requests: their own, else the counters, which other requests on a server move too."""
        own = self.counted_by_request
        return self.counted if own is None else DraftCounts.total(own)
