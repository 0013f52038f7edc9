"""Losses written as text: `kl`, `lk(3)`, `0.1*ce + 0.9*tv`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import Annotated

from draftkit.errors import DraftkitError
from draftkit.train.losses.table import FAMILIES, LOSSES, Contribution, LossRows

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_TERM = re.compile(rf"\s*(?:({_NUMBER})\s*\*\s*)?([a-z_]+)\s*(?:\(\s*({_NUMBER})\s*\))?\s*")
_EXPECTED = f"a sum of losses, as kl or 0.1*ce + 0.9*lk(3), of {', '.join([*LOSSES, 'lk(η)', 'top_k(k)'])}"


@dataclass(frozen=True)
class Term:
    """One loss of the table, times `weight`; `number` is η of `lk` and k of `top_k`."""

    weight: float
    name: str
    number: float | None = None

    def __call__(self, rows: LossRows) -> Contribution:
        contribution = LOSSES[self.name](rows) if self.number is None else FAMILIES[self.name](rows, self.number)
        if self.weight == 1:
            return contribution
        return Contribution(contribution.value * self.weight, contribution.slope * self.weight)

    def __str__(self) -> str:
        number = "" if self.number is None else f"({self.number!r})"
        return f"{self.weight!r}*{self.name}{number}"


@dataclass(frozen=True)
class Loss:
    """A weighted sum of different losses; as text it is what `parse_loss` reads."""

    terms: tuple[Term, ...]

    @property
    def needs_target(self) -> bool:
        """Whether labels alone are too little."""
        return self.names != {"ce"}

    @property
    def names(self) -> set[str]:
        return {term.name for term in self.terms}

    def term(self, name: str) -> Term:
        """The term of that name, with weight 0 where there is none."""
        return next((term for term in self.terms if term.name == name), Term(0.0, name, 0.0))

    def __call__(self, rows: LossRows) -> Contribution:
        value, slope = self.terms[0](rows)
        for term in self.terms[1:]:
            more = term(rows)
            value, slope = value + more.value, slope + more.slope
        return Contribution(value, slope)

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


def parse_loss(text: str) -> Loss:
    """Read a weighted sum of the table's losses, each at most once. Raises `DraftkitError`."""
    terms: list[Term] = []
    end = -1  # of the last term; a plus follows it
    while end < len(text):
        found = _TERM.match(text, end + 1)
        if not found or text[found.end() : found.end() + 1] not in ("", "+"):
            raise DraftkitError(f"loss {text!r}", expected=_EXPECTED)
        terms.append(_term(text, *found.groups()))
        end = found.end()
    if len({term.name for term in terms}) < len(terms):
        raise DraftkitError(f"loss {text!r} names one of its losses twice", hint="add their weights")
    return Loss(tuple(terms))


LossText = Annotated[str, parse_loss]  # a setting that a record checks


def _term(text: str, weight: str | None, name: str, number: str | None) -> Term:
    term = Term(float(weight or 1), name, None if number is None else float(number))
    value = term.number or 0.0
    known = name in (LOSSES if number is None else FAMILIES)
    usable = isfinite(value) and (name != "top_k" or (value >= 1 and value.is_integer()))
    if not known or not usable or not 0 < term.weight < float("inf"):
        raise DraftkitError(f"loss {text!r}", where=name, expected=_EXPECTED)
    return term
