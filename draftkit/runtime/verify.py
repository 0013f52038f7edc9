"""Choosing how the drafts of a round are drawn and verified. B sequences, K draft tokens, V target vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from draftkit.runtime.sampling.block import verify_block
from draftkit.runtime.sampling.coupled import verify_coupled
from draftkit.runtime.sampling.drafting import draw
from draftkit.runtime.sampling.greedy import verify_greedy
from draftkit.runtime.sampling.parameters import SamplingTensors
from draftkit.runtime.sampling.rejection import verify_rejection
from draftkit.runtime.sampling.synthetic import verify_synthetic
from draftkit.runtime.sampling.verdict import Verify

Verification = Literal["rejection", "coupled", "block", "synthetic"]
MODES: dict[str, Verify] = {"rejection": verify_rejection, "coupled": verify_coupled, "block": verify_block}


def verification(mode: Verification, *, all_greedy: bool, rates: Tensor | None) -> Verify:
    """The function that decides a round; at temperature 0 all lossless modes come to the same.

    `rates` float32 [K] go with the mode `synthetic`: conditional ones, as `SyntheticAcceptance` gives them.
    """
    if mode == "synthetic":
        assert rates is not None
        return partial(verify_synthetic, rates=rates)
    return verify_greedy if all_greedy else MODES[mode]


def draw_greedy(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """`protocol.Draw` at temperature 0: the most likely token."""
    best = logits.argmax(-1)
    return best if ids is None else ids[best]


class RoundDraw:
    """`protocol.Draw` for one round of sampled requests; `probs` float32 [B, K, V] keeps what drafts were drawn from.

    `parameters` are those of the drafts, `start` int64 [B] the position of each row's first draft. `coupled`: drawn
    with the target's noise. Greedy rows are one-hot and leave their `probs` alone.
    """

    def __init__(self, parameters: SamplingTensors, start: Tensor, k: int, vocab_size: int, *, coupled: bool):
        self.probs = start.new_zeros(len(start), k, vocab_size, dtype=torch.float32)
        self._parameters = parameters
        self._start = start
        self._coupled = coupled

    def __call__(self, step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is not None:  # tokens that the draft does not have have probability zero
            full = logits.new_full((len(logits), self.probs.shape[-1]), -torch.inf)
            logits = full.index_copy_(1, ids, logits)
        position = self._start + step
        probs = self.probs[:, step]
        return draw(logits, self._parameters, position, self._start, coupled=self._coupled, probs=probs)
