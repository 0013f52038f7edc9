"""A certificate of losslessness, short enough to paste."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from draftkit.evaluate.certificate import Certificate, TokenDifference

NOT_DRAWN = "Temperatures above 0 were not measured, and not tested."
STYLES = {"no difference seen": "bold green", "numerics only": "bold yellow", "bug": "bold red"}


def certificate(result: Certificate) -> Group:
    """It in a few lines: the verdict, each difference, what would have been seen, and how it was asked."""
    style = STYLES.get(result.verdict, "bold yellow")
    head = Text(f"Losslessness of {result.draft} on {result.target} in {result.engine}: ").append(result.verdict, style)
    steps = Table.grid(padding=(0, 2))
    same = result.requests - len(result.divergences)
    steps.add_row("temperature 0", f"{same} of {result.requests} = without the draft ({result.tokens:,} tokens)")
    if result.floor is not None:
        moved = "as rounding differs between two batch sizes"
        if result.moved is not None:
            moved = f"log-probabilities move by {result.moved:.2g}"
        steps.add_row("near-tie", f"up to {result.floor:.2g} nats; {moved}")
    for divergence in result.divergences:
        steps.add_row(f"request {divergence.request}, position {divergence.position}", _difference(divergence))
    if (beside := result.reference) is not None:
        same = beside.requests - len(beside.divergences)
        steps.add_row("without a draft", f"{same} of {beside.requests} = {beside.name}; {beside.moved:.2g} nats apart")
        for divergence in beside.divergences:
            steps.add_row(f"request {divergence.request}, position {divergence.position}", _difference(divergence))
    for test in result.tests:
        steps.add_row(test.name, f"p = {test.adjusted:.2g} ({test.p_value:.2g} before Holm), {test.samples:,} answers")
    seen = [f"{result.detectable_rate:.2%} of the greedy tokens wrong"]
    tokens = [test.detectable for test in result.tests if test.name.startswith("token")]
    likely = [test.detectable for test in result.tests if not test.name.startswith("token")]
    if tokens:
        seen.append(f"a total variation of {max(tokens):.2f} in the tokens of a place")
    if likely and max(likely) < 1:
        seen.append(f"drawn answers of which one is likelier than one without with a chance of 50 ± {max(likely):.0%}")
    beyond = "" if result.tests else f". {NOT_DRAWN}"
    power = Text(f"  it would have seen, with 95 %: {'; '.join(seen)}; not smaller defects{beyond}")
    failures = [Text(f"  fails: {failure}", "red") for failure in result.failures]
    drawn = [f"T = {s.temperature:g}, top-k {s.top_k}, top-p {s.top_p:g}, min-p {s.min_p:g}" for s in result.samplings]
    how = [f"{result.engine} {result.version or ''}".rstrip(), *drawn, f"concurrency {result.concurrency}"]
    return Group(head, *failures, power, steps, Text("; ".join(how)))


def _difference(divergence: TokenDifference) -> str:
    """Two tokens and what they were worth."""
    mine, other = ("the end" if token is None else repr(token) for token in divergence.tokens)
    if divergence.logprobs is None:
        return f"{mine} instead of {other}"
    one, beside = divergence.logprobs
    return f"{mine} ({one:.4f}) instead of {other} ({beside:.4f}): {_number(divergence.margin)} nats apart"


def _number(value: float | None) -> str:
    return "∞" if value is None or value == inf else f"{value:.2g}"
