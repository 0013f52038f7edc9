"""The certificate: clean where an engine is lossless, and each planted bug is named; seen from outside, and draftkit's
own."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import Command
from fixtures.servers.speaking import Dialect, Question, SpeakingServer, Spoken
from lossless.planted import plant_acceptance, plant_cache_off_by_one
from rich.console import Console

from draftkit.engines.records import Answer
from draftkit.evaluate.certificate import APART, Certificate, CertificateRequests, certify_draft, compared
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.measure import Lane, Run
from draftkit.evaluate.two_samples import homogeneity, rank_test
from draftkit.report.terminal.engines import certificate
from draftkit.requests import Request, SamplingParameters
from draftkit.results.settings import Settings, Sweep

V = 12  # tokens of the language below
K = 3
REQUESTS = [Request(str(n), (n, 5, 2 * n % V), 24) for n in range(6)]
HOT = SamplingParameters(1.0, top_p=0.95, seed=1)
Law = Callable[[Sequence[int]], list[float]]


def law(context: Sequence[int]) -> list[float]:
    """The logits of what follows: a language without a model, in which the two last tokens count."""
    a, b = context[-2], context[-1]
    return [2.5 * math.cos(1 + 3 * a + 7 * b + token * (a + 2)) for token in range(V)]


def logprobs(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def draw(context: Sequence[int], asked: Question, chance: random.Random, of: Law = law) -> int:
    logits = of(context)
    if not asked.temperature:
        return max(range(V), key=logits.__getitem__)
    weights = [math.exp(value / asked.temperature) for value in logits]
    order = sorted(range(V), key=lambda token: -weights[token])
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += weights[token] / sum(weights)
        if mass >= asked.top_p:
            break
    return chance.choices(kept, [weights[token] for token in kept])[0]


def speaking(drafted: Law | None = None, planted: str = "") -> Callable[[Question], Spoken]:
    """An engine of the language; with a draft of a law of its own, it drafts K tokens, and accepts what it would have
    drawn itself (which is lossless), unless a bug is planted."""

    def speak(asked: Question) -> Spoken:
        chance = random.Random(f"{asked.seed} {asked.prompt}")
        tokens: list[int] = []
        chunks: list[list[int]] = []
        while len(tokens) < asked.max_tokens:
            chunk: list[int] = []
            for step in range(1 if drafted is None or not chunks else K + 1):
                context = [*asked.prompt, *tokens, *chunk]
                if planted == "cache" and chunks and len(tokens) > 6:
                    context = [*context[:-2], context[-1], context[-1]]  # reads what lies one entry too early
                forgets = planted == "forgets top-p" and chunks
                own = draw(context, replace(asked, top_p=1.0) if forgets else asked, chance)
                if drafted is None or step == K or not chunks:
                    chunk.append(own)
                    break
                proposed = draw(context, asked, chance, drafted)
                if planted == "takes drafts for granted" and chance.random() < 0.5:
                    own = proposed
                chunk.append(own)
                if own != proposed:
                    break
            chunks.append(chunk[: asked.max_tokens - len(tokens)])
            tokens += chunks[-1]
        whole = [*asked.prompt, *tokens]
        begin = len(asked.prompt)
        rows = [dict(enumerate(logprobs(law(whole[: begin + at])))) for at in range(len(tokens))]
        return Spoken(chunks, rows)

    return speak


def flatter(context: Sequence[int]) -> list[float]:
    return [value / 2 for value in law(context)]


def lane(speak: Callable[[Question], Spoken]) -> Lane:
    def run(requests: Sequence[Request]) -> Run:
        answers = []
        for request in requests:
            drawn = request.sampling
            asked = Question(
                request.prompt, request.max_new_tokens, drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed
            )
            spoken = speak(asked)
            own = tuple(row[token] for row, token in zip(spoken.logprobs, spoken.tokens, strict=True))
            answers.append(Answer(tuple(spoken.tokens), None, None, logprobs=own, alternatives=tuple(spoken.logprobs)))
        return Run(tuple(answers), 1.0, None, None)

    return run


def judged(plain: Lane, drafting: Lane, samplings: Sequence[SamplingParameters] = ()) -> Certificate:
    wanted, names = CertificateRequests.of(REQUESTS, samplings), ("target", "draft", "engine")
    answers = wanted.answers(plain, APART), wanted.answers(drafting)
    return compared(wanted, *answers, names=names, samplings=samplings, concurrency=1)


def certified(planted: str = "", sampling: SamplingParameters = HOT) -> Certificate:
    return judged(lane(speaking()), lane(speaking(flatter, planted)), [sampling])


def rendered(found: Certificate) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(certificate(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_lossless_engine_is_not_accused() -> None:
    found = certified()
    assert (found.verdict, found.failures, found.divergences) == ("no difference seen", (), ())
    assert found.tokens == 24 * len(REQUESTS)
    assert found.detectable_rate == pytest.approx(1 - 0.05 ** (1 / found.tokens))
    assert all(0 < test.detectable < 0.5 for test in found.tests)
    assert len(found.tests) == 7


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("planted", "where"),
    [
        ("takes drafts for granted", "token 2"),
        ("forgets top-p", "token 2"),
        ("cache", "position"),
    ],
)
def test_a_planted_bug_is_found(planted: str, where: str) -> None:
    found = certified(planted, replace(HOT, top_p=0.5))
    assert found.verdict == "bug"
    assert any(where in failure for failure in found.failures), found.failures
    # The prefill has no draft: what precedes it is never accused.
    assert not any("token 1 " in failure for failure in found.failures)
    if where == "position":
        assert found.first_bug is not None
        assert found.first_bug.position > 6
        assert found.first_bug.logprobs is not None
    text = rendered(found)
    assert "draft on target in engine: bug" in text
    assert "it would have seen, with 95 %" in text


def test_a_difference_at_a_near_tie_is_numerics() -> None:
    """Both tokens are as likely; log-probabilities move by as much between the two engines."""

    def answers(moved: float, tokens: tuple[int, ...]) -> Lane:
        row = {7: -1.0 + moved, 8: -1.0005 - moved, 3: -4.0}
        answer = Answer(tokens, None, None, logprobs=(-1.0 + moved,) * 3, alternatives=(row,) * 3)
        return lambda requests: Run((answer,) * len(requests), 1.0, None, None)

    def verdict(moved: float, floor_less: bool = False) -> Certificate:
        drafting = answers(moved, (7, 8, 7))
        if floor_less:
            drafting = answers(0.0, (7, 3, 7))
        return judged(answers(0.0, (7, 7, 7)), drafting)

    near = verdict(0.001)
    assert near.verdict == "numerics only"
    assert near.divergences[0].position == 1
    assert near.divergences[0].margin == pytest.approx(0.0005)
    assert verdict(0.0, floor_less=True).verdict == "bug"
    assert verdict(0.9).verdict == "bug"  # no rounding moves log-probabilities by so much


def test_an_engine_without_log_probabilities_is_not_judged_where_it_differs() -> None:
    def answers(*tokens: int) -> Lane:
        return lambda requests: Run((Answer(tokens, None, None),) * len(requests), 1.0, None, None)

    def verdict(*tokens: int) -> str:
        return judged(answers(1, 2, 3), answers(*tokens)).verdict

    assert verdict(1, 2, 3) == "no difference seen"
    assert verdict(1, 2, 4) == "unclear"
    assert verdict(1, 2) == "bug"  # which just ends


# draftkit's own engine.

OWN = Settings(num_speculative_tokens=2, concurrency=4, limit=5, max_new_tokens=12, dtype="float32")


def own(draft: str = "zoo:eagle3", asked: Settings | Sweep = OWN) -> Certificate:
    (found,) = certify_draft("zoo:target", draft, asked, engines=[OwnEngine()], samples=20)
    return found


@pytest.mark.slow
def test_draftkit_s_own_engine_is_certified_as_any_other() -> None:
    found = own(asked=OWN.sweep(temperature=(0.0, 1.0)))
    assert (found.verdict, found.engine, found.requests) == ("no difference seen", "draftkit", 5), found.failures
    assert (found.reference.name, found.reference.requests) == ("transformers' generate", 4)
    assert found.floor is not None
    assert 0 < found.floor < 1e-3  # what two batch sizes differ by in float32
    assert found.moved is None
    assert len(found.tests) == 7
    text = rendered(found)
    assert "Losslessness of zoo:eagle3 on zoo:target in draftkit: no difference seen" in text
    assert "4 of 4 = transformers' generate" in text
    assert "as rounding differs between two batch sizes" in text
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["reference"]["divergences"] == []


@pytest.mark.slow
def test_half_precision_is_no_bug_and_its_floor_is_wider() -> None:
    found = own(asked=replace(OWN, dtype="bfloat16"))
    assert found.verdict in ("no difference seen", "numerics only"), found.failures
    assert found.floor > 0.01


@pytest.mark.slow
def test_a_bug_with_a_draft_and_without_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lanes say the same; only another program shows that it is wrong."""
    plant_cache_off_by_one(monkeypatch)
    found = own("ngram")
    assert found.verdict == "bug"
    assert found.divergences == ()
    assert any("without a draft, log-probabilities lie" in failure for failure in found.failures)


@pytest.mark.slow
def test_a_bug_with_a_draft_is_found_in_the_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_acceptance(monkeypatch)
    found = own()
    assert found.verdict == "bug"
    assert found.first_bug is not None
    assert found.reference.divergences == ()


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "planted"), [("vllm", "takes drafts for granted"), ("sglang", "")])
def test_eval_certifies_servers(dialect: Dialect, planted: str, draftkit: Command) -> None:
    def run() -> tuple[int, dict[str, object], str]:
        with (
            SpeakingServer(dialect, speaking(flatter, planted), K) as drafting,
            SpeakingServer(dialect, speaking()) as plain,
        ):
            ran = draftkit(
                "certify", "--server", drafting.url, "--server-baseline", plain.url, "--target", "zoo:target",
                "--limit", "2", "--max-new-tokens", "8", "--concurrency", "8", "--temperature", "0,1", "--json",
            )  # fmt: skip
            return ran.code, json.loads(ran.out)["certificates"][0], ran.err

    code, found, err = run()
    assert found["engine"] == dialect
    assert (code, found["verdict"]) == ((1, "bug") if planted else (0, "no difference seen"))
    assert ("vllm is not lossless with served" in err) is bool(planted)


# The tests themselves.


def test_samples_of_one_distribution_are_rarely_told_apart_and_others_are() -> None:
    chance = random.Random(0)

    def sample(weights: Sequence[float], n: int) -> list[int]:
        return chance.choices(range(len(weights)), weights, k=n)

    even, shifted = [1.0] * 8, [1.6, 0.4] * 4
    alike = [homogeneity(sample(even, 300), sample(even, 200)).p_value for _ in range(200)]
    assert sum(p < 0.05 for p in alike) < 25
    apart = homogeneity(sample(even, 300), sample(shifted, 300))
    assert apart.p_value < 1e-6
    assert homogeneity([], [1]).p_value == 1
    assert homogeneity([1] * 50, [1] * 50).degrees == 0
    likely = [
        rank_test([chance.gauss(0, 1) for _ in range(40)], [chance.gauss(0, 1) for _ in range(40)]) for _ in alike
    ]
    assert sum(test.p_value < 0.05 for test in likely) < 25
    assert rank_test([chance.gauss(1, 1) for _ in range(80)], [chance.gauss(0, 1) for _ in range(80)]).p_value < 1e-4


def test_what_is_said_to_be_detected_is_detected() -> None:
    """Distributions that are so far apart are told apart about as often as that says."""
    chance, n, rate = random.Random(1), 400, 1e-3
    blank = homogeneity(chance.choices(range(4), k=n), chance.choices(range(4), k=n))
    delta = blank.detectable(rate, 0.95)
    weights = [0.25 + delta / 2, 0.25 + delta / 2, 0.25 - delta / 2, 0.25 - delta / 2]
    tried = [
        homogeneity(chance.choices(range(4), weights, k=n), chance.choices(range(4), k=n)).p_value < rate
        for _ in range(100)
    ]
    assert sum(tried) >= 88
    ranks = rank_test(*([chance.gauss(0, 1) for _ in range(100)] for _ in range(2)))
    assert 0.1 < ranks.detectable(rate, 0.95) < 0.3
    assert all(a.p_value >= b.p_value for a, b in pairwise([blank, blank + homogeneity([0] * 90, [1] * 90)]))
