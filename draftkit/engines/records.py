"""What an engine gives: answers, and its counts of drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from math import isfinite

from draftkit.requests import Request

Token = int | str  # an id; where a server gives none, the token's text

MOST_COUNTED = 1 << 53  # up to which a float tells one whole number from the next
MOST_DRAFTED = 1024  # draft tokens of a step; what any engine drafts is far below
MOST_CUT = 64  # accepted tokens of a step that are cut off, where an engine tells no positions
ROUNDING = 0.01  # by which a log-probability may exceed 0


def whole_number(value: object, what: str, most: int = MOST_COUNTED) -> int:
    """A count, of tokens or steps, as an engine tells it. Raises `ValueError` for what is none."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not 0 <= number <= most or number != int(number):
        raise ValueError(f"{what} is {str(value)[:100]}, and no whole number from 0 to {most:,}")
    return int(number)


def whole_numbers(values: Sequence[object], what: str, most: int = MOST_COUNTED) -> list[int]:
    """The counts of steps, by what they accepted. Raises `ValueError` for what is none, and for too many."""
    if not 0 < len(values) <= MOST_DRAFTED + 1:
        raise ValueError(f"{what} has {len(values):,} entries, one for each number of accepted draft tokens")
    return [whole_number(value, what, most) for value in values]


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
        """Count, from entry j, the steps that accepted exactly j draft tokens."""
        at_least = tuple(accumulate(reversed(histogram)))[::-1]  # entry j: the steps that accepted j or more
        return cls(
            sum(histogram),
            num_draft_tokens,
            sum(accepted * steps for accepted, steps in enumerate(histogram)),
            at_least[1:],
        )

    @classmethod
    def of_chunks(cls, sizes: Sequence[int]) -> DraftCounts:
        """The counts by the sizes of an answer's chunks, where every step but the prefill's is a chunk of its own."""
        steps = Counter(size - 1 for size in sizes[1:])
        return cls.of_histogram([steps[number] for number in range(max(steps, default=0) + 1)], None)

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
        """The counts of what happened after `earlier`."""
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

    @property
    def fell(self) -> bool:
        """Whether this is a difference of counters, which only grow, that cannot be one."""
        at = self.num_accepted_tokens_per_pos
        return min(self.num_drafts, self.num_draft_tokens or 0, self.num_accepted_tokens, *at) < 0

    def impossible(self, tokens: int, answers: int = 1) -> str | None:
        """Why these cannot be the counts of so many answers with so many tokens in all; None where they can."""
        drafts, accepted, at = self.num_drafts, self.num_accepted_tokens, self.num_accepted_tokens_per_pos
        if self.fell:
            return "a count is negative"
        if self.num_draft_tokens is not None and not accepted <= self.num_draft_tokens <= drafts * MOST_DRAFTED:
            return f"{accepted:,} of {self.num_draft_tokens:,} draft tokens were accepted, in {drafts:,} steps"
        if accepted and not drafts:
            return f"{accepted:,} draft tokens were accepted in no step"
        if at and (sum(at) != accepted or any(later > earlier for earlier, later in pairwise((drafts, *at)))):
            return f"{', '.join(map(str, at[:20]))} steps accepted at each position, of {drafts:,}, {accepted:,} tokens"
        # A step gives what it accepted and one more token, of which the end of an answer cuts off less than a step.
        if drafts + accepted > tokens + answers * (len(at) or MOST_CUT):
            return f"{drafts:,} steps accepted {accepted:,} draft tokens, and gave {tokens:,} tokens"
        return None

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

    @property
    def accepted(self) -> int | None:
        return None if self.drafts is None else self.drafts.num_accepted_tokens


@dataclass(frozen=True)
class Answer:
    """One request's output.

    `ttft` and `latency`: seconds to the first and to the last token, from when the request was sent to a server, or the
    offline engine took it up. `gaps`: seconds between chunks, where they were seen. `drafts`: the request's own counts,
    where the engine gives them. `text` and `count`: what was said and of how many tokens, where a server names not all.
    `logprobs` and `alternatives`: of each token the log-probability, and those of the likeliest ones there, where they
    were asked for. `steps`: those after the prefill, of an engine that keeps a record of each. `prompt`: the ids that a
    server says it has read.
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
    steps: int | None = None
    prompt: tuple[int, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of an engine that gives ids."""
        return tuple(token for token in self.tokens if isinstance(token, int))

    @property
    def num_tokens(self) -> int:
        return max(len(self.tokens), self.count or 0)

    def equals(self, other: Answer) -> bool:
        """Whether two answers say the same: token for token, or as text where a server names no tokens."""
        return self.tokens == other.tokens if self.tokens and other.tokens else self.text == other.text

    def impossible(self, request: Request) -> str | None:
        """Why this cannot be an answer to this request; None where it can."""
        if self.num_tokens > request.max_new_tokens:
            return f"{self.num_tokens:,} tokens, where {request.max_new_tokens:,} were asked for at most"
        if odd := [token for token in self.tokens if not (isinstance(token, str) or _is_id(token))]:
            return f"{str(odd[0])[:100]} is no token"
        beside = (p for others in self.alternatives or () for p in others.values())
        for logprob in (*(self.logprobs or ()), *beside):
            if not (isfinite(logprob) and logprob <= ROUNDING):
                return f"{logprob} is no log-probability"
        return None if self.drafts is None else self.drafts.impossible(self.num_tokens)

    @property
    def skipped(self) -> int:
        """The steps in which nothing was drafted; without a record of them told from the tokens, as each step gives one
        more than is accepted: too few by what an end has cut off of the last step, which is less than K. 0 where the
        request was not counted.
        """
        own = self.drafts
        if own is not None and self.steps is not None:
            return self.steps - own.num_drafts
        return 0 if own is None else max(self.num_tokens - 1 - own.num_accepted_tokens - own.num_drafts, 0)

    @property
    def rounds(self) -> int:
        """The steps after the prefill; of an answer that was not counted by itself, those of plain decoding."""
        if self.steps is not None:
            return self.steps
        return self.num_tokens - 1 if self.drafts is None else self.drafts.num_drafts + self.skipped

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is no other."""
        if self.ttft is None or self.latency is None or self.num_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.num_tokens - 1)


def _is_id(token: object) -> bool:
    return type(token) is int and 0 <= token < 1 << 31
