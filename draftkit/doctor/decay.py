"""How acceptance falls: from position to position of a draft, with the context, and over an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from draftkit.results.cell import Interval
from draftkit.results.statistics import expected_sums, gain
from draftkit.runtime.records import Generation, Round

FIRST_LOW = 0.35  # of first draft tokens accepted; sound drafts of any kind have more on text of their kind
COLLAPSE = 0.5  # conditional rate of the second against the first
MARGIN = 0.15  # tokens a round, by which acceptance must fall to be called falling
MIN_ROUNDS = 20  # that a share must be of


@dataclass(frozen=True)
class Decay:
    """`rates[i]`: of the rounds that accepted the first i drafts, the share that accepted the next, and of how many.

    `over_context`: by how much the acceptance length of long prompts exceeds that of short ones, from the first half
    of each answer; `over_answer`: that of the second half of answers that of the first. `patterns`: what that says.
    """

    rates: tuple[float, ...]
    rounds: tuple[int, ...]
    over_context: Interval | None
    over_answer: Interval | None
    patterns: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def classify(generations: Sequence[Generation], k: int) -> Decay:
    """Name the ways in which acceptance falls."""
    stood = [[r.expected[i] for g in generations for r in g.rounds if r.accepted >= i] for i in range(k)]
    before = tuple(map(len, stood))
    rates = tuple(fmean(expected) if expected else 0.0 for expected in stood)
    answers = [g for g in generations if len(g.rounds) >= 2]
    halves = [(g.rounds[: len(g.rounds) // 2], g.rounds[len(g.rounds) // 2 :]) for g in answers]
    first, second = [a for a, _ in halves], [b for _, b in halves]
    over_answer = gain(expected_sums(first), expected_sums(second), 1) if halves else None
    over_context = _over_context(answers, first)
    return Decay(rates, before, over_context, over_answer, tuple(_patterns(rates, before, over_context, over_answer)))


def _patterns(
    rates: Sequence[float], rounds: Sequence[int], over_context: Interval | None, over_answer: Interval | None
) -> Iterator[str]:
    if rates[0] < FIRST_LOW:
        yield f"the first token is accepted in {rates[0]:.0%} of rounds: inputs (features, layers, norms) or weights"
    if len(rates) > 1 and rounds[1] >= MIN_ROUNDS and rates[1] < COLLAPSE * rates[0]:
        yield f"the second token collapses, {rates[0]:.0%} to {rates[1]:.0%}: feedback, rope, or the masks"
    if _falls(over_context):
        yield "acceptance falls with the length of the prompt: rope, or max_position_embeddings"
    if _falls(over_answer):
        yield "acceptance falls over an answer: the draft's cache, or text unlike that of training"


def _falls(difference: Interval | None) -> bool:
    return difference is not None and difference.mean < -MARGIN and difference.below(0)


def _over_context(answers: Sequence[Generation], early: Sequence[Sequence[Round]]) -> Interval | None:
    """Long prompts against short ones: every prompt is in one of the two, and resampled in both alike."""
    if not answers:
        return None
    middle = median(len(g.request.prompt) for g in answers)
    short = [rounds if len(g.request.prompt) <= middle else [] for g, rounds in zip(answers, early, strict=True)]
    long = [rounds if len(g.request.prompt) > middle else [] for g, rounds in zip(answers, early, strict=True)]
    if not any(long):
        return None
    return gain(expected_sums(short), expected_sums(long), 1)
