"""Growing a tree level by level from a draft's logits; which draft it is plays no part.

Scores order strictly: by probability of the path, of equals the shallower node, then the better parent's, then the
likelier token, of equally likely ones the lower. B requests, W nodes of a frontier, V draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.runtime.tree import Tree
from draftkit.runtime.tree_kinds import Beam, Choices


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


class Growth(ABC):
    """A tree while it grows: called with the logits of each level, it gives the frontier of the next."""

    def __init__(self) -> None:
        self._levels: list[_Scored] = []
        self._frontier: Frontier | None = None

    @classmethod
    def of(cls, shape: Beam | Choices) -> Growth:
        """The growth of a shape."""
        return BeamGrowth(shape) if isinstance(shape, Beam) else ChoicesGrowth(shape)

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> Frontier:
        """Expand the frontier, first the root, by the draft's `logits` [B, W, V], or [B, 1, V] that are the same for
        all of it; `ids` int64 [V]: their tokens, None where columns are tokens."""
        return self.children(*likeliest(logits, self._wanted, ids))

    @abstractmethod
    def children(self, values: Tensor, tokens: Tensor) -> Frontier:
        """The same by tokens int64 [B, W, c] and their log-probabilities float32 [B, W, c], most likely first, −∞ for
        none."""

    @property
    @abstractmethod
    def _wanted(self) -> int:
        """How many children of a node are looked at."""

    @abstractmethod
    def tree(self) -> Tree:
        """What has grown."""

    def _beside(self, tokens: Tensor, parents: Tensor, kept: Tensor) -> Frontier:
        """A frontier that sees what `kept` [B, W] of the frontier before have seen, and itself."""
        before, width = self._frontier, tokens.shape[1]
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(tokens.shape[0], -1, -1)
        depths = tokens.new_full((width,), 0 if before is None else int(len(self._levels) - 1))
        if before is not None:
            own = torch.cat((before.visible.take_along_dim(kept[:, :, None], 1), own), dim=2)
            depths = torch.cat((before.depths, depths))
        self._frontier = Frontier(tokens, parents, own, depths)
        return self._frontier


class BeamGrowth(Growth):
    """The growth of a `Beam`."""

    def __init__(self, shape: Beam):
        super().__init__()
        self.shape = shape
        self._number: Tensor | None = None  # of each node of the frontier, over all levels
        self._scores: Tensor | None = None  # of these

    @property
    def _wanted(self) -> int:
        return self.shape.children

    def children(self, values: Tensor, tokens: Tensor) -> Frontier:
        shape = self.shape
        values, tokens = _exactly(shape.children, values, tokens)
        batch = values.shape[0]
        number = tokens.new_full((batch, 1), -1) if self._number is None else self._number
        if shape.products:
            before = values.new_ones(batch, 1) if self._scores is None else self._scores
            scores = before[:, :, None] * values.exp()
        else:
            before = values.new_zeros(batch, 1) if self._scores is None else self._scores
            scores = before[:, :, None] + values
        level = _Scored(*(x.expand_as(scores).flatten(1) for x in (tokens, number[:, :, None], scores)))
        taken = sum(one.scores.shape[1] for one in self._levels)
        self._levels.append(level)
        order = _descending(level.scores)[:, : shape.width]
        self._number, self._scores = taken + order, level.scores.gather(1, order)
        parents = order // shape.children
        lanes = torch.arange(order.shape[1], device=order.device).expand_as(order)
        return self._beside(level.tokens.gather(1, order), parents, lanes if shape.lanes else parents)

    def tree(self) -> Tree:
        tokens, parents, scores = (torch.cat(columns, dim=1) for columns in zip(*self._levels, strict=True))
        kept = _descending(scores)[:, : self.shape.nodes].sort(1).values
        there = scores.gather(1, kept) > (0 if self.shape.products else -torch.inf)
        row = torch.zeros(kept.shape[0], scores.shape[1] + 1, dtype=kept.dtype, device=kept.device)
        rows = torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept)
        row.scatter_(1, kept + 1, rows)  # by number + 1, the root's is 0
        return Tree(tokens.gather(1, kept), torch.where(there, row.gather(1, parents.gather(1, kept) + 1), -1))


class ChoicesGrowth(Growth):
    """The growth of `Choices`."""

    def __init__(self, shape: Choices):
        super().__init__()
        self.shape = shape
        self._scores: Tensor | None = None

    @property
    def _wanted(self) -> int:
        return max(path[-1] for path in self.shape.level(len(self._levels) + 1)) + 1

    def children(self, values: Tensor, tokens: Tensor) -> Frontier:
        depth, children = len(self._levels) + 1, self._wanted
        before, columns, inner = _static(self.shape, depth, values.device)
        values, tokens = _exactly(children, values, tokens)
        scores = values if self._scores is None else values + self._scores[:, :, None]
        scores = scores.expand(-1, before, -1).flatten(1)[:, columns]
        tokens = tokens.expand(-1, before, -1).flatten(1)[:, columns]
        self._levels.append(_Scored(tokens, tokens, scores))
        self._scores = scores[:, inner]
        parents = (columns // children)[inner].expand(tokens.shape[0], -1)
        return self._beside(tokens[:, inner], parents, parents)

    def tree(self) -> Tree:
        tokens, _, scores = (torch.cat(columns, dim=1) for columns in zip(*self._levels, strict=True))
        return Tree(tokens, torch.where(scores > -torch.inf, _parents(self.shape, tokens.device), -1))


@cache
def _static(shape: Choices, depth: int, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """Of one level of a static tree: how many nodes were expanded for it, which of all their children its nodes are,
    and which of these are expanded next. On the device from the first round on, so that no later one waits for it."""
    nodes, before = shape.level(depth), {path: i for i, path in enumerate(shape.inner(depth - 1))}
    children = max(path[-1] for path in nodes) + 1
    columns = [before[path[:-1]] * children + path[-1] for path in nodes]
    with_children = set(shape.inner(depth))
    inner = [i for i, path in enumerate(nodes) if path in with_children]
    return len(before), torch.tensor(columns, device=device), torch.tensor(inner, dtype=torch.int64, device=device)


@cache
def _parents(shape: Choices, device: torch.device) -> Tensor:
    """The rows of the nodes' parents."""
    return torch.tensor(shape.parents, device=device)


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
