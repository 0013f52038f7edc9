"""Parameters, random numbers, processed distributions, and what every verification mode promises row by row."""

from __future__ import annotations

import math

import pytest
import torch
from fixtures.engines.sampling_rounds import random_round
from fixtures.engines.sampling_statistics import batch, fit, processed
from fixtures.examples import examples
from fixtures.precision import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from draftkit.errors import DraftkitError
from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.drawing import draw
from draftkit.runtime.emitted import Drafted, Emitted, Verify
from draftkit.runtime.ops.distribution import distribution, probabilities, probability_of
from draftkit.runtime.ops.random import (
    CACHED,
    Entrants,
    Purpose,
    Stream,
    acceptance_stream,
    exponential,
    natural_log,
    philox,
    race,
    target_stream,
    uniform,
)
from draftkit.runtime.ops.sample import sample
from draftkit.runtime.verification import (
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

torch.set_num_threads(1)

LOSSLESS: dict[str, Verify] = {
    "greedy": verify_greedy,
    "rejection": verify_rejection,
    "coupled": verify_coupled,
    "block": verify_block,
}
RATIO_MODES = ("rejection", "block")


# Random numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # from Random123's kat_vectors, philox4x32 with 10 rounds
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    c0, c1, c2, c3 = torch.tensor(counter)
    k0, k1 = torch.tensor(key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == words


def one_row(seed: int = 3, position: int = 5, origin: int = 2, purpose: Purpose = Purpose.DRAFT) -> Stream:
    return Stream(torch.tensor(seed), torch.tensor(position), torch.tensor(origin), purpose)


def test_every_part_of_the_key_matters() -> None:
    streams = [
        one_row(), one_row(seed=4), one_row(seed=3 + 2**32), one_row(position=6), one_row(origin=3),
        one_row(purpose=Purpose.TARGET), one_row(purpose=Purpose.ACCEPT),
    ]  # fmt: skip
    noise = torch.stack([exponential(stream, 1000) for stream in streams])
    assert noise.flatten().unique().numel() > 0.999 * noise.numel()
    correlation = torch.corrcoef(noise) - torch.eye(len(streams))
    assert correlation.abs().max() < 0.15


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size() -> None:
    assert torch.equal(exponential(one_row(), 11), exponential(one_row(), 1000)[:11])


def test_noise_of_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """However many are made at a time."""
    size, positions = CACHED // 4, torch.arange(10).reshape(2, 5)
    noise = exponential(target_stream(torch.tensor([7, 8]), positions), size)
    assert noise.shape == (2, 5, size)
    for seed, row, position in ((7, 0, 3), (8, 1, 9)):
        alone = target_stream(torch.tensor([seed]), torch.tensor([position]))
        assert torch.equal(noise[row, position % 5], exponential(alone, size)[0])
    assert torch.equal(natural_log(noise)[1, 4], natural_log(noise[1, 4]))


def test_noise_has_its_distribution() -> None:
    count, bins = 400_000, 64
    race = exponential(one_row(), count).double()
    cells = (-torch.expm1(-race) * bins).long().clamp(max=bins - 1)
    assert fit(torch.bincount(cells, minlength=bins), torch.ones(bins)) > 1e-4
    # The smallest values decide: a million tokens' winner is among them.
    assert 0.1 < float(race.min()) * count < 10
    assert float(race.max()) < 23
    numbers = uniform(acceptance_stream(torch.arange(500), torch.arange(500), 400))
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    cells = (numbers.flatten() * bins).long()
    assert fit(torch.bincount(cells, minlength=bins), torch.ones(bins)) > 1e-4


@examples(200)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 11, 1_400, 5_003]),
    st.sampled_from([0.0, 1.0, 4.0, 30.0, 300.0]),
    st.sampled_from(["all", "few", "one", "none", "wrong"]),
    st.booleans(),
)
def test_a_race_is_won_by_the_token_that_has_won_it_among_all(
    seed: int, size: int, spread: float, kept: str, linear: bool
) -> None:
    """And by the same score, to the bit: whether it is over the logarithms of weights, or over weights."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, size, generator=generator) * spread
    share = {"all": 0.0, "few": 0.9, "one": 1.0, "none": 1.0, "wrong": 0.2}[kept]
    logits[torch.rand(logits.shape, generator=generator) < share] = math.nan if kept == "wrong" else -math.inf
    if kept == "one":
        logits[..., size // 2] = 1.0
    logs = logits - logits.nan_to_num(-math.inf).amax(-1, keepdim=True)
    weights = logs.exp()
    stream = target_stream(torch.tensor([seed, seed + 2**40]), torch.arange(6).reshape(2, 3))

    def score(tokens: Entrants, noise: torch.Tensor) -> torch.Tensor:
        return weights[tokens] / noise if linear else logs[tokens] - natural_log(noise)

    found = race(weights, stream, score).nan_to_num(-math.inf).max(-1)
    among_all = score(..., exponential(stream, size)).nan_to_num(-math.inf).max(-1)
    assert torch.equal(found.values, among_all.values)
    assert torch.equal(found.indices, among_all.indices)


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_a_race_makes_the_noise_of_few_tokens(temperature: float) -> None:
    made = []
    logs = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)) * 2 / temperature

    def score(tokens: Entrants, noise: torch.Tensor) -> torch.Tensor:
        made.append(noise.numel())
        return logs[tokens] - natural_log(noise)

    race(logs.exp(), target_stream(torch.arange(4), torch.zeros(4, dtype=torch.long)), score)
    assert sum(made) < 0.1 * logs.numel()


def test_the_logarithm_is_accurate() -> None:
    x = torch.cat((torch.logspace(-37, 38, 20_001), torch.linspace(0.5, 2, 20_001)))
    error = (natural_log(x).double() - x.double().log()).abs()
    assert (error <= 2e-7 * x.double().log().abs()).all()


# Parameters


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0}, {"temperature": 1e-9}, {"temperature": math.nan}, {"temperature": math.inf},
        {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": math.nan}, {"seed": -1},
        {"seed": 2**64},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DraftkitError, match=next(iter(wrong))):
        SamplingParameters(**wrong)  # type: ignore[arg-type]


def test_the_whole_seed_reaches_the_tensors() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1]
    column = SamplingTensors.of([SamplingParameters(seed=seed) for seed in seeds]).seed
    assert [seed % 2**64 for seed in column.tolist()] == seeds


def test_draft_sampling_policy() -> None:
    cold, warm = SamplingParameters(temperature=0.5, top_p=0.9, seed=4), SamplingParameters(temperature=0.75, seed=4)
    auto = DraftSampling()
    assert auto.parameters(cold) == SamplingParameters(temperature=0, top_p=0.9, seed=4)
    assert auto.parameters(warm) == warm
    assert auto.parameters(SamplingParameters()).temperature == 0
    assert DraftSampling("greedy").parameters(warm).temperature == 0
    assert DraftSampling("probabilistic").parameters(cold) == cold
    hotter = DraftSampling("probabilistic", temperature=1.2).parameters(cold)
    assert hotter == SamplingParameters(temperature=1.2, top_p=0.9, seed=4)


# Distributions

requests = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 7, 100]),
    top_p=st.sampled_from([1.0, 0.9137, 0.3371, 0.0119]),
    min_p=st.sampled_from([0.0, 0.0213, 0.4177, 1.0]),
)


@examples(150)
@given(
    st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([1, 5, 17, 200]), st.booleans()
)
def test_distributions_follow_the_definition(
    rows: list[SamplingParameters], seed: int, size: int, coarse: bool
) -> None:
    """Every cut alone and together, with ties and with forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 2, size, generator=generator) * 2
    if coarse:
        logits = logits.round()
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    logits[..., 0] = 0.5
    p = distribution(logits, SamplingTensors.of(rows))
    expected = torch.stack([torch.stack([processed(x, r) for x in pair]) for pair, r in zip(logits, rows, strict=True)])
    # A probability is as far off as its logit, which the temperature has divided.
    largest = max(float(logits[logits.isfinite()].abs().max()) / (rule.temperature or 1.0) for rule in rows)
    assert_close(probabilities(p), expected, depth=1, magnitude=max(largest, 1.0))
    tokens = torch.randint(0, size, (len(rows), 2), generator=generator)
    torch.testing.assert_close(probability_of(p, tokens), probabilities(p).gather(-1, tokens[..., None])[..., 0])


def test_small_temperatures_keep_their_precision() -> None:
    logits = torch.tensor([[[20.0, 19.999, 0.0]]])
    p = probabilities(distribution(logits, SamplingTensors.of([SamplingParameters(temperature=0.001)])))[0, 0]
    exact = (logits[0, 0].double() / 0.001).softmax(-1)
    torch.testing.assert_close(p.double(), exact, rtol=1e-5, atol=0)


def test_half_precision_logits_are_the_same_distribution() -> None:
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    rules = batch(SamplingParameters(temperature=0.8, top_p=0.7), 3)
    half, full = distribution(logits, rules), distribution(logits.float(), rules)
    assert torch.equal(probabilities(half), probabilities(full))
    stream = target_stream(rules.seed, torch.arange(6).view(3, 2))
    assert torch.equal(sample(half, stream), sample(full, stream))


def test_drawing_stores_what_it_drew_from_and_leaves_greedy_rows_alone() -> None:
    rules = SamplingTensors.of([SamplingParameters(temperature=0.9, top_k=5), SamplingParameters()])
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    probs = torch.full((2, 3, 12), math.nan)
    tokens = draw(logits, rules, torch.tensor([4, 4]), torch.tensor([3, 3]), probs=probs[:, 1])
    torch.testing.assert_close(probs[0, 1], probabilities(distribution(logits[:, None], rules))[0, 0])
    assert probs[:, ::2].isnan().all()
    assert probs[1].isnan().all()
    assert int(tokens[1]) == int(logits[1].argmax())
    assert float(probs[0, 1, tokens[0]]) > 0


# Verification


def texts(emitted: Emitted) -> list[list[int]]:
    return [row[:count] for row, count in zip(emitted.tokens.tolist(), emitted.counts.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", LOSSLESS)
def test_a_request_does_not_notice_its_batch(mode: str, seed: int) -> None:
    """Neither slot, neighbors, padding nor K: alone with just its own drafts it gets the same tokens."""
    whole = random_round(seed)
    emitted = whole.verify(LOSSLESS[mode])
    together = texts(emitted)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    shuffled = texts(whole.take(order, 4).verify(LOSSLESS[mode]))
    assert [shuffled[int(i)] for i in order.argsort()] == together
    for row, k in enumerate(whole.drafted.lengths.tolist()):
        alone = whole.take(torch.tensor([row]), k).verify(LOSSLESS[mode])
        assert texts(alone) == [together[row]]
        torch.testing.assert_close(alone.expected[0], emitted.expected[row, :k])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", LOSSLESS)
def test_nothing_invalid_reaches_an_output(mode: str, seed: int) -> None:
    whole = random_round(seed)
    clean, emitted = whole.verify(LOSSLESS[mode]), whole.poisoned().verify(LOSSLESS[mode])
    assert texts(emitted)[::2] == texts(clean)
    assert not any(texts(emitted)[1::2])
    assert int(emitted.tokens.min()) >= 0
    assert int(emitted.tokens.max()) < 33
    torch.testing.assert_close(emitted.expected[::2], pad(clean.expected, (0, 2)))
    assert not emitted.expected[1::2].any()


@pytest.mark.parametrize("mode", LOSSLESS)
def test_the_global_generator_is_neither_read_nor_moved(mode: str) -> None:
    verdicts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        verdicts.append(texts(random_round(0).verify(LOSSLESS[mode])))
        assert torch.equal(torch.get_rng_state(), before)
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("mode", LOSSLESS)
def test_greedy_tables(mode: str) -> None:
    """Golden rows worked out by hand, and every verification mode agrees on them."""
    drafted = Drafted.full(torch.tensor([[1, 2, 3]] * 3))
    best = torch.tensor([[1, 9, 3, 7], [1, 2, 3, 7], [4, 2, 3, 7]])
    logits = torch.nn.functional.one_hot(best, 10).float()
    logits[0, 0, 5] = 1.0  # a tie: the first token counts
    emitted = LOSSLESS[mode](drafted, logits, batch(SamplingParameters(), 3), torch.ones(3, dtype=torch.int64))
    assert texts(emitted) == [[1, 9], [1, 2, 3, 7], [4]]
    assert emitted.accepted.tolist() == [1, 3, 0]
    assert emitted.expected.tolist()[:2] == [[1, 0, 1], [1, 1, 1]] or mode == "block"


@pytest.mark.parametrize("mode", LOSSLESS)
def test_without_drafts_every_mode_is_plain_sampling(mode: str) -> None:
    rules = batch(SamplingParameters(temperature=0.0 if mode == "greedy" else 1.1, top_p=0.8), 500)
    logits = torch.randn(500, 1, 40, generator=torch.Generator().manual_seed(0))
    start = torch.arange(500)
    drafted = Drafted.full(torch.zeros(500, 0, dtype=torch.int64))
    plain = sample(distribution(logits, rules), target_stream(rules.seed, start[:, None]))
    assert torch.equal(LOSSLESS[mode](drafted, logits, rules, start).tokens, plain)


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_drawn_drafts_stand_as_often_as_expected_but_for_coupled_ones(mode: str) -> None:
    """Two distributions that are drawn from with the same noise agree less often than two that are coupled as well as
    can be.
    """
    count = 20_000
    rules = batch(SamplingParameters(temperature=1.0), count)
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(20, generator=generator).expand(count, 1, -1) for _ in range(2))
    start = torch.arange(count)
    probs = torch.empty(count, 1, 20)
    tokens = draw(draft[:, 0], rules, start, start, coupled=mode == "coupled", probs=probs[:, 0])[:, None]
    emitted = LOSSLESS[mode](Drafted.full(tokens, probs), target.repeat(1, 2, 1), rules, start)
    expected, accepted = float(emitted.expected.mean()), float(emitted.accepted.float().mean())
    sigma = (expected * (1 - expected) / count) ** 0.5
    if mode == "rejection":
        assert abs(accepted - expected) < 4 * sigma
    else:
        assert 0.8 * expected < accepted < expected - 4 * sigma


@pytest.mark.slow
@pytest.mark.parametrize("mode", RATIO_MODES)
def test_a_draft_like_the_target_always_stands(mode: str) -> None:
    rules = batch(SamplingParameters(temperature=0.9, top_k=30), 2000)
    logits = torch.randn(2000, 4, 200, generator=torch.Generator().manual_seed(0))
    start = torch.arange(2000) % 7
    probs = torch.empty(2000, 3, 200)
    tokens = torch.stack([draw(logits[:, i], rules, start + i, start, probs=probs[:, i]) for i in range(3)], dim=1)
    emitted = LOSSLESS[mode](Drafted.full(tokens, probs), logits, rules, start)
    assert (emitted.accepted == 3).all()
    torch.testing.assert_close(emitted.expected, torch.ones(2000, 3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("mode", RATIO_MODES)
def test_the_ends_of_the_uniform_range(mode: str, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that the target forbids never stands, even at u = 0; its only token always does, and q = p too."""
    monkeypatch.setattr(
        "draftkit.runtime.verification.uniform", lambda stream: torch.full(stream.positions.shape, number)
    )
    logits = torch.tensor([0.0, 1.0, -1.0, -2.0]).repeat(2, 2, 1)
    forbidden, only = SamplingParameters(temperature=1.0, top_k=3), SamplingParameters(temperature=1.0, top_k=1)
    rules, start = SamplingTensors.of([forbidden, only]), torch.tensor([1, 1])
    drafted = Drafted.full(torch.tensor([[3], [1]]))
    for probs in (None, torch.tensor([[[0.0, 0.0, 0.0, 1.0]], [[0.0, 1.0, 0.0, 0.0]]])):
        rows = drafted._replace(probs=probs, one_hot=torch.full((2,), probs is None))
        emitted = LOSSLESS[mode](rows, logits, rules, start)
        assert emitted.accepted.tolist() == [0, 1]
        assert int(emitted.tokens[0, 0]) != 3


def test_a_rejected_one_hot_draft_is_never_recovered() -> None:
    rules = batch(SamplingParameters(temperature=1.0), 5000)
    logits = torch.tensor([2.0, 1.0, 0.0]).repeat(5000, 2, 1)
    drafted = Drafted.full(torch.zeros(5000, 1, dtype=torch.int64))
    emitted = verify_rejection(drafted, logits, rules, torch.ones(5000, dtype=torch.int64))
    rejected = emitted.accepted == 0
    assert 1000 < int(rejected.sum()) < 4000
    assert (emitted.tokens[rejected, 0] != 0).all()


def test_block_verification_of_one_draft_is_rejection() -> None:
    whole = random_round(3, rows=600, k=1)
    one, other = whole.verify(verify_rejection), whole.verify(verify_block)
    assert texts(one) == texts(other)


def test_one_hot_rows_need_no_probabilities() -> None:
    whole = random_round(1, rows=60)
    chosen = whole.drafted._replace(one_hot=torch.ones(60, dtype=torch.bool))
    for mode in RATIO_MODES:
        with_probs = LOSSLESS[mode](chosen, whole.logits, whole.parameters, whole.start)
        without = LOSSLESS[mode](chosen._replace(probs=None), whole.logits, whole.parameters, whole.start)
        assert torch.equal(with_probs.tokens, without.tokens)
        assert torch.equal(with_probs.expected, without.expected)
