"""How often is the verdict of `draftkit gate` wrong, and how often does it see a loss? Replays of recorded rounds.

`python -m scripts.check.gate [--work DIR] [--times 400] [--prompts 10,20,40,80] [--seeds 6]`

The embedded pair is decoded with several seeds at T = 1, and once at T = 0, into DIR. A replay draws prompts from the
recorded ones, and two seeds of each, one for either side. At T = 0 the rounds of each prompt are drawn anew, as if from
another machine. With the same draft on both sides, "worse" is a false alarm. Losses are planted by dropping accepted
tokens at random. Printed are the share of replays that are called worse, and the mean of the power that each prints. A
made-up population with K = 7 and more spread between prompts is replayed too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from draftkit.results.gate import Judgement, judgements, power, ratio_of
from draftkit.results.statistics import Sums, mean_length
from scripts._bench import arguments, kept, show
from scripts.check.intervals import accepted_tokens

Rounds = Sequence[int]  # of a prompt, what each accepted
Draw = Callable[[random.Random], tuple[Rounds, Rounds]]  # the rounds of a prompt, before and after
K = 4
TOLERANCE = 0.02


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=Path("gate-replays"))
    parser.add_argument("--times", type=int, default=400)
    parser.add_argument("--prompts", default="10,20,40,80")
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    sizes, times = [int(size) for size in options.prompts.split(",")], options.times
    drawn, greedy = (recorded(options.work, *asked) for asked in ((1.0, options.seeds), (0.0, 1)))

    def populations(loss: float) -> dict[str, list[Draw]]:
        return {
            "embedded pair, T = 1": [of_seeds(seeds, _dropped(drawn, loss)) for seeds in drawn],
            "embedded pair, T = 0": [resampled(seeds[0], _dropped(greedy, loss)) for seeds in greedy],
            "made up, K = 7": made_up(loss),
        }

    columns = ("population", *(f"{size} prompts" for size in sizes))
    alarms = [
        [name, *(sum(_is_worse(one) for one in replays(population, size, times, 0.0)) for size in sizes)]
        for name, population in populations(0.0).items()
    ]
    show(f"False alarms in {times} replays without a loss, at a tolerance of 0; 20 are 5 % of 400.", columns, alarms)
    losses = [
        [f"{loss:.0%}, {name}", *(_beside(population, size, times, loss) for size in sizes)]
        for loss in (0.02, 0.05, 0.1)
        for name, population in populations(loss).items()
    ]
    show(f"Losses called worse at a tolerance of {TOLERANCE:.0%}: measured / printed.", columns, losses)


def _beside(population: Sequence[Draw], prompts: int, times: int, loss: float) -> str:
    found = replays(population, prompts, times, TOLERANCE)
    return f"{fmean(map(_is_worse, found)):.0%} / {_printed(population, prompts, times, loss):.0%}"


def replays(population: Sequence[Draw], prompts: int, times: int, tolerance: float) -> list[Judgement]:
    """The verdicts on so many pairs of runs, each of prompts of its own."""
    generator = random.Random(prompts)
    return [
        judgements([ratio_of(after, before)], [prompts], tolerance)[0]
        for before, after in (_pair(generator, generator.choices(population, k=prompts)) for _ in range(times))
    ]


def _printed(population: Sequence[Draw], prompts: int, times: int, loss: float) -> float:
    """The mean power against a loss that the same replays print."""
    generator = random.Random(prompts)
    pairs = (_pair(generator, generator.choices(population, k=prompts)) for _ in range(times))
    return fmean(power(ratio_of(after, before), loss, TOLERANCE) for before, after in pairs)


def _pair(generator: random.Random, drawn: Sequence[Draw]) -> tuple[Sums, Sums]:
    both = [one(generator) for one in drawn]
    before, after = ([(sum(pair[side]), len(pair[side])) for pair in both] for side in (0, 1))
    return before, after


def _is_worse(one: Judgement) -> bool:
    return one.verdict == "worse"


def false_alarms(prompts: int, times: int) -> float:
    """The share of replays of the population that is made up in which an unchanged draft is called worse, at a
    tolerance of 0."""
    return fmean(map(_is_worse, replays(made_up(0.0), prompts, times, 0.0)))


def seen_losses(prompts: int, loss: float, times: int) -> tuple[float, float]:
    """The share of replays in which a planted loss is called worse, and the power that they print."""
    population = made_up(loss)
    seen = fmean(map(_is_worse, replays(population, prompts, times, TOLERANCE)))
    return seen, _printed(population, prompts, times, loss)


def made_up(loss: float) -> list[Draw]:
    """Prompts of 15 to 59 rounds, each with an acceptance of its own, Beta(9, 4), which has run K = 7 twice."""
    generator = random.Random(0)
    rates = [(generator.betavariate(9, 4), generator.randrange(15, 60)) for _ in range(1000)]
    mean = fmean(sum(rate**i for i in range(1, 8)) for rate, _ in rates)
    dropped = loss * (1 + mean) / mean

    def prompt(rate: float, rounds: int) -> Draw:
        def draw(generator: random.Random) -> tuple[Rounds, Rounds]:
            before, after = ([accepted_tokens(generator, rate, 7) for _ in range(rounds)] for _ in range(2))
            return before, thinned(generator, after, dropped)

        return draw

    return [prompt(*one) for one in rates]


def thinned(generator: random.Random, rounds: Rounds, share: float) -> Rounds:
    """The rounds without a share of what they accepted, dropped at random."""
    if not share:
        return rounds
    return [sum(generator.random() >= share for _ in range(accepted)) for accepted in rounds]


def _dropped(recorded_rounds: Sequence[Sequence[Rounds]], loss: float) -> float:
    """The share of accepted tokens that makes for a loss of acceptance length."""
    mean = mean_length([(sum(rounds), len(rounds)) for seeds in recorded_rounds for rounds in seeds])
    return loss * mean / (mean - 1)


def of_seeds(seeds: Sequence[Rounds], dropped: float) -> Draw:
    """A prompt, with one seed before and another after, with a loss after."""

    def draw(generator: random.Random) -> tuple[Rounds, Rounds]:
        before, after = generator.sample(seeds, 2)
        return before, thinned(generator, after, dropped)

    return draw


def resampled(rounds: Rounds, dropped: float) -> Draw:
    """A prompt whose rounds are drawn anew on either side, with a loss after."""

    def draw(generator: random.Random) -> tuple[Rounds, Rounds]:
        before, after = (generator.choices(rounds, k=len(rounds)) for _ in range(2))
        return before, thinned(generator, after, dropped)

    return draw


def recorded(work: Path, temperature: float, seeds: int) -> list[list[Rounds]]:
    """For each of the 80 embedded prompts, what its rounds accepted with each seed. What is in `work` is kept."""

    def decoded() -> list[list[Rounds]]:
        runs = [_decoded(temperature, 1000 * seed, work / "rounds.jsonl") for seed in range(seeds)]
        return [[run[prompt] for run in runs] for prompt in runs[0]]

    return kept(work / f"eagle3-{temperature:g}-{seeds}.json", decoded)


def _decoded(temperature: float, seed: int, file: Path) -> dict[str, list[int]]:
    import draftkit

    settings = draftkit.Settings(
        num_speculative_tokens=K, max_new_tokens=64, concurrency=40, repeats=0,
        sampling=draftkit.SamplingParameters(temperature=temperature, seed=seed),
    )  # fmt: skip
    file.unlink(missing_ok=True)
    draftkit.evaluate_draft("zoo:target", ["zoo:eagle3"], settings, records=file)
    found: dict[str, list[int]] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["request"], []).append(record["accepted"])
    return found


if __name__ == "__main__":
    main()
