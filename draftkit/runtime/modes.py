"""The verification modes, by name. B sequences, K draft tokens."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor

from draftkit.runtime.verdict import Verify
from draftkit.runtime.verification import verify_coupled, verify_greedy, verify_rejection
from draftkit.runtime.verification_block import verify_block
from draftkit.runtime.verification_synthetic import verify_synthetic

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
