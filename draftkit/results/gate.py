"""Whether a draft accepts less than it did: the verdict on two results of the same prompts, paired by prompt.

r is the acceptance length after / before, each over the rounds that had a draft; its logarithm has the standard error
that leaving out each prompt in turn tells, and Student's t. α is 5 %, one-sided:

- worse: all of r's interval is below 1, and r below 1 − tolerance;
- not worse: all of r's interval is above 1 − tolerance;
- cannot tell: neither, or fewer than 10 prompts.

Of several settings, those that are worse are told apart from chance together (Holm 1979). That no setting is worse
needs no such care: it is claimed only where each by itself is not (an intersection of tests, Berger 1982).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, isinf, log, log1p, sqrt
from statistics import NormalDist
from typing import Any, Literal

from draftkit.results.cell import Cell, Interval, PromptRecord, fields_of
from draftkit.results.statistics import Estimate, Sums, holm, jackknife, mean_length, student, student_below

TOLERANCE = 0.02  # the loss that nobody minds, as a share
ALPHA = 0.05
FEWEST = 10  # prompts of which a verdict is given
LOSSES = (0.02, 0.05, 0.10)  # of which it is said how surely they would have been seen
SURELY = 0.95
RUNS = 30  # of which it is said how many an unchanged draft would fail by chance
MOST_PROMPTS = 10_000  # more are not worth the answer
DEAD = 1.05  # the acceptance length below which a draft does nothing, whatever its interval

GateOutcome = Literal["worse", "not worse", "cannot tell"]
Undecided = Literal["report", "pass", "fail"]


@dataclass(frozen=True)
class Judgement:
    """What an estimate of log r says. `ratio`: r with its one-sided bounds, each of which is passed in 5 % of cases.

    `p_worse`: the chance of so low an r without any loss, adjusted for all settings. `power`: loss → the chance that it
    would have been seen. `seen`: the smallest loss that would have been with 95 %. `false_alarm`: the chance that an
    unchanged draft is called worse. `more_prompts`: how many, beside those measured, would decide; None where it is
    decided, or no number that is worth it would.
    """

    verdict: GateOutcome
    ratio: Interval
    p_worse: float
    power: dict[str, float]
    seen: float
    false_alarm: float
    more_prompts: int | None = None


@dataclass(frozen=True)
class GatedCell:
    """The verdict on one setting. `old` and `new`: acceptance lengths over the compared prompts, whose number is
    `prompts`; `left_out`: those in which nothing was drafted on one side. `repeats`: whether the same draft would give
    the same again, token for token, so that it cannot fail by chance: T = 0 on one machine and engine."""

    draft: str
    num_speculative_tokens: int
    temperature: float
    draft_sampling: str | None
    context: int | None
    tree: str | None
    draft_confidence: float | None
    concurrency: int
    old: float
    new: float
    prompts: int
    left_out: int
    repeats: bool
    judgement: Judgement

    @property
    def name(self) -> str:
        context = "" if self.context is None else f", context {self.context}"
        drafted = f"K = {self.num_speculative_tokens}" if self.tree is None else self.tree
        drafted += "" if self.draft_confidence is None else f", draft_confidence {self.draft_confidence:g}"
        return f"{self.draft} at {drafted}, T = {self.temperature:g}{context}"

    @property
    def sentence(self) -> str:
        """All of it in one sentence."""
        said, ratio = self.judgement, self.judgement.ratio
        bounds = "" if ratio.bounds is None else f" [{ratio.bounds[0]:.3f}, {ratio.bounds[1]:.3f}]"
        prompts = f"{self.prompts} {'prompt' if self.prompts == 1 else 'prompts'}"
        text = f"{said.verdict}: {self.name}: acceptance length {self.new:.2f} against {self.old:.2f}, "
        text += f"{ratio.mean:.3f} ×{bounds} on {prompts}"
        if self.left_out:
            text += f" ({self.left_out} left out, in which nothing was drafted)"
        return f"{text}; {self.outlook}"

    @property
    def outlook(self) -> str:
        """What would have been seen, and what would decide."""
        said = self.judgement
        seen = f"a loss of {ceil(said.seen * 1000 - 1e-6) / 10:g} % would have been seen with {100 * SURELY:g} %"
        if said.verdict != "cannot tell":
            return seen
        if said.more_prompts is None:
            return f"{seen}; no number of prompts up to {MOST_PROMPTS:,} would decide: it lies at the tolerance"
        return f"{seen}; about {said.more_prompts:,} more prompts would decide"


@dataclass(frozen=True)
class Gate:
    """The verdict on a new result: that of its worst setting. `against`: what it was held against, by name; `notes`:
    what is to be known of the comparison."""

    verdict: GateOutcome
    tolerance: float
    against: str
    cells: tuple[GatedCell, ...]
    notes: tuple[str, ...] = field(default=())

    def exit_code(self, undecided: Undecided = "report") -> int:
        """0 for not worse, 3 for worse, 4 where it cannot be told, unless that is to pass or to fail."""
        codes = {"not worse": 0, "worse": 3, "cannot tell": {"report": 4, "pass": 0, "fail": 3}[undecided]}
        return codes[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "alpha": ALPHA, **fields_of(self), "nightly": self.nightly}

    @property
    def nightly(self) -> str:
        """What holds over many such runs."""
        if all(cell.repeats for cell in self.cells):
            return "run again, an unchanged draft gives the same: at T = 0 on one machine it cannot fail by chance"
        expected = RUNS * min(sum(cell.judgement.false_alarm for cell in self.cells), ALPHA)
        together = "those against one reference come together, as they share its error"
        return f"of {RUNS} runs of an unchanged draft, {expected:.1f} would be called worse by chance; {together}"


def gated(
    cells: Sequence[tuple[Cell, Cell]], tolerance: float, against: str, notes: Sequence[str], repeats: Sequence[bool]
) -> Gate:
    """The verdict on settings of which there are a new and an old cell, with counts by prompt."""
    paired = [paired_sums(new, old) for new, old in cells]
    judged = judgements([ratio_of(new, old) for new, old in paired], [len(new) for new, _ in paired], tolerance)
    found = [
        _gated_cell(new, (mean_length(sums[1]), mean_length(sums[0])), len(sums[0]), _left_out(new, sums[0]), same, one)
        for (new, _), sums, same, one in zip(cells, paired, repeats, judged, strict=True)
    ]
    return Gate(_worst(found), tolerance, against, tuple(found), tuple(notes))


def sums_of(cell: Cell) -> Sums:
    """Of each prompt what was accepted, and the rounds that had a draft; prompts without any are left out. The turns of
    one conversation are one prompt."""
    return list(_by_conversation(cell).values())


def paired_sums(new: Cell, old: Cell) -> tuple[Sums, Sums]:
    """The same of both cells, for the prompts that both drafted for."""
    one, other = _by_conversation(new), _by_conversation(old)
    both = [id for id in one if id in other]
    return [one[id] for id in both], [other[id] for id in both]


def _by_conversation(cell: Cell) -> dict[str, tuple[float, int]]:
    records = cell.by_prompt or ()
    ids = {record.id for record in records}
    found: dict[str, tuple[float, int]] = {}
    for record in records:
        root = record.id.rpartition("/")[0]
        id = root if root in ids else record.id
        accepted, rounds = found.get(id, (0, 0))
        found[id] = (accepted + record.accepted, rounds + drafted_rounds_of(record))
    return {id: sums for id, sums in found.items() if sums[1]}


def drafted_rounds_of(record: PromptRecord) -> int:
    return record.rounds if record.drafts is None else record.drafts


def _left_out(cell: Cell, sums: Sums) -> int:
    records = cell.by_prompt or ()
    ids = {record.id for record in records}
    return sum(record.id.rpartition("/")[0] not in ids for record in records) - len(sums)


def ratio_of(new: Sums, old: Sums) -> Estimate:
    """log r of the same prompts; of fewer than two with an infinite error."""

    def log_ratio(totals: Sequence[float]) -> float:
        accepted, rounds, accepted_before, rounds_before = totals
        return log1p(accepted / rounds) - log1p(accepted_before / rounds_before)

    rows = [(*after, *before) for after, before in zip(new, old, strict=True)]
    if len(rows) < 2:
        return Estimate(log(mean_length(new) / mean_length(old)) if rows else 0.0, inf, 1)
    return jackknife(rows, log_ratio)


def judgements(estimates: Sequence[Estimate], prompts: Sequence[int], tolerance: float) -> list[Judgement]:
    """The verdict on each of several settings that are looked at together."""
    adjusted = holm([_chance_of(one) for one in estimates])
    return [
        _judgement(one, count, p, tolerance, len(estimates))
        for one, count, p in zip(estimates, prompts, adjusted, strict=True)
    ]


def _judgement(found: Estimate, prompts: int, p_worse: float, tolerance: float, settings: int) -> Judgement:
    half, limit = found.half(1 - 2 * ALPHA), log1p(-tolerance)
    ratio = Interval(exp(found.value), exp(found.value - half), exp(found.value + half), prompts)
    if isinf(found.error):
        ratio = Interval(exp(found.value), None, None, prompts)
    verdict: GateOutcome = "cannot tell"
    if prompts >= FEWEST and p_worse <= ALPHA and found.value < limit:
        verdict = "worse"
    elif prompts >= FEWEST and found.value - half > limit:
        verdict = "not worse"
    return Judgement(
        verdict,
        ratio,
        p_worse,
        {f"{loss:g}": power(found, loss, tolerance, settings) for loss in LOSSES},
        _seen(found, tolerance, settings),
        power(found, 0.0, tolerance, settings),
        _more_prompts(found, prompts, limit, settings) if verdict == "cannot tell" else None,
    )


def _chance_of(found: Estimate) -> float:
    """The chance of an r as low as this where nothing was lost."""
    if found.error == 0:
        return float(found.value >= 0)
    return student_below(found.value / found.error, found.degrees)


def power(found: Estimate, loss: float, tolerance: float, settings: int = 1) -> float:
    """The chance that a loss would have been called worse, at this error. The tail of the noncentral t is that of a
    normal distribution (Abramowitz and Stegun, 26.7.10)."""
    true, limit = log1p(-loss), log1p(-tolerance)
    if isinf(found.error):
        return 0.0
    if found.error == 0:
        return float(true < min(limit, 0.0))
    normal, degrees = NormalDist(), found.degrees
    t = student(degrees, 1 - 2 * ALPHA / settings)
    beyond_chance = normal.cdf((-t * (1 - 1 / (4 * degrees)) - true / found.error) / sqrt(1 + t**2 / (2 * degrees)))
    beyond_tolerance = normal.cdf((limit - true) / found.error)
    return min(beyond_chance, beyond_tolerance)


def _seen(found: Estimate, tolerance: float, settings: int) -> float:
    """The smallest loss that would have been seen with 95 %; 1 where none would."""
    low, high = 0.0, 1.0 - 1e-9
    if power(found, high, tolerance, settings) < SURELY:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(found, middle, tolerance, settings) < SURELY else (low, middle)
    return high


def _more_prompts(found: Estimate, prompts: int, limit: float, settings: int) -> int | None:
    """How many more prompts make the error small enough, which shrinks with the root of their number, if r stays."""
    fewest = max(FEWEST - prompts, 1)
    if isinf(found.error):
        return fewest
    worse = found.value < limit
    distance = -found.value if worse else found.value - limit
    t = student(max(found.degrees, FEWEST - 1), 1 - 2 * ALPHA / (settings if worse else 1))
    if distance <= 0 or t * found.error / distance > sqrt(MOST_PROMPTS / prompts):
        return None
    return max(ceil(prompts * (t * found.error / distance) ** 2) - prompts, fewest)


def _gated_cell(
    cell: Cell, lengths: tuple[float, float], prompts: int, left_out: int, repeats: bool, judgement: Judgement
) -> GatedCell:
    return GatedCell(
        cell.draft,
        cell.num_speculative_tokens,
        cell.temperature,
        cell.draft_sampling,
        cell.context,
        cell.tree_name,
        cell.min_confidence,
        cell.concurrency,
        *lengths,
        prompts,
        left_out,
        repeats,
        judgement,
    )


def _worst(cells: Sequence[GatedCell]) -> GateOutcome:
    found = {cell.judgement.verdict for cell in cells}
    order: tuple[GateOutcome, ...] = ("worse", "cannot tell", "not worse")
    return next(one for one in order if one in found)
