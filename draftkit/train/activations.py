"""What a step keeps for its backward pass, by forwards of a few tokens, from which a whole row's is computed.

What a draft keeps grows with the tokens of a row and with those that it drafts from, each in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftkit.train.batch import TrainingBatch
from draftkit.train.recipes.recipe import Recipe

TOKENS = 64  # of the shorter row that is tried


def kept_activations(
    recipe: Recipe, *, width: int, vocab_size: int, tokens: int, precision: torch.dtype, most_anchors: int | None
) -> int:
    """The bytes that a forward of `recipe` keeps of a row of `tokens`, all of which the target produced.

    `width`: the target's. `precision`: what the draft computes in. `most_anchors`: the positions that a step drafts
    from at most, None for all.
    """

    def kept(size: int, drafted: int) -> int:
        batch = _row(recipe, width, vocab_size, size, drafted)
        with torch.autocast(batch.tokens.device.type, precision, enabled=precision != torch.float32):
            return _kept(recipe, batch)

    few, half = TOKENS, TOKENS // 2
    base = kept(few, half)
    each_anchor = (kept(few, few) - base) / (few - half)
    each_token = (kept(2 * few, half) - base) / few
    anchors = min(tokens, most_anchors or tokens)
    return max(round(base + each_token * (tokens - few) + each_anchor * (anchors - half)), 0)


def _row(recipe: Recipe, width: int, vocab_size: int, tokens: int, drafted: int) -> TrainingBatch:
    """A row of one sample, of which the last tokens are `drafted`."""
    device = next(recipe.parameters()).device
    layers = recipe.aux_layers
    at = torch.arange(tokens, device=device)[None]
    features = None if layers is None else torch.randn(1, tokens, width * len(layers.states), device=device)
    last = torch.randn(1, tokens, width, device=device)
    return TrainingBatch(at % vocab_size, at, torch.zeros_like(at), at >= tokens - drafted, features, last)


def _kept(recipe: Recipe, batch: TrainingBatch) -> int:
    if batch.tokens.is_cuda:
        before = torch.cuda.memory_allocated()
        outcome = recipe(batch)
        return torch.cuda.memory_allocated() - before
    with _made() as made:
        outcome = recipe(batch)
    assert outcome is not None  # what it is computed from is kept with it
    return sum(size for storage, size in made.values() if not storage.expired())


@contextmanager
def _made() -> Iterator[dict[int, tuple[StorageWeakRef, int]]]:
    """The memory that the body makes, by its address: what was freed may be there once more."""
    made: dict[int, tuple[StorageWeakRef, int]] = {}

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_plain(tensor)}
            found = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(found):
                if _is_plain(tensor) and (storage := tensor.untyped_storage())._cdata not in before:
                    made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return found

    with Noted():
        yield made


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided
