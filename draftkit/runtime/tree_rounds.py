"""Rounds that draft a tree: `rounds.Rounds` with more rows, and what stands of them moved together.

B sequences, N nodes, D levels, F feature width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftkit.runtime.batch import Batch
from draftkit.runtime.drafters.protocol import Expands
from draftkit.runtime.growth import Frontier, Growth
from draftkit.runtime.rounds import BROKEN, Outcome, Rounds
from draftkit.runtime.slot_rows import Branches
from draftkit.runtime.tree import Tree, Walked, verify_tree
from draftkit.runtime.tree_kinds import DraftTree
from draftkit.targets.finite import has_finite_peak


class _WatchedGrowth:
    """A `Grow` that notes which rows of a round had usable logits so far: `usable` bool [B]."""

    def __init__(self, growth: Growth, slots: Tensor):
        self.growth = growth
        self.usable = torch.ones_like(slots, dtype=torch.bool)

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> Frontier:
        self.usable &= has_finite_peak(logits).all(1)
        return self.growth(logits, ids)

    def children(self, values: Tensor, tokens: Tensor) -> Frontier:
        return self.growth.children(values, tokens)


class TreeRounds(Rounds):
    """Rounds over sequences whose drafter `Expands`; `tree` says what of."""

    def __init__(self, tree: DraftTree, *parts: Any):
        super().__init__(*parts)
        self.tree = tree

    @torch.inference_mode()
    def run(self, batch: Batch, k: int, length: int, *, drafting: bool = True) -> Tensor:
        """A round; `length` bounds the entries that it reaches. Without `drafting` there are no nodes.

        Returns what `tree_outcomes` reads: float64 [B, 2 + (D+1) + D + 2N].
        """
        state, slots = self.state, batch.slots
        start = state.position[slots] + 1
        tree, finite = self._grown(slots, length) if drafting else (self._bare(slots), torch.ones_like(batch.active))
        ancestors = tree.ancestors(k)
        logits = self._score_tree(slots, tree, ancestors, length)
        walked = verify_tree(tree, ancestors, logits, batch.target, start, batch.active, k, all_greedy=batch.all_greedy)
        self._keep(slots, walked)
        broken = _broken(tree, batch.active, finite, logits)
        emitted = walked.emitted
        columns = broken[:, None], emitted.counts[:, None], emitted.tokens, emitted.expected, *tree
        return torch.cat([column.double() for column in columns], dim=1)

    def _grown(self, slots: Tensor, length: int) -> tuple[Tree, Tensor]:
        """The tree of this round, and bool [B]: whether the draft's logits were usable."""
        assert isinstance(self.drafter, Expands)
        watched = _WatchedGrowth(Growth(self.tree.shape), slots)
        self.drafter.expand(self.committed(slots, length), self.tree.depth, watched)
        return watched.growth.tree(), watched.usable

    def _bare(self, slots: Tensor) -> Tree:
        """A tree of no nodes."""
        none = slots.new_zeros(slots.shape[0], self.tree.nodes)
        return Tree(none, none - 1)

    def _score_tree(self, slots: Tensor, tree: Tree, ancestors: Tensor, length: int) -> Tensor:
        """The target's logits [B, N+1, V] for the roots and the nodes after them."""
        first = self.state.position[slots, None]
        places = first + ancestors.sum(-1) - 1
        rows = self.cache.rows_of_tree(slots, Branches(first, places, ancestors), length)
        tokens = torch.cat((self.anchors(slots), tree.tokens), dim=1)
        output = self.target.forward(tokens, self.turned(slots, places), rows, lengths=places + 1)
        self._features = output.features
        return output.logits

    def _keep(self, slots: Tensor, walked: Walked) -> None:
        """Commit what stands of a tree: entries of the cache, features, and tokens."""
        self.cache.keep_path(slots, self.state.position[slots], walked.path)
        if self._features is not None:
            self.state.features[slots] = self._features.take_along_dim(walked.path.clamp(min=0)[:, :, None], 1)
        self.state.commit(slots, walked.emitted)


def _broken(tree: Tree, active: Tensor, draft: Tensor, logits: Tensor) -> Tensor:
    """int64 [B], as `rounds.outcomes` reads it: an index of `BROKEN`."""
    finite = has_finite_peak(logits)
    target = finite[:, 0] & (finite[:, 1:] | ~tree.there).all(1)
    return torch.where(active, torch.where(target, torch.where(draft, 0, 2), 1), 0)


def tree_outcomes(packed: Tensor, levels: int) -> list[Outcome]:
    """The outcome of each row: the one transfer to the host."""
    found = []
    for broken, count, *rest in packed.tolist():
        emitted, expected, nodes = rest[: levels + 1], rest[levels + 1 : 2 * levels + 1], rest[2 * levels + 1 :]
        tokens, parents = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
        there = [i for i, parent in enumerate(parents) if parent >= 0]
        row = {0: 0} | {i + 1: number + 1 for number, i in enumerate(there)}
        found.append(
            Outcome(
                proposal=tuple(int(tokens[i]) for i in there),
                emitted=[int(token) for token in emitted[: int(count)]],
                expected=tuple(expected) if there else (),
                broken=BROKEN[int(broken)],
                parents=tuple(row[int(parents[i])] for i in there),
            )
        )
    return found
