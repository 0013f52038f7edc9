"""What a run of vLLM leaves: the answers, and its counts of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from draftkit.requests import Request

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
    def skipped(self) -> int:
        """The steps in which nothing was drafted, told from the tokens: each step gives one more than is accepted.

        Too few by what an end has cut off of the last step, which is less than K. 0 where the request was not counted.
        """
        own = self.drafts
        return 0 if own is None else max(len(self.tokens) - 1 - own.num_accepted_tokens - own.num_drafts, 0)

    @property
    def rounds(self) -> int:
        """The steps after the prefill; of an answer that was not counted by itself, those of plain decoding."""
        return len(self.tokens) - 1 if self.drafts is None else self.drafts.num_drafts + self.skipped

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

    @classmethod
    def joined(cls, passes: Sequence[Sequence[VllmRun]]) -> VllmRun:
        """One run of all blocks, with the counts of the first pass and the mean times of all."""
        first = passes[0]
        counted = [run.counted for run in first if run.counted is not None]
        answers = [[answer for run in runs for answer in run.answers] for runs in passes]
        return cls(
            tuple(replace(found[0], latency=_mean([a.latency for a in found])) for found in zip(*answers, strict=True)),
            _mean([sum(run.seconds for run in runs) for runs in passes]) or 0.0,
            DraftCounts.total(counted) if counted else None,
            first[0].version,
            tuple(dict.fromkeys(concern for runs in passes for run in runs for concern in run.concerns)),
        )

    @property
    def pace(self) -> float:
        """Seconds of a step, as far as answers are timed; else of the run over its steps."""
        timed = [a.latency - a.ttft for a in self.answers if a.latency is not None and a.ttft is not None]
        seconds = sum(timed) if len(timed) == len(self.answers) else self.seconds
        return seconds / max(sum(answer.rounds for answer in self.answers), 1)

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


Lane = Callable[[Sequence[Request]], VllmRun]  # an engine that is ready for requests


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
