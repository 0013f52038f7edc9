"""How often is the verdict of `draftkit gate` wrong, and how often does it see a loss? Replays of recorded rounds.

`python -m scripts.check.gate [--work DIR] [--times 400] [--prompts 10,20,40,80] [--seeds 6]`

The embedded pair is decoded with several seeds at T = 1, and once at T = 0, into DIR; so are drafts with noise in their
weights. A replay draws prompts from the recorded ones, and for each two of its seeds, one for either side; at T = 0,
where seeds change nothing, the rounds of each prompt are drawn anew, as another machine would have other ones. With
the same draft on both sides, "worse" is a false alarm, here at a tolerance of 0. Losses are planted by dropping
accepted tokens at random ("synthetic"), and by the noised drafts, whose true loss is that over all prompts and seeds.
Printed beside measured: the share of replays that are called worse, and the mean of the power that each prints.
A population that the script makes up, with K = 7 and more spread between prompts, is replayed too.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from draftkit.results.gate import RUNS, Judgement, judgements, power, ratio_of
from draftkit.results.statistics import Sums, mean_length
from scripts.check.intervals import accepted_tokens

Rounds = Sequence[int]  # of a prompt, what each accepted
Draw = Callable[[random.Random], tuple[Rounds, Rounds]]  # the rounds of a prompt, before and after
K, NOISES = 4, (0.2, 0.25, 0.4, 0.6)
TOLERANCE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("gate-replays"))
    parser.add_argument("--times", type=int, default=400)
    parser.add_argument("--prompts", default="10,20,40,80")
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    sizes, times = [int(size) for size in options.prompts.split(",")], options.times
    drawn = recorded(options.work, "zoo:eagle3", 1.0, options.seeds)
    greedy = recorded(options.work, "zoo:eagle3", 0.0, 1)
    populations = {
        "embedded pair, T = 1": of_seeds(drawn, drawn),
        "embedded pair, T = 0": [resampled(seeds[0], 0.0) for seeds in greedy],
        "made up, K = 7": made_up(0.0),
    }
    print(f"\nFalse alarms in {times} replays without a loss, at a tolerance of 0; 20 are 5 % of 400.\n")
    _table("replayed", sizes)
    for name, population in populations.items():
        _row(name, [str(sum(_is_worse(one) for one in replays(population, n, times, 0.0))) for n in sizes])
    nights = [f"{at_least_one(populations['embedded pair, T = 1'], n, times // 4):.0%}" for n in sizes]
    _row(f"one or more in {RUNS} runs against one reference", nights)
    print(f"\nLosses called worse at a tolerance of {TOLERANCE:.0%}: measured / printed.\n")
    _table("planted", sizes)
    for loss in (0.02, 0.05, 0.1):
        for name, lossy in {
            "synthetic, T = 1": [resampled_seed(seeds, _dropped(drawn, loss)) for seeds in drawn],
            "synthetic, T = 0": [resampled(seeds[0], _dropped(greedy, loss)) for seeds in greedy],
            "made up, K = 7": made_up(loss),
        }.items():
            _row(f"{loss:.0%}, {name}", [_beside(lossy, n, times, loss) for n in sizes])
    for noise in NOISES:
        worse = recorded(options.work, noised(options.work, noise), 1.0, options.seeds)
        loss = 1 - mean_length(_all_sums(worse)) / mean_length(_all_sums(drawn))
        _row(
            f"{loss:.1%}, draft with noise {noise:g}", [_beside(of_seeds(drawn, worse), n, times, loss) for n in sizes]
        )


def _table(first: str, sizes: Sequence[int]) -> None:
    _row(first, [f"{size} prompts" for size in sizes])
    print(f"|---|{'---|' * len(sizes)}")


def _row(name: str, values: Sequence[str]) -> None:
    print(f"| {name} | {' | '.join(values)} |", flush=True)


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


def at_least_one(population: Sequence[Draw], prompts: int, times: int) -> float:
    """In how many series of nightly runs of an unchanged draft against one reference, at a tolerance of 2 %, at least
    one is called worse. Prompts are the same every night, and so is the reference."""
    generator = random.Random(prompts)
    failed = 0
    for _ in range(times):
        asked = generator.choices(population, k=prompts)
        before, _ = _pair(generator, asked)
        nights = (_pair(generator, asked)[1] for _ in range(RUNS))
        failed += any(_is_worse(judgements([ratio_of(one, before)], [prompts], TOLERANCE)[0]) for one in nights)
    return failed / times


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
    mean = mean_length(_all_sums(recorded_rounds))
    return loss * mean / (mean - 1)


def _all_sums(recorded_rounds: Sequence[Sequence[Rounds]]) -> Sums:
    return [(sum(rounds), len(rounds)) for seeds in recorded_rounds for rounds in seeds]


def of_seeds(before: Sequence[Sequence[Rounds]], after: Sequence[Sequence[Rounds]]) -> list[Draw]:
    """The prompts, each with one seed before and another after."""

    def prompt(one: Sequence[Rounds], other: Sequence[Rounds]) -> Draw:
        def draw(generator: random.Random) -> tuple[Rounds, Rounds]:
            first, second = generator.sample(range(len(one)), 2)
            return one[first], other[second]

        return draw

    return [prompt(one, other) for one, other in zip(before, after, strict=True)]


def resampled_seed(seeds: Sequence[Rounds], dropped: float) -> Draw:
    """The same with a loss."""
    (pair,) = of_seeds([seeds], [seeds])

    def draw(generator: random.Random) -> tuple[Rounds, Rounds]:
        before, after = pair(generator)
        return before, thinned(generator, after, dropped)

    return draw


def resampled(rounds: Rounds, dropped: float) -> Draw:
    """A prompt whose rounds are drawn anew on either side, with a loss after."""

    def draw(generator: random.Random) -> tuple[Rounds, Rounds]:
        before, after = (generator.choices(rounds, k=len(rounds)) for _ in range(2))
        return before, thinned(generator, after, dropped)

    return draw


def recorded(work: Path, draft: str, temperature: float, seeds: int) -> list[list[Rounds]]:
    """For each of the 80 embedded prompts, what its rounds accepted with each seed. What is in `work` is kept."""
    file = work / f"{draft.rpartition(':')[2].rpartition('/')[2]}-{temperature:g}-{seeds}.json"
    if not file.exists():
        runs = [_decoded(draft, temperature, 1000 * seed, work / "rounds.jsonl") for seed in range(seeds)]
        file.write_text(json.dumps([[run[prompt] for run in runs] for prompt in runs[0]]))
    found: list[list[Rounds]] = json.loads(file.read_text())
    return found


def _decoded(draft: str, temperature: float, seed: int, file: Path) -> dict[str, list[int]]:
    import draftkit

    settings = draftkit.Settings(
        num_speculative_tokens=K, max_new_tokens=64, concurrency=40, repeats=0,
        sampling=draftkit.SamplingParameters(temperature=temperature, seed=seed),
    )  # fmt: skip
    file.unlink(missing_ok=True)
    draftkit.evaluate_draft("zoo:target", [draft], settings, records=file)
    found: dict[str, list[int]] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["request"], []).append(record["accepted"])
    return found


def noised(work: Path, noise: float) -> str:
    """A folder of the embedded draft with normal noise in each matrix, in shares of its own deviation."""
    import torch
    from safetensors.torch import load_file, save_file

    import draftkit

    out = work / f"noise-{noise:g}"
    if not out.exists():
        draftkit.convert_checkpoint("zoo:eagle3", out, target="zoo:target")
        generator = torch.Generator().manual_seed(0)
        tensors = load_file(out / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() == 2:
                drawn = torch.randn(tensor.shape, generator=generator) * noise * tensor.float().std()
                tensors[name] = (tensor.float() + drawn).to(tensor.dtype)
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return str(out)


if __name__ == "__main__":
    main()
