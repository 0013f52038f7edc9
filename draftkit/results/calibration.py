"""Whether the chances of acceptance that a draft says are those with which its tokens stand.

N rounds of P prompts, K draft tokens each. A draft says, of each of its tokens, the chance that it stands given that
those before it do; the product of the first k is the chance that k stand. *Conditional* figures at position k are of
the rounds in which the k − 1 before it stood, and show where a draft is wrong; *cumulative* ones are of all rounds, and
are what schedulers use.

What stood is not counted as a coin where both models' probabilities are known: a round whose first k − 1 drafts stood
counts at k with the chance that the k-th does, Σ_v min(p_v, q_v), which has the same mean and less noise. Rounds of one
prompt resemble each other, so that intervals are over prompts.

Expected calibration error: bins of equal width of what was said, in which the mean said is held against the share that
stood, weighted by size. It is never 0 of finitely many rounds: beside it stands what a draft would show on as many
rounds whose word is exactly true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftkit.results.cell import Interval
from draftkit.results.statistics import jackknife

BINS = 15  # of the calibration error, as DeepSpec and SGLang have them
REDRAWN = 200  # times that labels are drawn from what was said
# Of sequential temperature scaling, as SGLang's `dspark_sts_fit` has them.
GRID = np.logspace(-1, 1, 41)
CLIP = 1e-8
MOST_CERTAIN = 1e-7  # how near to 0 or 1 a chance in float32 can be told from it
ENOUGH = 1000  # rounds from which a temperature is written down

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SaidRounds:
    """`said` float64 [N, K]: the conditional chances. `accepted` int64 [N]; `expected` float64 [N, K]: the chance, from
    both models' probabilities, that a draft stands given those before it do; None where it is not known. `prompt` int64
    [N]: of which prompt, 0 … P − 1."""

    said: Floats
    accepted: NDArray[np.int64]
    expected: Floats | None
    prompt: NDArray[np.int64]

    @property
    def reached(self) -> NDArray[np.bool_]:
        """bool [N, K]: whether the drafts before stood."""
        return self.accepted[:, None] >= np.arange(self.said.shape[1])

    @property
    def stood(self) -> NDArray[np.bool_]:
        """bool [N, K]: whether a draft and those before it stood."""
        return self.accepted[:, None] > np.arange(self.said.shape[1])

    @property
    def stands(self) -> Floats:
        """float64 [N, K]: the chance of it, as well as it is known."""
        return np.where(self.reached, self.expected, 0.0) if self.expected is not None else self.stood.astype(float)

    @property
    def survival(self) -> Floats:
        """float64 [N, K]: the chance that was said of a draft and all before it."""
        return self.said.cumprod(axis=1)

    def of(self, chosen: NDArray[np.bool_]) -> SaidRounds:
        """The rounds `chosen` bool [N]."""
        expected = None if self.expected is None else self.expected[chosen]
        return SaidRounds(self.said[chosen], self.accepted[chosen], expected, self.prompt[chosen])


@dataclass(frozen=True)
class SaidAndSurvived:
    """At one position of `rounds`: the means, their `gap`, said − survived, and the calibration error, with that of a
    draft whose word is true on as many rounds (`error_if_true`), and how often such a draft would show as much."""

    rounds: int
    said: float
    survived: float
    gap: Interval
    error: float
    error_if_true: float
    chance: float


@dataclass(frozen=True)
class SaidAgainstStood:
    """What was said against what survived, of all rounds or of those of a slice."""

    prompts: int
    rounds: int
    said_length: float
    length: float
    gap: Interval  # of the lengths, said − measured
    cumulative: tuple[SaidAndSurvived, ...]
    conditional: tuple[SaidAndSurvived, ...]


def judge(rounds: SaidRounds, seed: int = 0) -> SaidAgainstStood:
    """The figures of at least one round."""
    generator = np.random.default_rng(seed)
    survival, stands = rounds.survival, rounds.stands
    everywhere = np.ones(len(survival), dtype=bool)
    said_length = 1 + survival.sum(1)
    return SaidAgainstStood(
        len(np.unique(rounds.prompt)),
        len(rounds.accepted),
        float(said_length.mean()),
        float(1 + stands.sum(1).mean()),
        mean_over_prompts(said_length - 1 - stands.sum(1), rounds.prompt),
        tuple(
            _beside(survival[:, k], stands[:, k], rounds.stood[:, k], everywhere, rounds.prompt, generator)
            for k in range(survival.shape[1])
        ),
        tuple(
            _beside(rounds.said[:, k], stands[:, k], rounds.stood[:, k], rounds.reached[:, k], rounds.prompt, generator)
            for k in range(survival.shape[1])
        ),
    )


def _beside(
    said: Floats,
    stands: Floats,
    stood: NDArray[np.bool_],
    counted: NDArray[np.bool_],
    prompt: NDArray[np.int64],
    generator: np.random.Generator,
) -> SaidAndSurvived:
    """One position, of the rounds `counted`; all [N]."""
    said, stands, stood, prompt = said[counted], stands[counted], stood[counted], prompt[counted]
    if not len(said):
        return SaidAndSurvived(0, np.nan, np.nan, Interval(np.nan, None, None, 0), np.nan, np.nan, np.nan)
    error = calibration_error(said, stood.astype(float))
    drawn = [calibration_error(said, (generator.random(len(said)) < said).astype(float)) for _ in range(REDRAWN)]
    return SaidAndSurvived(
        len(said),
        float(said.mean()),
        float(stands.mean()),
        mean_over_prompts(said - stands, prompt),
        error,
        float(np.mean(drawn)),
        float(np.mean(np.array(drawn) >= error)),
    )


def mean_over_prompts(values: Floats, prompt: NDArray[np.int64]) -> Interval:
    """The mean of `values` [N], each of a round of `prompt` [N], with its interval over prompts."""
    _, index = np.unique(prompt, return_inverse=True)
    sums, counts = np.bincount(index, values), np.bincount(index)
    mean, prompts = float(values.mean()), len(sums)
    if prompts < 2:
        return Interval(mean, None, None, prompts)
    half = jackknife(list(zip(sums.tolist(), counts.tolist(), strict=True)), lambda sums: sums[0] / sums[1]).half()
    return Interval(mean, mean - half, mean + half, prompts)


def calibration_error(said: Floats, stood: Floats) -> float:
    """The expected calibration error of chances [N] and labels [N]."""
    bins = np.minimum((np.clip(said, CLIP, 1 - CLIP) * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, said - stood, BINS)).sum() / len(said))


@dataclass(frozen=True)
class Scaling:
    """Sequential temperature scaling: `temperatures`, one a position, by which the logit of what is said is divided.

    Fitted on all rounds. Whether it `helps` is judged on what it was not fitted on: each half of the prompts with the
    temperatures of the other. `gain`: by how many nats the loss of a round falls there (the cross-entropy of surviving
    at each position). `error` and `scaled_error`: the calibration error of survival at each position, on the same
    halves. `missing`: rounds that are missing before temperatures are worth writing down.
    """

    temperatures: tuple[float, ...]
    gain: Interval
    error: tuple[float, ...]
    scaled_error: tuple[float, ...]
    rounds: int

    @property
    def missing(self) -> int:
        return max(ENOUGH - self.rounds, 0)

    @property
    def helps(self) -> bool:
        """Whether the loss falls beyond chance."""
        return self.gain.above(0)

    @property
    def written(self) -> bool:
        """Whether there is a file of it."""
        return self.helps and not self.missing


def scale(rounds: SaidRounds) -> Scaling:
    """The temperatures of at least one round, and whether they help."""
    first = np.isin(rounds.prompt, np.unique(rounds.prompt)[::2])
    scaled = rounds.survival
    for half in (first, ~first):
        if half.any() and not half.all():
            scaled[half] = scaled_survival(rounds.said[half], fit_temperatures(rounds.of(~half)))
    labels, stands = rounds.stood.astype(float), rounds.stands
    fallen = (_loss(rounds.survival, stands) - _loss(scaled, stands)).sum(1)
    positions = range(rounds.said.shape[1])
    return Scaling(
        fit_temperatures(rounds),
        mean_over_prompts(fallen, rounds.prompt),
        tuple(calibration_error(rounds.survival[:, k], labels[:, k]) for k in positions),
        tuple(calibration_error(scaled[:, k], labels[:, k]) for k in positions),
        len(labels),
    )


def fit_temperatures(rounds: SaidRounds) -> tuple[float, ...]:
    """From left to right, with those before as they were found, the temperature of the grid with which survival has the
    least calibration error; the first of several (DeepSpec's method, with SGLang's grid)."""
    labels, logits = rounds.stood.astype(float), _logits(rounds.said)
    survival = np.ones(len(labels))
    found = []
    for k in range(logits.shape[1]):
        tried = [survival * _sigmoid(logits[:, k] / temperature) for temperature in GRID]
        best = int(np.argmin([calibration_error(one, labels[:, k]) for one in tried]))
        survival = tried[best]
        found.append(float(GRID[best]))
    return tuple(found)


def scaled_survival(said: Floats, temperatures: Sequence[float]) -> Floats:
    """float64 [N, K]: what is said of surviving, with the temperatures."""
    return _sigmoid(_logits(said) / np.array(temperatures)).cumprod(axis=1)


def sglang_calibration(scaling: Scaling, dataset: str) -> Mapping[str, object]:
    """What SGLang reads from `--speculative-dspark-confidence-sts-path`."""
    return {
        "temperatures": list(scaling.temperatures),
        "dataset": dataset,
        "num_samples": scaling.rounds,
        "ece_before": list(scaling.error),
        "ece_after": list(scaling.scaled_error),
    }


def _logits(said: Floats) -> Floats:
    inside = np.clip(said, MOST_CERTAIN, 1 - MOST_CERTAIN)
    return np.log(inside) - np.log1p(-inside)


def _sigmoid(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-logits))


def _loss(survival: Floats, stands: Floats) -> Floats:
    """float64 [N, K]: the cross-entropy of surviving, in nats."""
    inside = np.clip(survival, CLIP, 1 - CLIP)
    return -stands * np.log(inside) - (1 - stands) * np.log1p(-inside)
