"""A certificate of losslessness, short enough to paste."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from draftkit.evaluate.certificate.equality import Divergence, Equality
    from draftkit.evaluate.certificate.result import Certificate, Detectable
    from draftkit.evaluate.certificate.served import ServedCertificate, ServedDivergence
    from draftkit.requests import SamplingParameters

NOT_DRAWN = "Temperatures above 0 were not measured, and not tested."
STYLES = {"no difference seen": "bold green", "numerics only": "bold yellow", "bug": "bold red"}


def certificate(result: Certificate) -> Group:
    """It in about twenty lines: the verdict, what each step found, and where it ran."""
    steps = Table.grid(padding=(0, 2))
    for row in _steps(result):
        steps.add_row(*row)
    return Group(_headline(result), *_problems(result), _power(result.detectable), steps, *_origin(result))


def _headline(result: Certificate) -> Text:
    verdict = result.verdict
    text = Text(f"Losslessness of {result.draft} on {result.target}: ")
    match verdict:
        case "bug":
            return text.append(f"BUG{_place(result.first_bug)}", STYLES[verdict])
        case "numerics only":
            ties = f"numerics only ({len(result.divergences)} ties below the noise floor)"
            return text.append(ties, STYLES[verdict])
    return text.append(verdict, STYLES[verdict])


def _place(bug: Divergence | None) -> str:
    if bug is None:
        return ""
    return f" at request {bug.request}, position {bug.position}, margin {_number(bug.margin)}"


def _problems(result: Certificate) -> list[Text]:
    return [Text(f"  fails: {failure}", "red") for failure in result.failures]


def _power(smallest: Detectable) -> Text:
    """What the certificate can say at all."""
    seen = f"  it would have seen, with 95 %: {smallest.wrong_tokens:.2%} of the greedy tokens wrong"
    if smallest.wrong_drawn_tokens is None:
        return Text(f"{seen}; not smaller defects. {NOT_DRAWN}")
    return Text(
        f"{seen}, {smallest.wrong_drawn_tokens:.2%} of the drawn ones; a distribution off by a total variation of "
        f"{smallest.verifier:.3f} in the verifier, {smallest.continuations:.3f} end to end; not smaller defects"
    )


def _steps(result: Certificate) -> list[tuple[str, str, str]]:
    replay, noise, own = result.replay, result.noise, result.self_draft
    floor = f"{noise.floor:.2g}"
    greedy = [("C", run.name, _equality(run)) for run in result.greedy]
    fits = [
        ("D", fit.name, f"p = {fit.adjusted:.2g} ({fit.p_value:.2g} before Holm), {fit.samples:,} tokens")
        for fit in result.fits
    ]
    return [
        (
            "A",
            "tokens that are the best of their context",
            f"{replay.best:,} of {replay.tokens:,}, the others at most {replay.largest:.2g} below",
        ),
        (
            "B",
            "noise floor",
            f"{floor} logits ({noise.contexts} contexts, {len(noise.shapes)} shapes); "
            f"at most {noise.divergences_per_1000_tokens:.2g} divergences in 1,000 tokens",
        ),
        *greedy,
        *[("D", run.name, _equality(run)) for run in result.coupled],
        *fits,
        (
            "E",
            "the target as its own draft",
            f"acceptance length {own.acceptance_length:.2f}, {own.required:.2f} required, {own.rounds} rounds",
        ),
    ]


def _equality(run: Equality) -> str:
    size = f"{run.tokens:,} tokens, K={run.num_speculative_tokens}, concurrency {run.concurrency}"
    same = run.requests - len(run.divergences)
    return f"{same} of {run.requests} = plain decoding ({size})"


def served_certificate(result: ServedCertificate) -> Group:
    """What was seen of an engine from outside: the verdict, each difference, and what would have been seen."""
    style = STYLES.get(result.verdict, "bold yellow")
    head = Text(f"Losslessness of {result.draft} on {result.target} in {result.engine}: ").append(result.verdict, style)
    steps = Table.grid(padding=(0, 2))
    same = result.requests - len(result.divergences)
    steps.add_row("temperature 0", f"{same} of {result.requests} = without the draft ({result.tokens:,} tokens)")
    if result.floor is not None:
        steps.add_row("near-tie", f"up to {result.floor:.2g} nats; log-probabilities move by {result.moved:.2g}")
    for divergence in result.divergences:
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


def _difference(divergence: ServedDivergence) -> str:
    """Two tokens and what they were worth."""
    mine, other = ("the end" if token is None else repr(token) for token in divergence.tokens)
    if divergence.logprobs is None:
        return f"{mine} instead of {other}"
    one, beside = divergence.logprobs
    return f"{mine} ({one:.4f}) instead of {other} ({beside:.4f}): {_number(divergence.margin)} nats apart"


def _number(value: float | None) -> str:
    return "∞" if value is None or value == inf else f"{value:.2g}"


def _origin(result: Certificate) -> list[Text]:
    where, settings = result.provenance, result.settings
    drafts, sampling = ", ".join(map(str, settings.sweep.k)), settings.measured.sampling
    temperatures = ", ".join(f"{t:g}" for t in (0, *settings.temperatures))
    return [
        Text(
            f"K={drafts}, {settings.measured.verification}, temperature {temperatures}{_cuts(sampling)}; "
            f"{where['dtype']} on {where['device']}; seed {sampling.seed}"
        ),
        Text(
            f"draftkit {where['draftkit']}, torch {where['torch']}, transformers {where['transformers']}, "
            f"Python {where['python']}; {where['date']}"
        ),
    ]


def _cuts(sampling: SamplingParameters) -> str:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    cuts = {name: getattr(sampling, name) for name in neutral}
    return "".join(f", {name} {cut:g}" for name, cut in cuts.items() if cut != neutral[name])
