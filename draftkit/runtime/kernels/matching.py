"""How many drafts equal the tokens that the target chose for their positions.

B requests, K draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.kernels.backend import jit, next_power_of_2, tl, uses_triton
from draftkit.runtime.sampling.verdict import Drafted


def count_matches(drafted: Drafted, chosen: Tensor) -> Tensor:
    """The length of the longest prefix of each row's drafts that equals `chosen` int64 [B, K+1]: int64 [B]."""
    if uses_triton(chosen) and drafted.tokens.numel():
        return _count_matches(drafted, chosen)
    return count_matches_reference(drafted, chosen)


def count_matches_reference(drafted: Drafted, chosen: Tensor) -> Tensor:
    agrees = (drafted.tokens == chosen[:, :-1]) & drafted.valid
    return agrees.long().cumprod(-1).sum(-1)


def _count_matches(drafted: Drafted, chosen: Tensor) -> Tensor:
    rows, k = drafted.tokens.shape
    accepted = torch.empty(rows, dtype=torch.int64, device=chosen.device)
    _matching_kernel[(rows,)](
        drafted.tokens.contiguous(),
        drafted.lengths,
        drafted.active,
        chosen.contiguous(),
        accepted,
        k,
        BLOCK=next_power_of_2(k),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return accepted


@jit
def _matching_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    active: tl.tensor,
    chosen: tl.tensor,
    accepted: tl.tensor,
    k: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per request."""
    request = tl.program_id(0)
    length = tl.where(tl.load(active + request), tl.load(lengths + request), 0)
    index = tl.arange(0, BLOCK)
    valid = index < length
    token = tl.load(tokens + request * k + index, mask=valid, other=0)
    choice = tl.load(chosen + request * (k + 1) + index, mask=valid, other=0)
    tl.store(accepted + request, first_failure(token == choice, index, length))


@jit
def first_failure(passes: tl.tensor, index: tl.tensor, length: tl.tensor) -> tl.tensor:
    """The number of leading entries that pass, `length` at most."""
    return tl.min(tl.where(passes, length, tl.minimum(index, length)), axis=0)
