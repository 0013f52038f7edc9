"""The output of every lossless mode has exactly the target's distribution, whatever the draft; and these tests would
notice.

Each fit is a G-test of 1.5 × 10⁵ draws, three tokens of 50,000 texts over several rounds, against the exact
distribution. Seeds are fixed, so a pass stays a pass; had they not been, all fits together would raise a false alarm
once in a thousand runs (Bonferroni). A broken rule must miss the same limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from fixtures.engines.sampling_statistics import Bigrams, Texts, batch, fit, generate, text_fit
from torch import Tensor

from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.emitted import Drafted, Emitted, Verify
from draftkit.runtime.ops.random import Stream, acceptance_stream, draft_stream
from draftkit.runtime.verification import recover_token, verify_block, verify_coupled, verify_rejection

torch.set_num_threads(1)

TEXTS = 50_000
LENGTH = 3
K = 2
FALSE_ALARM_RATE = 1e-3
FITS = 200  # more than there are in this file
LIMIT = FALSE_ALARM_RATE / FITS
NOTICED = 1e-12  # what a planted bug must stay below


@dataclass(frozen=True)
class Case:
    """Random logits with standard deviation `spread`, the draft's off by `noise`, and what the requests ask for."""

    spread: float = 1.5
    noise: float = 1.0
    size: int = 4
    request: SamplingParameters = field(default_factory=lambda: SamplingParameters(temperature=1.0))
    draft_temperature: float | None = None
    change: Callable[[Tensor, Tensor], None] | None = None

    def model(self) -> Bigrams:
        generator = torch.Generator().manual_seed(7)
        target = torch.randn(self.size, self.size, generator=generator) * self.spread
        draft = target + torch.randn(self.size, self.size, generator=generator) * self.noise
        if self.change is not None:
            self.change(target, draft)
        return Bigrams(target, draft)

    def draft_rows(self, mode: str, texts: int = TEXTS) -> SamplingTensors:
        return batch(DraftSampling(mode, temperature=self.draft_temperature).parameters(self.request), texts)  # type: ignore[arg-type]


def disjoint(target: Tensor, draft: Tensor) -> None:
    target[:, ::2], draft[:, 1::2] = -math.inf, -math.inf


def reduced_vocabulary(target: Tensor, draft: Tensor) -> None:
    draft[:, 1] = -math.inf


def tied(target: Tensor, draft: Tensor) -> None:
    target[:, :3], draft[:, 1:] = 0.5, 0.25


def hot(temperature: float, **cuts: float) -> SamplingParameters:
    return SamplingParameters(temperature=temperature, **cuts)  # type: ignore[arg-type]


CASES = {
    "cold": Case(request=hot(0.3)),
    "warm": Case(request=hot(0.7)),
    "plain": Case(),
    "hot": Case(request=hot(2.0)),
    "seven tokens": Case(size=7),
    "equal": Case(noise=0.0),
    "disjoint": Case(change=disjoint),
    "uniform target": Case(spread=0.0),
    "sharp draft": Case(noise=6.0),
    "reduced vocabulary": Case(change=reduced_vocabulary),
    "ties": Case(change=tied, request=hot(1.0, top_k=2)),
    "top-k": Case(request=hot(1.0, top_k=3), size=6),
    "top-p": Case(request=hot(1.5, top_p=0.8), size=6),
    "min-p": Case(request=hot(1.0, min_p=0.15), size=6),
    "all cuts": Case(request=hot(1.3, top_k=4, top_p=0.9, min_p=0.05), size=6),
    "hotter draft": Case(draft_temperature=1.7),
    "colder draft": Case(draft_temperature=0.5),
    "greedy target": Case(request=SamplingParameters(), draft_temperature=1.0),
}
RATIO_MODES = {"rejection": verify_rejection, "block": verify_block}


def run(case: Case, verify: Verify, draft: SamplingTensors, **options: object) -> Texts:
    rules = batch(case.request, len(draft.seed))
    return generate(case.model(), verify, rules, draft, k=K, length=LENGTH, **options)  # type: ignore[arg-type]


def p_value(case: Case, texts: Tensor) -> float:
    return text_fit(texts, case.model().distribution(case.request, texts.shape[1]), case.size)


@pytest.mark.slow
@pytest.mark.few(9)
@pytest.mark.parametrize("mode", RATIO_MODES)
@pytest.mark.parametrize("name", CASES)
def test_drawn_drafts_leave_the_targets_distribution(name: str, mode: str) -> None:
    case = CASES[name]
    texts = run(case, RATIO_MODES[mode], case.draft_rows("probabilistic"))
    assert p_value(case, texts.tokens) > LIMIT
    assert_as_expected(texts)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("mode", RATIO_MODES)
@pytest.mark.parametrize("name", ["plain", "ties", "all cuts", "greedy target"])
def test_mixed_batches_leave_the_targets_distribution(name: str, mode: str) -> None:
    """Greedy and drawn drafts in turn, with 0, 1 or 2 drafts in a row, in one batch; a fit for each of the two."""
    case = CASES[name]
    draft = case.draft_rows("probabilistic", 2 * TEXTS)
    row = torch.arange(2 * TEXTS)
    draft.scale[::2] = 0
    texts = run(case, RATIO_MODES[mode], draft, lengths=row // 2 % (K + 1))
    assert_as_expected(texts)
    for part in (texts.tokens[::2], texts.tokens[1::2]):
        assert p_value(case, part) > LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "seven tokens", "all cuts", "hotter draft"])
def test_coupled_output_is_that_of_no_draft_and_has_the_targets_distribution(name: str) -> None:
    case, few = CASES[name], torch.arange(TEXTS // 10)
    rules = batch(case.request, TEXTS)
    alone = generate(case.model(), verify_coupled, rules, rules, k=0, length=LENGTH).tokens
    assert p_value(case, alone) > LIMIT
    for mode, noise, k in (("probabilistic", 1.0, 2), ("greedy", 1.0, 3), ("probabilistic", 9.0, 5)):
        model, draft = replace(case, noise=noise).model(), case.draft_rows(mode).take(few)
        texts = generate(model, verify_coupled, rules.take(few), draft, k=k, length=LENGTH, coupled=True)
        assert torch.equal(texts.tokens, alone[few])
        assert float(texts.accepted.sum()) > 0.2 * float(texts.reached.sum())


def test_block_verification_accepts_more_than_rejection() -> None:
    case = Case(noise=3.0)
    rejection, block = (run(case, verify, case.draft_rows("probabilistic")) for verify in RATIO_MODES.values())
    assert block.accepted.sum() / block.reached[0] > 1.01 * rejection.accepted.sum() / rejection.reached[0]


def assert_as_expected(texts: Texts) -> None:
    """Measured acceptance agrees with the expected one, position by position, within five standard deviations."""
    deviation = (texts.accepted - texts.expected).abs()
    spread = (texts.expected * (1 - texts.expected / texts.reached.clamp(min=1))).clamp(min=0).sqrt()
    assert (deviation <= 5 * spread + 1).all()


# Rules with a planted bug, each of which the tests above must notice.


def wrong_draft_temperature(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
    assert drafted.probs is not None
    flatter = drafted.probs.pow(0.9)
    drafted = drafted._replace(probs=flatter / flatter.sum(-1, keepdim=True))
    return verify_rejection(drafted, logits, parameters, start)


def with_recovery(bug: Callable[[Drafted], Drafted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `rejection` recover tokens from other drafts than those that it judged."""
    name = "draftkit.runtime.verification.recover_token"
    monkeypatch.setattr(name, lambda drafted, *rest: recover_token(bug(drafted), *rest))


def test_a_wrong_draft_probability_is_noticed() -> None:
    case = CASES["plain"]
    assert p_value(case, run(case, wrong_draft_temperature, case.draft_rows("probabilistic")).tokens) < NOTICED


def test_recovering_from_the_target_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_recovery(lambda drafted: drafted._replace(active=torch.zeros_like(drafted.active)), monkeypatch)
    case = CASES["plain"]
    assert p_value(case, run(case, verify_rejection, case.draft_rows("probabilistic")).tokens) < NOTICED


def test_recovering_without_the_draft_token_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_recovery(lambda drafted: drafted._replace(one_hot=torch.ones_like(drafted.active)), monkeypatch)
    case = CASES["plain"]
    assert p_value(case, run(case, verify_rejection, case.draft_rows("probabilistic")).tokens) < NOTICED


def test_one_noise_for_draft_and_recovered_token_is_noticed() -> None:
    case = CASES["uniform target"]
    texts = run(case, verify_rejection, case.draft_rows("probabilistic"), coupled=True)
    assert p_value(case, texts.tokens) < NOTICED


def test_block_verification_with_noise_of_the_last_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by position alone is met again after a block that stopped short of it."""

    def by_position(stream: Stream) -> Stream:
        return stream._replace(origins=torch.zeros_like(stream.origins))

    block = "draftkit.runtime.verification"
    monkeypatch.setattr("draftkit.runtime.drawing.draft_stream", lambda *key: by_position(draft_stream(*key)))
    monkeypatch.setattr(f"{block}.acceptance_stream", lambda *key: by_position(acceptance_stream(*key)))
    case = CASES["plain"]
    assert p_value(case, run(case, verify_block, case.draft_rows("probabilistic")).tokens) < NOTICED


def test_a_length_that_depends_on_the_drawn_token_is_noticed() -> None:
    """Stopping a draft at a token, and dropping it, is not lossless: `Drafted` forbids it."""

    def dropping(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
        lengths = torch.where(drafted.tokens[:, 0] == 1, 0, K)
        return verify_rejection(drafted._replace(lengths=lengths), logits, parameters, start)

    case = CASES["plain"]
    assert p_value(case, run(case, dropping, case.draft_rows("probabilistic")).tokens) < NOTICED


def test_the_fit_itself_raises_few_false_alarms_and_sees_small_shifts() -> None:
    generator = torch.Generator().manual_seed(0)
    distribution = torch.rand(40, dtype=torch.float64, generator=generator)
    distribution /= distribution.sum()

    def values(true_distribution: Tensor) -> Tensor:
        draws = torch.multinomial(true_distribution, 200 * 10_000, replacement=True, generator=generator).view(200, -1)
        return torch.tensor([fit(torch.bincount(row, minlength=40), distribution) for row in draws])

    alarms = values(distribution)
    assert 0.02 < float((alarms < 0.05).float().mean()) < 0.1
    assert 0.4 < float(alarms.median()) < 0.6
    shifted = distribution.clone()
    shifted[:20] *= 1.2
    assert (values(shifted) < 0.05).float().mean() > 0.99
    impossible = distribution.clone()
    impossible[3] = 0
    assert fit(torch.ones(40), impossible) == 0
