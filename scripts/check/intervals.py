"""How often does a printed interval hold the true value? Prompts drawn from recorded ones, whose figures are the truth.

`python -m scripts.check.intervals [RESULT.json …] [--times 4000] [--prompts 10,20,40,80]`

Files are what `draftkit eval --out` wrote; without any, the embedded pair is measured at T = 0 and 1. Each cell with
counts by prompt is a population, and so is a made-up one whose prompts differ as much as real ones (acceptance of each
token Beta(9, 4) by prompt, K = 7). Differences are those of a change that loses a part of what was accepted. Slices are
of other prompts. Speed-ups are of runs that take turns in blocks, as in `eval`; a round takes 1.3 plain steps, and the
machine makes each run of a block some per cent slower or faster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

from draftkit.evaluate.measure import block_sizes, interleaved, speedup_interval
from draftkit.results.cell import Interval, PromptRecord
from draftkit.results.record import Result, read_result
from draftkit.results.statistics import Sums, contrast, gain, length_over_prompts, mean_length, ratio_over_prompts
from scripts._bench import arguments, show

ROUND = 1.3  # what a round takes, in plain steps
NOISES = (0.0, 0.02, 0.1)  # of the machine, as a share
PASSES = 3


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--times", type=int, default=4000)
    parser.add_argument("--prompts", default="10,20,40,80")
    options = parser.parse_args()
    results = [read_result(path) for path in options.results] or [embedded()]
    sizes = [int(size) for size in options.prompts.split(",")]
    rows = [
        [name, what, *(f"{coverage(population, what, size, options.times):.1%}" for size in sizes)]
        for name, population in populations(results).items()
        for what in INTERVALS
    ]
    show("", ("population", "interval of", *(f"{size} prompts" for size in sizes)), rows)


def embedded() -> Result:
    import draftkit
    from draftkit.results.settings import Settings

    settings = Settings(max_new_tokens=64, concurrency=16, repeats=0).sweep(temperature=(0.0, 1.0))
    return draftkit.evaluate_draft("zoo:target", ["zoo:eagle3"], settings)


def populations(results: Sequence[Result]) -> dict[str, Sums]:
    found: dict[str, Sums] = {
        f"{cell.draft}, T = {cell.temperature:g}": [(one.accepted, one.rounds) for one in cell.by_prompt if one.rounds]
        for result in results
        for cell in result.cells
        if cell.by_prompt
    }
    return found | {"Beta(9, 4), K = 7": made_up(2000)}


def made_up(prompts: int) -> Sums:
    """Prompts of 15 to 59 rounds, each with an acceptance of its own."""
    generator = random.Random(0)

    def prompt() -> tuple[float, int]:
        rate, rounds = generator.betavariate(9, 4), generator.randrange(15, 60)
        return sum(accepted_tokens(generator, rate, 7) for _ in range(rounds)), rounds

    return [prompt() for _ in range(prompts)]


def accepted_tokens(generator: random.Random, rate: float, k: int) -> int:
    return next((position for position in range(k) if generator.random() >= rate), k)


def coverage(population: Sums, what: str, size: int, times: int) -> float:
    """The share of samples of so many prompts whose interval holds what is true of the whole population."""
    generator = random.Random(size)
    worse = [(accepted * generator.uniform(0.8, 1.1), rounds) for accepted, rounds in population]
    pairs = list(zip(population, worse, strict=True))
    interval, truth = INTERVALS[what]
    true = truth(population, worse)
    held = 0
    for _ in range(times):
        found = interval(generator, generator.choices(pairs, k=size), pairs)
        held += found is not None and found.bounds is not None and found.bounds[0] <= true <= found.bounds[1]
    return held / times


Pair = tuple[tuple[float, int], tuple[float, int]]
Measured = Callable[[random.Random, Sequence[Pair], Sequence[Pair]], Interval | None]


def _length(generator: random.Random, drawn: Sequence[Pair], all_pairs: Sequence[Pair]) -> Interval:
    return length_over_prompts([one for one, _ in drawn])


def _difference(generator: random.Random, drawn: Sequence[Pair], all_pairs: Sequence[Pair]) -> Interval:
    return gain([one for one, _ in drawn], [other for _, other in drawn])


def _slice(generator: random.Random, drawn: Sequence[Pair], all_pairs: Sequence[Pair]) -> Interval:
    others = generator.choices(all_pairs, k=2 * len(drawn))
    return contrast([one for one, _ in drawn], [one for one, _ in others])


def _faster(generator: random.Random, drawn: Sequence[Pair], all_pairs: Sequence[Pair]) -> Interval:
    """Output speed after a change against before, as `report` compares two files."""
    return ratio_over_prompts([(b[1], sum(b), a[1], sum(a)) for a, b in drawn])


@dataclass(frozen=True)
class TimedBlock:
    """The seconds of each prompt of a block, and of all its rounds."""

    seconds: tuple[float, ...]
    rounds: float

    @property
    def pace(self) -> float:
        return sum(self.seconds) / self.rounds


def _speedup(noise: float) -> Measured:
    def measured(generator: random.Random, drawn: Sequence[Pair], all_pairs: Sequence[Pair]) -> Interval | None:
        sums = [one for one, _ in drawn]
        sizes = block_sizes(len(sums), 1)
        blocks = [sums[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]

        def run(block: Sums, work: Callable[[tuple[float, int]], float], rounds: float) -> TimedBlock:
            slower = exp(generator.gauss(0, noise))
            return TimedBlock(tuple(work(one) * slower for one in block), rounds)

        passes, error = interleaved(
            blocks,
            lambda block: run(block, sum, sum(map(sum, block))),
            lambda block: run(block, lambda one: ROUND * one[1], sum(rounds for _, rounds in block)),
            PASSES,
        )
        plain, drafted = ([_means([pair[side] for pair in turn] for turn in passes)] for side in (0, 1))
        prompts = [
            PromptRecord("", 0, 0, int(sum(one)), seconds, int(sum(one)), before)
            for one, before, seconds in zip(sums, *plain, *drafted, strict=True)
        ]
        return speedup_interval(sum(*plain) / sum(*drafted), prompts, error, len(blocks))

    return measured


def _means(passes: object) -> list[float]:
    rows = [[seconds for block in turn for seconds in block.seconds] for turn in passes]  # type: ignore[attr-defined]
    return [sum(times) / len(times) for times in zip(*rows, strict=True)]


def _true_speedup(population: Sums, worse: Sums) -> float:
    return mean_length(population) / ROUND


INTERVALS: dict[str, tuple[Measured, Callable[[Sums, Sums], float]]] = {
    "acceptance length": (_length, lambda population, worse: mean_length(population)),
    "difference of a change": (_difference, lambda population, worse: mean_length(worse) - mean_length(population)),
    "slice against the others": (_slice, lambda population, worse: 0.0),
    "speed after / before": (_faster, lambda population, worse: exp(_log(worse) - _log(population))),
    **{f"speed-up, machine ±{noise:.0%}": (_speedup(noise), _true_speedup) for noise in NOISES},
}


def _log(sums: Sums) -> float:
    return log(mean_length(sums))


if __name__ == "__main__":
    main()
