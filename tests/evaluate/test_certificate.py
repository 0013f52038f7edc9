"""The certificate: clean where an engine is lossless, and each planted bug is named; seen from outside, and draftkit's
own."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from conftest import Command
from fixtures.servers.speaking import Dialect, Question, SpeakingServer, Spoken
from lossless.planted import plant_acceptance, plant_cache_off_by_one
from rich.console import Console

from draftkit.engines.records import Answer
from draftkit.evaluate.certificate import Certificate, certify_draft, compared
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.measure import Lane, Run
from draftkit.report.terminal.engines import certificate
from draftkit.requests import Request
from draftkit.results.settings import Settings

V = 12  # tokens of the language below
K = 3
REQUESTS = [Request(str(n), (n, 5, 2 * n % V), 24) for n in range(6)]
Law = Callable[[Sequence[int]], list[float]]


def law(context: Sequence[int]) -> list[float]:
    """The logits of what follows: a language without a model, in which the two last tokens count."""
    a, b = context[-2], context[-1]
    return [2.5 * math.cos(1 + 3 * a + 7 * b + token * (a + 2)) for token in range(V)]


def logprobs(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def best(context: Sequence[int], of: Law = law) -> int:
    logits = of(context)
    return max(range(V), key=logits.__getitem__)


def speaking(drafted: Law | None = None, planted: str = "") -> Callable[[Question], Spoken]:
    """An engine of the language; with a draft of a law of its own, it drafts K tokens, and accepts what it would have
    taken itself (which is lossless), unless a bug is planted."""

    def speak(asked: Question) -> Spoken:
        chance = random.Random(f"{asked.prompt}")
        tokens: list[int] = []
        chunks: list[list[int]] = []
        while len(tokens) < asked.max_tokens:
            chunk: list[int] = []
            for step in range(1 if drafted is None or not chunks else K + 1):
                context = [*asked.prompt, *tokens, *chunk]
                if planted == "cache" and chunks and len(tokens) > 6:
                    context = [*context[:-2], context[-1], context[-1]]  # reads what lies one entry too early
                own = best(context)
                if drafted is None or step == K or not chunks:
                    chunk.append(own)
                    break
                proposed = best(context, drafted)
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


def rougher(context: Sequence[int]) -> list[float]:
    """A draft's law, which often has another best token."""
    return [value + math.cos(5 * token + context[-1]) for token, value in enumerate(law(context))]


def lane(speak: Callable[[Question], Spoken]) -> Lane:
    def run(requests: Sequence[Request]) -> Run:
        answers = []
        for request in requests:
            asked = Question(request.prompt, request.max_new_tokens, 0.0, 1.0, 0, 0)
            spoken = speak(asked)
            own = tuple(row[token] for row, token in zip(spoken.logprobs, spoken.tokens, strict=True))
            answers.append(Answer(tuple(spoken.tokens), None, None, logprobs=own, alternatives=tuple(spoken.logprobs)))
        return Run(tuple(answers), 1.0, None, None)

    return run


def judged(plain: Lane, drafting: Lane) -> Certificate:
    names = ("target", "draft", "engine")
    return compared(REQUESTS, plain(REQUESTS), drafting(REQUESTS), names=names, concurrency=1)


def certified(planted: str = "") -> Certificate:
    return judged(lane(speaking()), lane(speaking(rougher, planted)))


def rendered(found: Certificate) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(certificate(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_lossless_engine_is_not_accused() -> None:
    found = certified()
    assert (found.verdict, found.failures, found.divergences) == ("no difference seen", (), ())
    assert found.tokens == 24 * len(REQUESTS)
    assert found.detectable_rate == pytest.approx(1 - 0.05 ** (1 / found.tokens))


@pytest.mark.parametrize(("planted", "after"), [("takes drafts for granted", 0), ("cache", 6)])
def test_a_planted_bug_is_found(planted: str, after: int) -> None:
    found = certified(planted)
    assert found.verdict == "bug"
    assert found.first_bug is not None
    assert found.first_bug.position > after  # the prefill has no draft: what precedes it is never accused
    assert found.first_bug.logprobs is not None
    assert found.failures == (f"request {found.first_bug.request}, position {found.first_bug.position}: no near-tie",)
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


def own(draft: str = "zoo:eagle3", asked: Settings = OWN) -> Certificate:
    (found,) = certify_draft("zoo:target", draft, asked, engines=[OwnEngine()])
    return found


@pytest.mark.slow
def test_draftkit_s_own_engine_is_certified_as_any_other() -> None:
    found = own()
    assert (found.verdict, found.engine, found.requests) == ("no difference seen", "draftkit", 5), found.failures
    assert (found.reference.name, found.reference.requests) == ("transformers' generate", 5)
    assert found.floor is not None
    assert 0 < found.floor < 1e-3  # what rounding can do in float32
    assert found.moved is None
    text = rendered(found)
    assert "Losslessness of zoo:eagle3 on zoo:target in draftkit: no difference seen" in text
    assert "5 of 5 = transformers' generate" in text
    assert "what rounding can do at most" in text
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
    found = own("ngram", replace(OWN, limit=6))
    assert found.verdict == "bug"
    assert found.divergences == ()
    assert any("not as transformers' generate" in failure for failure in found.failures)


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
            SpeakingServer(dialect, speaking(rougher, planted), K) as drafting,
            SpeakingServer(dialect, speaking()) as plain,
        ):
            ran = draftkit(
                "certify", "--server", drafting.url, "--server-baseline", plain.url, "--target", "zoo:target",
                "--limit", "2", "--max-new-tokens", "8", "--concurrency", "8", "--json",
            )  # fmt: skip
            return ran.code, json.loads(ran.out)["certificates"][0], ran.err

    code, found, err = run()
    assert found["engine"] == dialect
    assert (code, found["verdict"]) == ((3, "bug") if planted else (0, "no difference seen"))
    assert ("vllm is not lossless with served" in err) is bool(planted)
