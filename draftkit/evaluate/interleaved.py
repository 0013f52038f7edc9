"""The same prompts without a draft and with one, by turns, so that what disturbs the machine meets both.

A speed-up is the acceptance length times what a plain step takes over what a round takes. The first varies with the
prompts, the second with the machine only: its spread over blocks of prompts says when it was measured often enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, log, sqrt
from statistics import stdev
from typing import Protocol, TypeVar

from draftkit.results.cell import Interval, PromptRecord
from draftkit.results.statistics import bootstrap_ratio, student

NARROW = 0.05  # how well, as a share of itself, the ratio of the paces is to be known
MOST_BLOCKS = 8


class Paced(Protocol):
    @property
    def pace(self) -> float:
        """Seconds of a round."""


Block = TypeVar("Block")
R = TypeVar("R", bound=Paced)


def block_sizes(prompts: int, concurrency: int) -> list[int]:
    """How many prompts each block has: enough that all sequences run together for most of it."""
    blocks = min(max(prompts // (2 * concurrency), 1), MOST_BLOCKS)
    return [prompts // blocks + (number < prompts % blocks) for number in range(blocks)]


def interleaved(
    blocks: Sequence[Block], plain: Callable[[Block], R], drafting: Callable[[Block], R], repeats: int
) -> tuple[list[list[tuple[R, R]]], float]:
    """Run each block without a draft and with it; and all of them again, `repeats` passes at most, until the ratio of
    the paces is known to `NARROW`.

    Returns the runs of each pass, block by block, and how well the ratio is known: inf of a single pair.
    """
    passes: list[list[tuple[R, R]]] = []
    error = inf
    while len(passes) < repeats and error > NARROW:
        pairs = []
        for number, block in enumerate(blocks):
            if (number + len(passes)) % 2:  # neither is always the one after the other
                drafted = drafting(block)
                pairs.append((plain(block), drafted))
            else:
                pairs.append((plain(block), drafting(block)))
        passes.append(pairs)
        error = pace_error([pair for pairs in passes for pair in pairs])
    return passes, error


def pace_error(pairs: Sequence[tuple[Paced, Paced]]) -> float:
    """Half the 95 % interval of the logarithm of the mean ratio of the paces; inf of a single pair."""
    ratios = [log(plain.pace / drafted.pace) for plain, drafted in pairs if plain.pace > 0 and drafted.pace > 0]
    if len(ratios) < 2:
        return inf
    return student(len(ratios) - 1) * stdev(ratios) / sqrt(len(ratios))


def speedup_interval(speedup: float, prompts: Sequence[PromptRecord], error: float) -> Interval | None:
    """The speed-up with what is not known of it: how it varies over prompts, and `error`, how it does with the machine.

    None where either cannot be told.
    """
    found = bootstrap_ratio(prompts)
    if found is None or found.bounds is None or error == inf:
        return None
    low, high = (log(bound / found.mean) for bound in found.bounds)
    return Interval(
        speedup, speedup * exp(-sqrt(low**2 + error**2)), speedup * exp(sqrt(high**2 + error**2)), found.prompts
    )


def sides(passes: Sequence[Sequence[tuple[R, R]]]) -> tuple[list[list[R]], list[list[R]]]:
    """The runs without a draft, and those with it, of each pass."""
    return [[plain for plain, _ in pairs] for pairs in passes], [[drafted for _, drafted in pairs] for pairs in passes]
