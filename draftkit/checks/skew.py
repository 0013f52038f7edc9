"""The causes of training-serving skew: why fewer or more drafts are accepted in real decoding than training says.

Each possible cause is tested by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from draftkit.checks.evidence import SkewReplay
from draftkit.checks.registry import check, check_unless
from draftkit.finding import Finding

CHANCE = 0.05  # share of answers in which a rounding error may have turned a tie
STATE_TOLERANCE = 0.05  # relative difference of states; numerics of other batch shapes stay far below


@check
def facts(replay: SkewReplay) -> Iterator[Finding]:
    """The checkpoint states the draft as it was trained: which row of a block predicts what, layers, norms."""
    if replay.facts is None:
        return
    mine, theirs = replay.facts
    differing = [name for name in mine if mine[name] != theirs.get(name)]
    if differing:
        values = (f"{name} is {mine[name]} in training and {theirs.get(name)} in the checkpoint" for name in differing)
        yield Finding(
            "facts",
            "error",
            "; ".join(values),
            fix="the spec that is saved is not that of the draft that trains",
        )


@check_unless("facts")
def rope(replay: SkewReplay) -> Iterator[Finding]:
    """Draft and checkpoint rotate by the same frequencies."""
    if replay.frequencies is None:
        return
    mine, theirs = replay.frequencies
    if not torch.allclose(mine, theirs.to(mine.device)):
        yield Finding(
            "rope",
            "error",
            f"the slowest frequency is {float(mine[-1]):.3g} in training and {float(theirs[-1]):.3g} in the checkpoint",
            fix="rope base or scaling of the spec are not those that were trained",
        )


@check
def text(replay: SkewReplay) -> Iterator[Finding]:
    """The answers are the target's own greedy ones."""
    differing = []
    for answer, generation in zip(replay.answers, replay.generations, strict=True):
        own = answer.tokens[answer.spans[0][0] :].tolist()
        if replay.greedy and generation.tokens != own:
            differing.append((answer.id, _first_difference(own, generation.tokens, len(generation.tokens))))
    if len(differing) > CHANCE * len(replay.answers):
        name, at = differing[0]
        yield Finding(
            "text",
            "error",
            f"{len(differing)} of {len(replay.answers)} answers are not the target's greedy ones: {name} from token "
            f"{at} on",
            where=name,
            fix="regenerate the answers with this target as it is served; compare chat template and system prompt",
        )


@check
def states(replay: SkewReplay) -> Iterator[Finding]:
    """Training and serving read the same states of the target: no other layer, no other norm."""
    for name, mine, theirs in replay.states:
        off = float((mine - theirs).norm() / theirs.norm())
        if off > STATE_TOLERANCE:
            yield Finding(
                "states",
                "error",
                f"the target's states {name} differ by {100 * off:.0f} % between training and serving",
                fix="write the states again; check layer ids (HF numbering) and whether the final norm is applied",
            )


@check_unless("rope", "text", "states")
def mask(replay: SkewReplay) -> Iterator[Finding]:
    """Serving drafts only where training counts a loss."""
    missed = []
    for drafted, generation in zip(replay.drafted, replay.generations, strict=True):
        # The round's drafts begin at its position; the feature that they come from lies two before.
        positions = [r.position for r in generation.rounds if r.position < len(drafted)]
        missed += [position for position in positions if not drafted[position - 2]]
    if missed and replay.greedy:
        rounds = sum(len(generation.rounds) for generation in replay.generations)
        yield Finding(
            "mask",
            "error",
            f"serving drafts in {len(missed)} of {rounds} rounds where training counts nothing, as at {missed[0]}",
            fix="the loss mask is shifted; prepare the data again and see draftkit data check",
        )


@check_unless("facts", "rope", "text", "states", "mask")
def draft(replay: SkewReplay) -> Iterator[Finding]:
    """With the same text and states the simulated rounds are those of decoding; if not, the draft differs from its
    checkpoint."""
    pairs = list(zip(replay.answers, replay.simulated, replay.decoded, strict=True))
    differing = [(answer, mine, theirs) for answer, mine, theirs in pairs if list(mine) != list(theirs)]
    if not replay.greedy or len(differing) <= CHANCE * len(pairs):
        return
    answer, mine, theirs = differing[0]
    at = _first_difference(mine, theirs, 0)
    yield Finding(
        "draft",
        "error",
        f"{len(differing)} of {len(pairs)} answers have other rounds, as {answer.id} from round {at + 1} on: simulated "
        f"{list(mine[at : at + 5])}, decoded {list(theirs[at : at + 5])}",
        where=answer.id,
        fix="training and checkpoint disagree about the draft: positions, masks, a norm, weights",
    )


def _first_difference(mine: Sequence[int], theirs: Sequence[int], otherwise: int) -> int:
    return next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), otherwise)
