"""The Triton kernels of sampling agree with their torch references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fixtures.engines.sampling_rounds import Round, random_round
from fixtures.examples import examples
from fixtures.gpu.kernels import DEVICE, NATIVE, references_only
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftkit.requests import SamplingParameters
from draftkit.runtime import verification
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.drawing import draw
from draftkit.runtime.ops import random, residual_mass, sample
from draftkit.runtime.ops import row_statistics as statistics
from draftkit.runtime.ops.distribution import Distribution, distribution, probabilities
from draftkit.runtime.ops.random import Purpose, Stream, acceptance_stream, target_stream
from draftkit.runtime.ops.row_peaks import best_token
from draftkit.runtime.verification import (
    verify_block,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

pytest.importorskip("triton")
import triton
import triton.language as tl

torch.set_num_threads(1)

SIZES = (5, 33, 1030)  # the last takes two blocks of noise


def moved(value: Any, device: str) -> Any:
    """Tensors on `device`, inside tuples and rounds too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Round):
        return Round(*(moved(part, device) for part in vars(value).values()))
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def with_kernels(function: Callable[..., Any], *arguments: Any) -> Any:
    return moved(function(*(moved(argument, DEVICE) for argument in arguments)), "cpu")


def reference(function: Callable[..., Any], *arguments: Any) -> Any:
    """The same with the torch references."""
    with references_only():
        return function(*(moved(argument, "cpu") for argument in arguments))


def a_round(seed: int, **shape: int) -> Round:
    return reference(partial(random_round, seed, **shape))


@pytest.mark.interpreter
def test_noise_is_equal_bit_for_bit() -> None:
    @triton.jit
    def store_noise(race, gumbel, seed, position, origin, purpose, COUNTERS: tl.constexpr):  # type: ignore[no-untyped-def]
        counters = tl.arange(0, COUNTERS)
        drawn = random.kernel_exponential(seed, position, origin, purpose, counters)
        token = counters[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(race + token, drawn)
        tl.store(gumbel + token, -random.kernel_log(drawn))

    seed, counters = -(2**40) - 5, 1 << 14
    race, gumbel = (torch.empty(4 * counters, device=DEVICE) for _ in range(2))
    store_noise[(1,)](race, gumbel, seed, 2**31 + 7, 3, 1, counters, enable_fp_fusion=False)
    row = Stream(torch.tensor(seed), torch.tensor(2**31 + 7), torch.tensor(3), Purpose.DRAFT)
    assert torch.equal(race.cpu(), random.exponential(row, 4 * counters))
    assert torch.equal(gumbel.cpu(), -random.natural_log(random.exponential(row, 4 * counters)))


@pytest.mark.interpreter
def test_uniform_numbers_are_equal_bit_for_bit() -> None:
    stream = acceptance_stream(torch.arange(60) * 2**33 - 5, torch.arange(60), 7)
    assert torch.equal(with_kernels(random.uniform, stream), random.uniform_by_torch(stream))


cuts = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.01, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 8, 2000, 10**6]),
    top_p=st.sampled_from([1.0, 0.9137, 0.3371, 0.0119]),
    min_p=st.sampled_from([0.0, 0.0213, 0.4177, 1.0]),
)


@pytest.mark.long
@pytest.mark.interpreter
@examples(300 if NATIVE else 30)
@given(
    st.lists(cuts, min_size=1, max_size=3), st.integers(0, 2**32), st.sampled_from([1, 5, 33, 2100]), st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_statistics(rows: list[SamplingParameters], seed: int, size: int, coarse: bool, dtype: torch.dtype) -> None:
    """Every cut, with ties, forbidden tokens and NaN."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 1, size, generator=generator) * 2
    if coarse:
        logits = logits.round()
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = torch.nan
    logits[..., 0] = 0.5
    logits, parameters = logits.to(dtype), SamplingTensors.of(rows)
    kernel = with_kernels(statistics.row_statistics, logits, parameters)
    expected = reference(statistics.row_statistics, logits, parameters)
    assert torch.equal(kernel.peak, expected.peak)
    assert torch.equal(kernel.best, expected.best)
    probs = [probabilities(Distribution(logits, parameters.scale, *found)) for found in (kernel, expected)]
    torch.testing.assert_close(*probs, atol=1e-6, rtol=1e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 4097])
def test_the_best_token_and_whether_its_logit_is_a_number(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(8, size, generator=torch.Generator().manual_seed(0)).round().to(dtype)  # with ties
    logits[1, 1:] = logits[2] = -torch.inf
    logits[3, 3] = torch.nan
    logits[4, 4] = torch.inf
    logits[5, -1] = 9
    for ids in (None, torch.arange(size).flip(0) * 3):
        expected = reference(best_token, logits, ids)
        token, finite = with_kernels(best_token, logits, ids)
        assert finite.tolist() == expected[1].tolist() == [True, True, False, False, False, True, True, True]
        sound = torch.tensor([0, 1, 4, 5, 6, 7])
        assert torch.equal(token[sound], expected[0][sound])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_samples_are_equal_and_their_probabilities_close(size: int, dtype: torch.dtype) -> None:
    whole = a_round(1, rows=4, k=2, size=size)
    positions = whole.start[:, None] + torch.arange(2)
    p = reference(distribution, whole.logits[:, :2].to(dtype), whole.parameters)
    stream = target_stream(whole.parameters.seed, positions)
    assert torch.equal(with_kernels(sample.sample, p, stream), reference(sample.sample, p, stream))

    def stored(logits: Tensor, parameters: SamplingTensors, start: Tensor) -> tuple[Tensor, Tensor]:
        probs = torch.full((len(logits), 3, size), torch.nan, device=logits.device)
        return draw(logits, parameters, start + 1, start, probs=probs[:, 1]), probs

    arguments = stored, whole.logits[:, 2].to(dtype), whole.parameters, whole.start
    (tokens, probs), (expected_tokens, expected_probs) = with_kernels(*arguments), reference(*arguments)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(probs, expected_probs, equal_nan=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_acceptance_and_recovery(size: int, probabilistic: bool) -> None:
    """Ragged, inactive and poisoned rows, with and without draft probabilities."""
    whole = a_round(0, rows=4, k=3, size=size).poisoned()
    drafted, seeds = whole.drafted, whole.parameters.seed
    if not probabilistic:
        drafted = drafted._replace(probs=None, one_hot=torch.ones_like(drafted.one_hot))
    p = reference(distribution, whole.logits, whole.parameters)
    arguments = verification.accept_drafts, drafted, p, acceptance_stream(seeds, whole.start, 5)
    kernel, expected = with_kernels(*arguments), reference(*arguments)
    assert torch.equal(kernel.counts, expected.counts)
    torch.testing.assert_close(kernel.target_probs, expected.target_probs)
    # Most rows reject, whatever the uniform numbers said.
    counts = (drafted.lengths - torch.tensor([1, 1, 1, 0]).repeat(2)).clamp(min=0)
    weights = torch.tensor([1.0, 0.3]).repeat_interleave(4)
    recovery = verification.recover_token, drafted, p, counts, weights, target_stream(seeds, whole.start + counts)
    token, expected_token = with_kernels(*recovery), reference(*recovery)
    assert torch.equal(token[drafted.active], expected_token[drafted.active])
    assert ((token >= 0) & (token < size)).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("size", [5, 33, 4100])
def test_residual_mass(size: int) -> None:
    whole = a_round(2, rows=3, k=2, size=size).poisoned()
    wanted = whole.drafted.valid & ~whole.drafted.one_hot[:, None]
    weights = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(0))
    p = reference(distribution, whole.logits, whole.parameters)
    arguments = residual_mass.residual_mass, whole.drafted.probs, p, weights, wanted
    kernel = with_kernels(*arguments)
    torch.testing.assert_close(kernel, reference(*arguments), atol=1e-6, rtol=1e-5)
    assert not kernel[~wanted].any()


@pytest.mark.interpreter
@pytest.mark.parametrize("k", [1, 2, 5])
def test_matches(k: int) -> None:
    drafted = a_round(4, rows=12, k=k, size=2).drafted
    chosen = torch.randint(0, 2, (12, k + 1), generator=torch.Generator().manual_seed(k))
    chosen[:6, :k] = drafted.tokens[:6]
    kernel = with_kernels(verification.count_matches, drafted, chosen)
    assert torch.equal(kernel, reference(verification.count_matches, drafted, chosen))
    assert torch.equal(kernel[:6], drafted.lengths[:6])


@pytest.mark.interpreter
@pytest.mark.parametrize("verify", [verify_greedy, verify_rejection, verify_coupled, verify_block])
def test_whole_verdicts_with_poison_around(verify: Any) -> None:
    """Memory around the inputs would win every draw if it were read."""

    def verified(whole: Round) -> Any:
        return whole.verify(verify)

    whole = a_round(0, rows=5, k=2)
    probs, tokens = whole.drafted.probs, whole.drafted.tokens
    drafted = whole.drafted._replace(probs=guarded(probs, -1e30), tokens=guarded(tokens, 2))
    kernel = with_kernels(verified, replace(whole, logits=guarded(whole.logits, 1e30), drafted=drafted))
    expected = reference(verified, whole)
    assert torch.equal(kernel.tokens, expected.tokens)
    assert torch.equal(kernel.counts, expected.counts)
    torch.testing.assert_close(kernel.expected, expected.expected, atol=1e-5, rtol=1e-5)


def guarded(tensor: Tensor | None, poison: float) -> Tensor:
    """The same values inside a larger piece of memory full of `poison`."""
    assert tensor is not None
    guard = torch.full((5000,), poison, dtype=tensor.dtype)
    return torch.cat((guard, tensor.flatten(), guard))[5000:-5000].view(tensor.shape)
