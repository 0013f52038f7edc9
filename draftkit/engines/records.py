"""What a run of another engine leaves: the answers, and its counts of drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean

from draftkit.requests import Request

Progress = Callable[[int, float], None]  # answers done, acceptance length so far
Token = int | str  # an id; where a server gives none, the token's text


@dataclass(frozen=True)
class DraftCounts:
    """Steps of a request that had draft tokens, and what became of those, in vLLM's terms.

    Entry i of `num_accepted_tokens_per_pos`: in how many steps draft token i+1 was accepted; empty where an engine does
    not say. `num_draft_tokens`: None where it does not say.
    """

    num_drafts: int
    num_draft_tokens: int | None
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], num_draft_tokens: int | None) -> DraftCounts:
        """From entry j: the steps that accepted exactly j draft tokens."""
        return cls(
            sum(histogram),
            num_draft_tokens,
            sum(accepted * steps for accepted, steps in enumerate(histogram)),
            tuple(sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)),
        )

    @classmethod
    def of_chunks(cls, sizes: Sequence[int]) -> DraftCounts:
        """From the tokens of each chunk of an answer, where every step but the prefill's is a chunk of its own."""
        accepted = [size - 1 for size in sizes[1:]]
        return cls.of_histogram([accepted.count(number) for number in range(max(accepted, default=0) + 1)], None)

    @classmethod
    def total(cls, counts: Sequence[DraftCounts]) -> DraftCounts:
        """The sums of one or more, position by position."""
        drafted = [c.num_draft_tokens for c in counts if c.num_draft_tokens is not None]
        return cls(
            sum(c.num_drafts for c in counts),
            sum(drafted) if len(drafted) == len(counts) else None,
            sum(c.num_accepted_tokens for c in counts),
            tuple(map(sum, zip_longest(*(c.num_accepted_tokens_per_pos for c in counts), fillvalue=0))),
        )

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        """What was counted since."""
        drafted = (self.num_draft_tokens, earlier.num_draft_tokens)
        return DraftCounts(
            self.num_drafts - earlier.num_drafts,
            None if drafted[0] is None or drafted[1] is None else drafted[0] - drafted[1],
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(
                after - before
                for after, before in zip_longest(
                    self.num_accepted_tokens_per_pos, earlier.num_accepted_tokens_per_pos, fillvalue=0
                )
            ),
        )

    def follows(self, earlier: DraftCounts) -> bool:
        """Whether counters that only grow can have gone from `earlier` to these."""
        since = self - earlier
        grown = (since.num_drafts, since.num_draft_tokens or 0, *since.num_accepted_tokens_per_pos)
        return all(count >= 0 for count in grown)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts; NaN without any draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else float("nan")


@dataclass(frozen=True)
class Counters:
    """Counters of a server or an engine at one time: of drafts, and of requests and output tokens; None where they are
    not counted."""

    drafts: DraftCounts | None = None
    finished: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Answer:
    """One request's output.

    `ttft` and `latency`: seconds to the first and to the last token, from when the request was sent to a server, or the
    offline engine took it up. `gaps`: seconds between chunks, where they were seen. `drafts`: the request's own counts,
    where the engine gives them. `text` and `count`: what was said and of how many tokens, where a server names not all.
    `logprobs` and `alternatives`: of each token the log-probability, and those of the likeliest ones there, where they
    were asked for.
    """

    tokens: tuple[Token, ...]
    ttft: float | None
    latency: float | None
    gaps: tuple[float, ...] | None = None
    drafts: DraftCounts | None = None
    text: str = ""
    count: int | None = None
    logprobs: tuple[float, ...] | None = None
    alternatives: tuple[Mapping[Token, float], ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of an engine that gives ids."""
        return tuple(token for token in self.tokens if isinstance(token, int))

    @property
    def num_tokens(self) -> int:
        return max(len(self.tokens), self.count or 0)

    def equals(self, other: Answer) -> bool:
        """Whether both say the same: token for token, or as text where a server names no tokens."""
        return self.tokens == other.tokens if self.tokens and other.tokens else self.text == other.text

    @property
    def skipped(self) -> int:
        """The steps in which nothing was drafted, told from the tokens: each step gives one more than is accepted.

        Too few by what an end has cut off of the last step, which is less than K. 0 where the request was not counted.
        """
        own = self.drafts
        return 0 if own is None else max(self.num_tokens - 1 - own.num_accepted_tokens - own.num_drafts, 0)

    @property
    def rounds(self) -> int:
        """The steps after the prefill; of an answer that was not counted by itself, those of plain decoding."""
        return self.num_tokens - 1 if self.drafts is None else self.drafts.num_drafts + self.skipped

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is no other."""
        if self.ttft is None or self.latency is None or self.num_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_tokens - 1)


@dataclass(frozen=True)
class EngineRun:
    """The answers of all requests, in order, and how many seconds they took together.

    `counted`: the engine's counters over the run; None without a draft, and where it has none. `concerns`: what may be
    wrong with the figures.
    """

    answers: tuple[Answer, ...]
    seconds: float
    counted: DraftCounts | None
    version: str | None
    concerns: tuple[str, ...] = ()

    @classmethod
    def joined(cls, passes: Sequence[Sequence[EngineRun]]) -> EngineRun:
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
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def counted_by_request(self) -> list[DraftCounts] | None:
        """The counts of each request; None unless the engine gave all of them."""
        known = [answer.drafts for answer in self.answers if answer.drafts is not None]
        return known if len(known) == len(self.answers) else None

    @property
    def drafts(self) -> DraftCounts | None:
        """The counts of these requests: their own, else the counters, which other requests on a server move too."""
        own = self.counted_by_request
        if own is None:
            return self.counted
        total, counted = DraftCounts.total(own), self.counted
        if total.num_accepted_tokens_per_pos or counted is None:
            return total
        if counted.num_accepted_tokens != total.num_accepted_tokens:  # others' requests are among them
            return total
        return replace(total, num_accepted_tokens_per_pos=counted.num_accepted_tokens_per_pos)


Lane = Callable[[Sequence[Request]], EngineRun]  # an engine that is ready for requests


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
