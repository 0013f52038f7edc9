"""Growing a tree level by level from a draft's logits; which draft it is plays no part.

Scores order strictly: by probability of the path, of equals the shallower node, then the better parent's, then the
likelier token, of equally likely ones the lower. B requests, W nodes of a frontier, V draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.runtime.tree import Tree
from draftkit.runtime.tree_kinds import Beam


class Frontier(NamedTuple):
    """The nodes that are to be expanded next.

    `tokens` int64 [B, W]; `parents` int64 [B, W]: the places of their parents in the frontier before. `visible` bool
    [B, W, M]: which nodes of all M that were in frontiers so far a draft's row sees, the last W of which are these.
    `depths` int64 [M]: how many levels each is below the first.
    """

    tokens: Tensor
    parents: Tensor
    visible: Tensor
    depths: Tensor


class _Scored(NamedTuple):
    """Nodes with their scores [B, C], −∞ for none; `parents` number the nodes over all levels, −1 is the root."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor


class Growth:
    """A tree while it grows: called with the logits of each level, it gives the frontier of the next."""

    def __init__(self, shape: Beam):
        self.shape = shape
        self._levels: list[_Scored] = []
        self._frontier: Frontier | None = None
        self._number: Tensor | None = None  # of each node of the frontier, over all levels
        self._scores: Tensor | None = None  # of these

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> Frontier:
        """Expand the frontier, first the root, by the draft's `logits` [B, W, V], or [B, 1, V] that are the same for
        all of it; `ids` int64 [V]: their tokens, None where columns are tokens."""
        return self.children(*likeliest(logits, self.shape.children, ids))

    def children(self, values: Tensor, tokens: Tensor) -> Frontier:
        """The same by tokens int64 [B, W, c] and their log-probabilities float32 [B, W, c], most likely first, −∞ for
        none."""
        shape = self.shape
        values, tokens = _exactly(shape.children, values, tokens)
        batch = values.shape[0]
        number = tokens.new_full((batch, 1), -1) if self._number is None else self._number
        before = values.new_zeros(batch, 1) if self._scores is None else self._scores
        scores = before[:, :, None] + values
        level = _Scored(*(x.expand_as(scores).flatten(1) for x in (tokens, number[:, :, None], scores)))
        taken = sum(one.scores.shape[1] for one in self._levels)
        self._levels.append(level)
        order = _descending(level.scores)[:, : shape.width]
        self._number, self._scores = taken + order, level.scores.gather(1, order)
        return self._beside(level.tokens.gather(1, order), order // shape.children)

    def tree(self) -> Tree:
        """What has grown."""
        tokens, parents, scores = (torch.cat(columns, dim=1) for columns in zip(*self._levels, strict=True))
        kept = _descending(scores)[:, : self.shape.nodes].sort(1).values
        there = scores.gather(1, kept) > -torch.inf
        row = torch.zeros(kept.shape[0], scores.shape[1] + 1, dtype=kept.dtype, device=kept.device)
        rows = torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept)
        row.scatter_(1, kept + 1, rows)  # by number + 1, the root's is 0
        return Tree(tokens.gather(1, kept), torch.where(there, row.gather(1, parents.gather(1, kept) + 1), -1))

    def _beside(self, tokens: Tensor, parents: Tensor) -> Frontier:
        """A frontier that sees what its parents [B, W] in the frontier before have seen, and itself."""
        before, width = self._frontier, tokens.shape[1]
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(tokens.shape[0], -1, -1)
        depths = tokens.new_full((width,), 0 if before is None else int(len(self._levels) - 1))
        if before is not None:
            own = torch.cat((before.visible.take_along_dim(parents[:, :, None], 1), own), dim=2)
            depths = torch.cat((before.depths, depths))
        self._frontier = Frontier(tokens, parents, own, depths)
        return self._frontier


def likeliest(logits: Tensor, count: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 [B, W, c] of each row's likeliest tokens, `count` at most, and these tokens; the
    likeliest first, of equals the lowest column."""
    values = logits.float().log_softmax(-1)
    columns = _best_columns(values, min(count, values.shape[-1]))
    values, order = values.gather(-1, columns).sort(dim=-1, descending=True, stable=True)
    columns = columns.gather(-1, order)
    return values, columns if ids is None else ids[columns]


def _best_columns(values: Tensor, count: int) -> Tensor:
    """The columns [B, W, c] of the largest values in each row, ascending; `topk` takes any of those that equal the
    least of them, here the first are taken."""
    least = values.topk(count, dim=-1).values[..., -1:]
    columns = torch.arange(values.shape[-1], device=values.device)
    turn = torch.where(values > least, -1, torch.where(values == least, columns, len(columns)))
    return turn.topk(count, dim=-1, largest=False).indices.sort(-1).values


def _exactly(count: int, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As many children of each node; −∞ for what is missing."""
    missing = (0, max(count - values.shape[-1], 0))
    return pad(values[..., :count], missing, value=-torch.inf), pad(tokens[..., :count], missing)


def _descending(scores: Tensor) -> Tensor:
    """The order of scores [B, C], best first, the first of equals first."""
    return scores.sort(dim=1, descending=True, stable=True).indices
