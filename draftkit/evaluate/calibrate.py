"""Calibrations of recorded rounds: what drafts said of their chances against what stood, and what to make of it.

Nothing is decoded, and nothing of torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from draftkit.errors import DraftkitError
from draftkit.io.jsonfile import finite
from draftkit.results.calibration import SaidAgainstStood, SaidRounds, Scaling, judge, scale
from draftkit.results.recorded import RecordedRound, read_rounds

Estimator = Literal["head", "draft"]  # who says the chances
FIELDS: Mapping[Estimator, str] = {"head": "confidences", "draft": "probabilities"}


@dataclass(frozen=True)
class Calibration:
    """A draft at one K and temperature. `estimate`: whether its confidence head says the chances, or the draft itself
    by the probability of its token. `slices`: of the prompts that have something in common. `scaling`: of a head's."""

    draft: str
    num_speculative_tokens: int
    temperature: float
    draft_sampling: str | None
    estimate: Estimator
    whole: SaidAgainstStood
    slices: Mapping[str, SaidAgainstStood]
    scaling: Scaling | None

    @property
    def sentence(self) -> str:
        """What it comes to."""
        whole, gap = self.whole, self.whole.gap
        who = "its head" if self.estimate == "head" else "its own probability"
        what = f"{self.draft}, K={self.num_speculative_tokens}, T={self.temperature:g}: {who} says"
        lengths = f"{whole.said_length:.2f} tokens a round said, {whole.length:.2f} measured"
        if gap.bounds is None:
            return f"{what} {lengths}; of a single prompt nothing is known of others"
        off = f"{gap.mean:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"
        if not (gap.above(0) or gap.below(0)):
            return f"{what} what happens, as far as {whole.prompts} prompts tell: {lengths} ({off})"
        return f"{what} too {'much' if gap.mean > 0 else 'little'}: {lengths} ({off})"

    def to_dict(self) -> dict[str, object]:
        """The calibration as `calibrate --json` has it."""
        found = asdict(self) | {"sentence": self.sentence}
        if self.scaling is not None:
            found["scaling"] |= {"missing_rounds": self.scaling.missing, "helps": self.scaling.helps}
        return dict(finite(found))  # type: ignore[call-overload]


def calibrate_records(records: Sequence[Path], *, estimate: Estimator | None = None) -> list[Calibration]:
    """The calibration of each draft, K and temperature in files that `eval --records` wrote.

    `estimate`: whose word is judged; None: the confidence head's, or of a draft without one its own probabilities.

    Raises `DraftkitError` where the records hold no such word, or rounds that it has cut short.
    """
    groups: dict[tuple[object, ...], list[RecordedRound]] = {}
    for one in read_rounds(records):
        if one.drafted and not one.beyond:
            key = one.draft, one.num_speculative_tokens, one.temperature, one.draft_sampling or ""
            groups.setdefault(key, []).append(one)
    where = ", ".join(map(str, records))
    if not groups:
        raise DraftkitError("no round in which anything was drafted", where=where, hint="record a run: eval --records")
    said = {key: who for key, found in groups.items() if (who := _estimate(found, estimate)) is not None}
    if not said:
        raise DraftkitError(
            "no draft of these records says with what chance its tokens stand",
            where=where,
            expected="rounds of a draft with a confidence head" if estimate == "head" else "rounds of a draft model",
            hint="record them anew: draftkit eval --records; look-ups say nothing",
        )
    return [_calibration(groups[key], who, where) for key, who in said.items()]


def _estimate(found: Sequence[RecordedRound], asked: Estimator | None) -> Estimator | None:
    """Whose word all rounds have, of those that are asked for; None of nobody."""
    wanted = FIELDS if asked is None else (asked,)
    return next((who for who in wanted if all(getattr(one, FIELDS[who]) for one in found)), None)


def _calibration(found: Sequence[RecordedRound], who: Estimator, where: str) -> Calibration:
    _check(found, where)
    first, rounds = found[0], _rounds(found, who)
    labels = sorted({label for one in found for label in one.slices})
    inside = {label: np.array([label in one.slices for one in found]) for label in labels}
    return Calibration(
        first.draft,
        first.num_speculative_tokens,
        first.temperature,
        first.draft_sampling,
        who,
        judge(rounds),
        {label: judge(rounds.of(chosen)) for label, chosen in inside.items() if not chosen.all()},
        scale(rounds) if who == "head" else None,
    )


def _check(found: Sequence[RecordedRound], where: str) -> None:
    """Raise `DraftkitError` for rounds from which the chances cannot be judged."""
    first = found[0]
    name = f"{first.draft}, K={first.num_speculative_tokens}, T={first.temperature:g}"
    short = sum(one.drafted < one.num_speculative_tokens for one in found)
    if short or any(one.min_confidence for one in found):
        raise DraftkitError(
            f"{name}: {short:,} of {len(found):,} rounds drafted fewer than K tokens: what was left out is not judged",
            where=where,
            hint="record without draft_confidence, k_by_batch and disable_above_batch",
        )
    modes = {one.verification for one in found} - {"rejection", "block", None}
    if modes:
        raise DraftkitError(
            f"{name}: recorded with {' and '.join(map(str, modes))} verification, which accepts with other chances",
            where=where,
            hint="record with verification=rejection, the default",
        )


def _rounds(found: Sequence[RecordedRound], who: Estimator) -> SaidRounds:
    prompts = {request: number for number, request in enumerate(dict.fromkeys(one.request for one in found))}
    known = all(one.expected for one in found) and {one.verification for one in found} <= {"rejection", None}
    return SaidRounds(
        np.array([getattr(one, FIELDS[who]) for one in found]).clip(0, 1),
        np.array([one.accepted for one in found]),
        np.array([one.expected for one in found]).clip(0, 1) if known else None,
        np.array([prompts[one.request] for one in found]),
    )
