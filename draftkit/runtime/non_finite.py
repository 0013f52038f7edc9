"""What is said when a forward gives NaN or infinity: which layer began, and at which position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftkit.errors import NonFiniteError
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter, NewSequence
from draftkit.runtime.drawing import draw_greedy
from draftkit.runtime.rounds import Broken
from draftkit.targets.finite import HINT, first_non_finite
from draftkit.targets.target import Target


def explained(broken: Broken, target: Target, drafter: Drafter | None, tokens: Sequence[int], k: int) -> NonFiniteError:
    """The error about logits of `broken` that are not finite, after all of `tokens` or some of them.

    The text is run once more, by itself, with an eye on every layer; `drafter` has lost its sequences after it.
    """
    ids = torch.tensor(tokens, device=target.device)
    clean = Target(target.model, target.aux_layers)
    cache = SlotCache(1, len(ids))
    features: list[Tensor | None] = []
    place = first_non_finite(clean.model, lambda: features.append(_features(clean, ids, cache)))
    if place is not None:
        return _error("target", f"begins in {place[0]}, at position {place[1]} of {len(tokens)}")
    if broken == "draft" and drafter is not None and drafter.module is not None:
        place = first_non_finite(drafter.module, lambda: _draft(drafter, ids, features[0], cache, k))
        if place is not None:
            return _error("draft", f"begins in {place[0]}, in drafting after {len(tokens)} tokens")
    return _error(broken, f"came up after {len(tokens)} tokens, and not again when they were run by themselves")


def _error(whose: Broken, where: str) -> NonFiniteError:
    return NonFiniteError(f"the {whose}'s forward gives NaN or infinity: it {where}", hint=HINT)


def _features(target: Target, ids: Tensor, cache: SlotCache) -> Tensor | None:
    positions = torch.arange(len(ids), device=ids.device)[None]
    rows = cache.rows(torch.zeros_like(ids[:1]), positions, len(ids), prompt=True)
    return target.forward(ids[None], positions, rows, last_only=True).features


def _draft(drafter: Drafter, ids: Tensor, features: Tensor | None, cache: SlotCache, k: int) -> None:
    """One round of drafting after `ids`, which are in the target's `cache`."""
    known, end = len(ids) - 1, len(ids) + k + 1
    drafter.allocate(1, end, k)
    drafter.prefill([NewSequence(0, ids[:-1], None if features is None else features[0, :-1])])
    newest = None if features is None else features[:, known - 1 : known]
    one = torch.ones_like(ids[:1])
    drafter.propose(Committed(one - 1, ids[None, -1:], one, one * known, newest, end, cache), k, draw_greedy)
