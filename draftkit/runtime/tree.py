"""Trees: many continuations in one verification, and which of them stands.

A tree hangs on the root, the newest token of a sequence, which is no draft. Rows of the target's forward are the root
and then the nodes, parents before their children; node i has row i + 1. A row lies in the cache at the root's entry
plus its row, has the position of the root plus its depth, and sees what is before the root, its ancestors and itself.

Which children a node has follows from the text alone, so nothing is rejected by chance: the target draws the token
after each row with its own noise for that position, and the walk goes to the child that was drawn, and ends where there
is none. Whatever the tree, what comes out are the very tokens of plain decoding, at any temperature; and no rule could
accept more, as a node stands with the probability of its path or less. A chain is the tree with one child everywhere.

B requests, N nodes, D levels, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.emitted import Emitted
from draftkit.runtime.ops.distribution import Distribution, distribution, probability_of
from draftkit.runtime.ops.random import target_stream
from draftkit.runtime.ops.sample import sample


class Tree(NamedTuple):
    """`tokens` and `parents` int64 [B, N]: a node's parent is a row before its own; −1 where there is no node, and the
    token any of the vocabulary. Siblings have different tokens."""

    tokens: Tensor
    parents: Tensor

    @property
    def there(self) -> Tensor:
        """bool [B, N]."""
        return self.parents >= 0

    def ancestors(self, levels: int) -> Tensor:
        """bool [B, N+1, N+1]: which rows each row comes from, itself among them, in a tree of at most `levels`."""
        batch, nodes = self.parents.shape
        rows = torch.arange(nodes + 1, device=self.parents.device)
        own = (rows[:, None] == rows).float().expand(batch, -1, -1).clone()
        own[:, 1:] += (self.parents[:, :, None] == rows).float()
        for _ in range((levels - 1).bit_length()):  # each product doubles how far a row sees
            own = (own @ own).clamp(max=1)
        return own > 0


class Walked(NamedTuple):
    """What stands of a tree: `path` int64 [B, D+1] are the rows from the root on, −1 after the last."""

    emitted: Emitted
    path: Tensor


def verify_tree(
    tree: Tree,
    ancestors: Tensor,
    logits: Tensor,
    parameters: SamplingTensors,
    start: Tensor,
    active: Tensor,
    levels: int,
    *,
    all_greedy: bool,
) -> Walked:
    """Decide a round from the target's `logits` [B, N+1, V] after each row.

    `ancestors` as `Tree.ancestors` gives them, `start` int64 [B] the position after the root, `active` bool [B] the
    rows that hold a request, `all_greedy` whether none of them draws. `expected` float32 [B, D] of what is emitted: the
    probability that the walk goes on from each node it has come to, the sum over its children.
    """
    p = distribution(logits, parameters)
    depth = ancestors.sum(-1) - 1
    chosen = p.best if all_greedy else sample(p, target_stream(parameters.seed, start[:, None] + depth))
    path = walk(tree, chosen, active, levels)
    return Walked(emit_path(path, chosen, goes_on(tree, p, path)), path)


def walk(tree: Tree, chosen: Tensor, active: Tensor, levels: int) -> Tensor:
    """Follow `chosen` int64 [B, N+1], the token after each row, from the root: `Walked.path`; all −1 where not
    `active`."""
    row, going = torch.zeros_like(chosen[:, 0]), active
    path = [torch.where(going, row, -1)]
    for _ in range(levels):
        drawn = chosen.gather(1, row[:, None])
        hit = (tree.parents == row[:, None]) & (tree.tokens == drawn)
        going = going & hit.any(1)
        row = torch.where(going, hit.long().argmax(1) + 1, row)
        path.append(torch.where(going, row, -1))
    return torch.stack(path, dim=1)


def emit_path(path: Tensor, chosen: Tensor, expected: Tensor) -> Emitted:
    """The tokens that were drawn along a path: its nodes', and the one after the last."""
    tokens = torch.where(path >= 0, chosen.gather(1, path.clamp(min=0)), 0)
    return Emitted(tokens, (path >= 0).sum(1), expected)


def goes_on(tree: Tree, p: Distribution, path: Tensor) -> Tensor:
    """The target's probability of the children, together, of each row of a path but its last: float32 [B, D], 0 beyond
    its end."""
    chances = probability_of(p, tree.tokens, tree.parents.clamp(min=0))
    theirs = tree.parents[:, None] == path[:, :-1, None].masked_fill(path[:, :-1, None] < 0, -2)  # [B, D, N]
    return (chances[:, None] * theirs).sum(-1).clamp(max=1)
