"""What a measurement says to do, in one sentence: what its terminal output, report and card begin with.

A draft pays at a batch where all of its speed-up's interval is above 1, and its run has no doubt of it. One verdict for
each engine and temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log
from typing import Literal

from draftkit.results.cell import OPTIONAL, OWN_ENGINE, Cell, Interval

UNEXPLAINED = 1.05  # a speed-up of so many times the acceptance length
NO_DIFFERENCE = 0.02  # speeds that are closer to plain decoding than that are the same to whoever serves
DISTURBED = 0.15  # how well the cost of a round is to be known for a speed-up to mean something
MOST_PROMPTS = 1_000  # more are not worth the answer
OPENING = ("at", "on", "use", "no", "whether")  # words that sentences begin with
VerdictKind = Literal["use", "none", "unclear", "unmeasured"]


@dataclass(frozen=True)
class ResultVerdict:
    """`sentence` says it all. `draft` at `num_speculative_tokens`, or with `tree`, is what to serve, or, unless `kind`
    is `use`, what came closest; `up_to`: the largest batch at which it pays. `more_prompts`: how many it would take,
    beside those measured, to tell what could not be told. `commands`: engine → what serves it."""

    kind: VerdictKind
    sentence: str
    engine: str = OWN_ENGINE
    temperature: float = 0.0
    draft: str | None = None
    num_speculative_tokens: int | None = None
    tree: str | None = field(default=None, metadata=OPTIONAL)
    up_to: int | None = None
    speedup: Interval | None = None
    more_prompts: int | None = field(default=None, metadata=OPTIONAL)
    commands: dict[str, str] = field(default_factory=dict)


def verdicts(cells: Sequence[Cell]) -> tuple[ResultVerdict, ...]:
    """A verdict for each engine, temperature and context, in the order of the cells."""
    groups: dict[tuple[str, str, float, int | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.target, cell.engine, cell.temperature, cell.context), []).append(cell)
    several, targets = len(groups) > 1, len({cell.target for cell in cells}) > 1
    told = ((_condition(group[0], targets) if several else "", group) for group in groups.values())
    judged = (_verdict(group, _bundled(group[0]) + condition) for condition, group in told)
    return tuple(replace(verdict, sentence=_sentence(verdict.sentence)) for verdict in judged)


def _sentence(said: str) -> str:
    """With a capital where it begins with a word of its own, and a full stop; the name of a draft stays as it is."""
    begins = said.partition(" ")[0].rstrip(",:")
    return (said[0].upper() + said[1:] if begins in OPENING else said) + "."


def unexplained(cell: Cell) -> bool:
    """Whether a speed-up is larger than the tokens of a round account for, as a round takes no less than a plain step.

    The baseline, or a part of it, was then run while the machine did something else.
    """
    length, speedup = cell.acceptance_length, cell.times_faster
    return length is not None and speedup is not None and speedup > UNEXPLAINED * length.mean


def disturbed(cell: Cell) -> bool:
    """Whether the machine did something else meanwhile, so that more prompts alone would tell nothing."""
    return cell.pace_error is not None and cell.pace_error > DISTURBED


def beyond_length(cell: Cell) -> bool:
    """Whether the interval of a speed-up reaches beyond what the tokens of a round account for."""
    length, speedup = cell.acceptance_length, cell.speedup_interval
    if length is None or speedup is None or speedup.bounds is None:
        return False
    longest = length.mean if length.bounds is None else length.bounds[1]
    return speedup.bounds[1] > UNEXPLAINED * longest


def well_known(cell: Cell) -> bool:
    """Whether a speed-up is to be acted on: only where its own run has no doubt of it."""
    return not (unexplained(cell) or disturbed(cell) or beyond_length(cell))


def _bundled(cell: Cell) -> str:
    """What a sentence begins with where the prompts are the zoo's and the target is not: they tell little of any
    use."""
    own = cell.dataset != "zoo" or (cell.target or "").startswith("zoo:")
    return "" if own else "on draftkit's bundled prompts, "


def _condition(cell: Cell, targets: bool) -> str:
    target = f"{cell.target}: " if targets else ""
    engine = "" if cell.other_engine is None else f" in {cell.engine}"
    context = "" if cell.context is None else f", context {cell.context}"
    return f"{target}at T = {cell.temperature:g}{context}{engine}, "


def _verdict(cells: Sequence[Cell], condition: str) -> ResultVerdict:
    """The verdict on cells at one temperature in one engine."""
    timed = [cell for cell in cells if cell.times_faster is not None]
    sound = [cell for cell in timed if not unexplained(cell)]
    if not timed:
        return _of(_longest(cells), "unmeasured", condition + _unmeasured(cells))
    if not sound:
        best = _fastest(timed)
        sentence = f"no speed-up can be told: {_speed(best)} is more than {_length(best)} accounts for; measure again"
        return _of(best, "unclear", f"{condition}{sentence} on a machine that does nothing else")
    batches = sorted({cell.concurrency for cell in sound})
    at_batch = {batch: [cell for cell in sound if cell.concurrency == batch] for batch in batches}
    paying = {batch: _fastest(good) for batch in batches if (good := [c for c in at_batch[batch] if pays(c)])}
    best = _fastest(sound)
    if paying:
        return _use(paying, batches, at_batch, condition)
    if all(_does_not_pay(cell) for cell in sound):
        name = _named(best) + _at(best, batches)
        sentence = f"no draft pays here: the best, {name}, decodes {_speed(best)} as fast as without"
        return _of(best, "none", condition + sentence)
    best = _fastest([cell for cell in sound if not _does_not_pay(cell)])
    return _unclear(best, _named(best) + _at(best, batches), condition)


def pays(cell: Cell) -> bool:
    """Whether a draft is faster than plain decoding beyond chance and doubt."""
    return cell.speedup_interval is not None and cell.speedup_interval.above(1) and well_known(cell)


def _does_not_pay(cell: Cell) -> bool:
    speedup = cell.speedup_interval
    return speedup is not None and speedup.bounds is not None and speedup.bounds[1] < 1 + NO_DIFFERENCE


def _use(
    paying: dict[int, Cell], batches: Sequence[int], at_batch: dict[int, list[Cell]], condition: str
) -> ResultVerdict:
    """The verdict to use a draft: from which batch on something pays, and what to use beyond."""
    first = min(paying)
    chosen = paying[first]
    reach = [chosen]
    for batch in batches[batches.index(first) + 1 :]:
        same = next((cell for cell in at_batch[batch] if _is_same(cell, chosen) and pays(cell)), None)
        if same is None:
            break
        reach.append(same)
    up_to = reach[-1].concurrency
    where = f"up to batch {up_to}" if first == batches[0] else f"from batch {first} to {up_to}"
    if up_to == first:
        where = f"at batch {first}"
    speeds = _speed(chosen) if len(reach) == 1 else f"{_speed(chosen)} to {_speed(reach[-1])}"
    sentence = f"{condition}use {_named(chosen)} {where}, {speeds}"
    beyond = [batch for batch in batches if batch > up_to]
    if beyond:
        sentence += f"; beyond, {_beyond(paying.get(beyond[0]), at_batch[beyond[0]])}"
    others = [c for c in _by_speed(at_batch[first]) if not _is_same(c, chosen)]  # a second run is no rival
    rival = next((c for c in others if _may_be_as_fast(c, chosen)), None)
    more = None if rival is None else _more_prompts(chosen, rival)
    if rival is not None:
        sentence += f"; {_named(rival)} may be as fast, {_speed(rival)}"
        sentence += "" if more is None else f": {more} more {'prompt' if more == 1 else 'prompts'} would tell"
    return _of(chosen, "use", sentence, up_to=up_to, more_prompts=more)


def _beyond(other: Cell | None, cells: Sequence[Cell]) -> str:
    """A clause that says what to do at a larger batch, where the chosen draft is not known to pay."""
    if other is not None:
        return f"{_named(other)}, {_speed(other)}"
    return "draft nothing" if all(_does_not_pay(cell) for cell in cells) else "whether a draft pays cannot be told"


def _unclear(best: Cell, name: str, condition: str) -> ResultVerdict:
    """The verdict that it cannot be told whether anything pays, with what to measure."""
    speedup = best.speedup_interval
    if speedup is None or speedup.bounds is None:
        known = f"{name} was the fastest, {_speed(best)} plain decoding"
        if (best.times_faster or 0) < 1:
            known = f"no draft was faster than plain decoding: {name} came closest, {_speed(best)}"
        sentence = f"{known}; how sure that is cannot be told: "
        how = "measure at least 8 prompts" if (best.num_prompts or 0) < 2 else "measure with --set repeats=3"
        return _of(best, "unclear", condition + sentence + how)
    if disturbed(best):
        what = "something else used the machine; measure again on one that does nothing else"
        sentence = f"whether {name} pays cannot be told, {_speed(best)} plain decoding: {what}"
        return _of(best, "unclear", condition + sentence)
    if beyond_length(best):
        beyond = f"{_speed(best)} plain decoding reaches beyond what {_length(best)} accounts for"
        sentence = f"whether {name} pays cannot be told: {beyond}; measure again with --set repeats=10"
        return _of(best, "unclear", condition + sentence)
    more = _more_prompts(best, None)
    needed = "no number of prompts will tell" if more is None else f"measure {more} more prompts"
    sentence = f"whether {name} pays cannot be told, {_speed(best)} plain decoding: {needed}"
    return _of(best, "unclear", condition + sentence, more_prompts=more)


def _unmeasured(cells: Sequence[Cell]) -> str:
    """Acceptance alone, of the one setting or of the best of several."""
    best = _longest(cells)
    several = len({(cell.draft, cell.drafted) for cell in cells}) > 1
    accepts = f"accepts most, {_length(best)}" if several else f"has {_length(best)}"
    return f"{_named(best)} {accepts}; what that gains in speed was not measured"


def _of(
    cell: Cell, kind: VerdictKind, sentence: str, up_to: int | None = None, more_prompts: int | None = None
) -> ResultVerdict:
    return ResultVerdict(
        kind,
        sentence,
        cell.engine,
        cell.temperature,
        cell.draft,
        cell.num_speculative_tokens,
        cell.tree_name,
        up_to,
        cell.speedup_interval,
        more_prompts,
    )


def _more_prompts(cell: Cell, rival: Cell | None) -> int | None:
    """How many more prompts it takes until the interval of the speed-up is as wide as the distance to plain decoding,
    or to the rival's speed-up; intervals shrink with the root of their number. None where that is more than is worth
    it, or something else than few prompts made an interval wide."""
    interval, speedup = cell.speedup_interval, cell.times_faster
    if interval is None or interval.bounds is None or speedup is None:
        return None
    if not (well_known(cell) and (rival is None or well_known(rival))):
        return None
    other = 1.0 if rival is None else (rival.times_faster or 1.0)
    distance = abs(log(speedup / other))
    if distance < NO_DIFFERENCE:
        return None
    prompts = interval.prompts or cell.num_prompts or 1
    half = log(interval.bounds[1] / interval.bounds[0]) / 2 * (1 if rival is None else 2**0.5)
    more = ceil(prompts * (half / distance) ** 2) - prompts
    return max(more, 1) if more <= MOST_PROMPTS else None


def _may_be_as_fast(cell: Cell, chosen: Cell) -> bool:
    one, other = cell.speedup_interval, chosen.speedup_interval
    return one is not None and other is not None and one.overlaps(other) and not _does_not_pay(cell)


def _is_same(one: Cell, other: Cell) -> bool:
    asked = ((cell.draft, cell.num_speculative_tokens, cell.tree, cell.min_confidence) for cell in (one, other))
    return next(asked) == next(asked)


def _by_speed(cells: Sequence[Cell]) -> Iterator[Cell]:
    return iter(sorted(cells, key=lambda cell: -(cell.times_faster or 0)))


def _fastest(cells: Sequence[Cell]) -> Cell:
    return next(_by_speed(cells))


def _longest(cells: Sequence[Cell]) -> Cell:
    return max(cells, key=lambda cell: cell.acceptance_length.mean if cell.acceptance_length else 0.0)


def _named(cell: Cell) -> str:
    sure = "" if cell.min_confidence is None else f" and draft_confidence {cell.min_confidence:g}"
    return f"{cell.draft} {at_setting(cell.num_speculative_tokens, cell.tree_name)}{sure}"


def at_setting(k: int | None, tree: str | None) -> str:
    """How a draft is run, in words."""
    return f"at K = {k}" if tree is None else f"with the tree {tree}"


def _at(cell: Cell, batches: Sequence[int]) -> str:
    """The cell's batch, where several were measured."""
    return f" and batch {cell.concurrency}" if len(batches) > 1 else ""


def _speed(cell: Cell) -> str:
    bounds = None if cell.speedup_interval is None else cell.speedup_interval.bounds
    text = f"{cell.times_faster or 0:.2f} ×"
    return text if bounds is None else f"{text} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _length(cell: Cell) -> str:
    length = cell.acceptance_length
    if length is None:
        return "its acceptance"
    bounds = "" if length.bounds is None else " [{:.2f}, {:.2f}]".format(*length.bounds)
    return f"an acceptance length of {length.mean:.2f}{bounds}"
