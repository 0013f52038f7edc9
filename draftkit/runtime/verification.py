"""Verification: which draft tokens stand, and which token the target adds.

Speculative sampling as in Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318,
algorithm 2): with p the target's distribution and q the draft's, draft token d stands with probability min(1, p(d) /
q(d)); at the first that does not, the target's token is drawn from max(p − q, 0), normalized, and after the last one
from p. Temperature 0 is its limit, and a draft that was chosen without chance its case q = 1.

This page is the whole rule in plain torch. Its steps `accept_drafts`, `recover_token` and `count_matches` also exist as
fused kernels (`ops.fused_verification`), which run on a GPU. B requests, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.emitted import Drafted, Emitted, emit, emit_chosen
from draftkit.runtime.ops import fused_verification as fused
from draftkit.runtime.ops.backend import uses_triton
from draftkit.runtime.ops.distribution import Distribution, distribution, log_weights, probability_of
from draftkit.runtime.ops.random import Entrants, Stream, acceptance_stream, natural_log, race, target_stream, uniform
from draftkit.runtime.ops.residual_mass import residual_mass
from draftkit.runtime.ops.sample import sample


class Accepted(NamedTuple):
    """`counts` int64 [B]: leading drafts that stand. `target_probs` float32 [B, K]: the target's probability of each
    draft, 0 in padding.
    """

    counts: Tensor
    target_probs: Tensor


def verify_rejection(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
    """`emitted.Verify` by speculative sampling, the default mode: the output has exactly the target's distribution.

    `expected` is Σ_v min(p, q), and p of the draft token where one-hot.
    """
    p = distribution(logits, parameters)
    uniforms = acceptance_stream(parameters.seed, start, drafted.tokens.shape[1])
    accepted, p_drafted = accept_drafts(drafted, p, uniforms)
    noise = target_stream(parameters.seed, start + accepted)
    token = recover_token(drafted, p, accepted, torch.ones_like(parameters.scale), noise)
    return emit(drafted, accepted, token, expected_acceptance(drafted, p, p_drafted))


def accept_drafts(drafted: Drafted, p: Distribution, stream: Stream) -> Accepted:
    """Accept draft d while u·q(d) < p(d), with the uniform numbers u of `stream` [B, K].

    `p` [B, K+1]; q is 1 in one-hot rows. The inequality is strict: p(d) = 0 never stands, even at u = 0, and p = q
    always does, because u < 1. A greedy target accepts its own argmax only.
    """
    if uses_triton(p.logits) and drafted.tokens.numel():
        return Accepted(*fused.accept_drafts(drafted, p, stream))
    p_drafted = target_probs(drafted, p)
    stands = (uniform(stream) * draft_probs(drafted) < p_drafted) & drafted.valid
    return Accepted(_leading(stands), p_drafted)


def recover_token(drafted: Drafted, p: Distribution, accepted: Tensor, weights: Tensor, stream: Stream) -> Tensor:
    """Draw the token after `accepted` int64 [B] drafts with the noise of `stream` [B]: int64 [B].

    Row `accepted` of `p` [B, K+1] decides. After all drafts: drawn from p, by the same arithmetic as `sample`. At a
    rejected draft d: from p without d where the draft is one-hot, else in proportion to max(w·p − q, 0) with `weights`
    w float32 [B], 1 but for block verification; where rounding leaves nothing of that, p's most likely token.
    """
    rejected = drafted.active & (accepted < drafted.lengths)
    if uses_triton(p.logits) and accepted.numel():
        top, token = fused.recover_token(drafted, rejected, p, accepted, weights, stream)
    else:
        top, token = _scores(drafted, rejected, p.row(accepted), accepted, weights, stream).max(-1)
    empty = rejected & ~drafted.one_hot & (top <= 0)
    return torch.where((p.scale == 0) | empty, p.best.gather(1, accepted[:, None])[:, 0], token)


def _scores(
    drafted: Drafted, rejected: Tensor, p: Distribution, accepted: Tensor, weights: Tensor, stream: Stream
) -> Tensor:
    """A race of exponential clocks, the most of p or of its residual over noise wins: float32 [B, V]. `p` [B, 1]."""
    log_p = log_weights(p)[:, 0]
    weight = (log_p - p.log_sum).exp()
    by_residual = (rejected & ~drafted.one_hot)[:, None].expand_as(log_p)
    if drafted.tokens.shape[1]:
        index = accepted.clamp(max=drafted.tokens.shape[1] - 1)[:, None]
        excluded = torch.where(rejected & drafted.one_hot, drafted.tokens.gather(1, index)[:, 0], -1)
        left_out = torch.arange(log_p.shape[1], device=log_p.device) == excluded[:, None]
        if drafted.probs is not None:
            q = drafted.probs.take_along_dim(index[..., None], 1)[:, 0]
            weight = torch.where(by_residual, (weights[:, None] * weight - q).clamp(min=0), weight)
        log_p, weight = log_p.masked_fill(left_out, -torch.inf), weight.masked_fill(left_out, 0)

    def score(tokens: Entrants, noise: Tensor) -> Tensor:
        of_p = log_p[tokens] - natural_log(noise)
        return of_p if drafted.probs is None else torch.where(by_residual[tokens], weight[tokens] / noise, of_p)

    return race(weight, stream, score).nan_to_num(-torch.inf)


def verify_greedy(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
    """`emitted.Verify` for batches of greedy requests; the cheapest, and what `rejection` and `coupled` come to there.

    `parameters` and `start` play no part. `expected` is 1 where the draft token is the target's, else 0.
    """
    best = logits.max(-1).indices  # as argmax, which is six times as slow for bfloat16 on a CPU
    agrees = (drafted.tokens == best[:, :-1]) & drafted.valid
    return emit_chosen(drafted, count_matches(drafted, best), best, agrees.float())


def verify_coupled(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
    """`emitted.Verify` by shared noise: the output is the same with any draft, and with none (Daliri, Musco and Suresh
    2024, arXiv 2408.07978).

    The target draws every position with its own noise, as it would alone, and a draft stands where it is the same
    token. A draft that was drawn with that noise too (`drawing.draw`) agrees with probability (1 − TV) / (1 + TV) or
    more, where TV is the total variation distance of p and q. `expected` is exact in one-hot rows; for drafts drawn
    from `probs` it is what `rejection` would accept, Σ min(p, q): a few points more than this mode does.
    """
    p = distribution(logits, parameters)
    positions = start[:, None] + torch.arange(logits.shape[1], device=logits.device)
    chosen = sample(p, target_stream(parameters.seed, positions))
    expected = expected_acceptance(drafted, p, target_probs(drafted, p))
    return emit_chosen(drafted, count_matches(drafted, chosen), chosen, expected)


def count_matches(drafted: Drafted, chosen: Tensor) -> Tensor:
    """The length of the longest prefix of each row's drafts that equals `chosen` int64 [B, K+1]: int64 [B]."""
    if uses_triton(chosen) and drafted.tokens.numel():
        return fused.count_matches(drafted, chosen)
    return _leading((drafted.tokens == chosen[:, :-1]) & drafted.valid)


def _leading(passes: Tensor) -> Tensor:
    """How many leading entries of each row of bool [B, K] hold: int64 [B]."""
    return passes.long().cumprod(-1).sum(-1)


def target_probs(drafted: Drafted, p: Distribution) -> Tensor:
    """The target's probability of each draft token, 0 in padding: float32 [B, K]."""
    valid = drafted.valid
    tokens = torch.where(valid, drafted.tokens, 0)
    of_drafts = Distribution(p.logits[:, :-1], p.scale, *(column[:, :-1] for column in p.statistics))
    return torch.where(valid, probability_of(of_drafts, tokens), 0)


def draft_probs(drafted: Drafted) -> Tensor:
    """The probability with which each draft token was drawn, 1 where it was chosen: float32 [B, K]."""
    drawn = drafted.valid & ~drafted.one_hot[:, None]
    ones = torch.ones_like(drafted.tokens, dtype=torch.float32)
    if drafted.probs is None:
        return ones
    tokens = torch.where(drawn, drafted.tokens, 0)
    return torch.where(drawn, drafted.probs.gather(-1, tokens[..., None])[..., 0], ones)


def expected_acceptance(drafted: Drafted, p: Distribution, p_drafted: Tensor) -> Tensor:
    """The probability that each draft stands under rejection, given those before it: float32 [B, K], 0 in padding.

    Σ_v min(p, q), and `p_drafted`, the target's probability of the draft token, in one-hot rows.
    """
    if drafted.probs is None:
        return p_drafted
    drawn = drafted.valid & ~drafted.one_hot[:, None]
    residual = residual_mass(drafted.probs, p, torch.ones_like(p_drafted), drawn)
    return torch.where(drawn, 1 - residual, p_drafted)


def verify_block(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
    """`emitted.Verify` for whole blocks; equal to `rejection` for K = 1, never worse in expectation.

    `expected` is exact given the draft tokens: whether a draft stands depends on those after it too.
    """
    p = distribution(logits, parameters)
    target = target_probs(drafted, p)
    weights = _prefix_weights(target, draft_probs(drafted))
    passing = _pass_probabilities(drafted, p, target, weights)
    passes = uniform(acceptance_stream(parameters.seed, start, passing.shape[1])) < passing
    accepted = pad(torch.where(passes, _count(passes), 0), (1, 0)).amax(-1)
    noise = target_stream(parameters.seed, start + accepted)
    token = recover_token(drafted, p, accepted, weights.gather(1, accepted[:, None])[:, 0], noise)
    return emit(drafted, accepted, token, _expected(passing))


def _prefix_weights(target: Tensor, draft: Tensor) -> Tensor:
    """w_0 = 1 and w_i = min(1, w_{i−1}·p(d_i) / q(d_i)): float32 [B, K+1], from both probabilities [B, K]."""
    weights = [target.new_ones(target.shape[0])]
    for p, q in zip(target.unbind(1), draft.unbind(1), strict=True):
        joint = weights[-1] * p
        weights.append(torch.where(joint < q, joint / q, (joint > 0).float()))
    return torch.stack(weights, dim=1)


def _pass_probabilities(drafted: Drafted, p: Distribution, target: Tensor, weights: Tensor) -> Tensor:
    """The probability [B, K] that the prefix up to each draft passes its test; 0 in padding.

    With Z_i = Σ_v max(w_i·p(v) − q(v), 0) over the token after prefix i, it is Z_i / (Z_i + 1 − w_i), and w for the
    last draft.
    """
    w = weights[:, 1:]
    after = weights[:, 1:-1]  # the prefixes that a further draft follows
    mass = after * (1 - target[:, 1:])
    if drafted.probs is not None:
        drawn = drafted.valid & ~drafted.one_hot[:, None] & (_count(w) > 1)
        full = residual_mass(drafted.probs, p, weights[:, :-1], drawn)[:, 1:]
        mass = torch.where(drafted.one_hot[:, None], mass, full)
    inner = torch.where(mass > 0, mass / (mass + 1 - after), 0)
    last = _count(w) == drafted.lengths[:, None]
    passing = torch.where(last, w, pad(inner, (0, w.shape[1] - inner.shape[1])))
    return torch.where(drafted.valid, passing, 0)


def _expected(passing: Tensor) -> Tensor:
    """From pass probabilities [B, K], the probability that a prefix of i or more tokens is accepted, given i−1."""
    none_from = (1 - passing).flip(-1).cumprod(-1).flip(-1)
    reached = pad(1 - none_from, (1, 0), value=1.0)
    return torch.where(reached[:, :-1] > 0, reached[:, 1:] / reached[:, :-1], 0)


def _count(like: Tensor) -> Tensor:
    """The numbers 1 … K, on the device of `like` [B, K]."""
    return torch.arange(1, like.shape[1] + 1, device=like.device)
