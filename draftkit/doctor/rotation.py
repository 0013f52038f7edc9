"""Whether a target lies in a rotated space: QuaRot multiplies its weights by an orthogonal matrix.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456. The model computes the same,
but its hidden states, and the tables that a draft shares with it, are those of the original times Q.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_PER_COLUMN = 4  # a matrix of H² numbers, found from this many times H rows of H numbers
FAR = 0.7  # two tables whose difference is this large, relative to either, are not the same
NEAR = 0.6  # and rotated, they are the same when this much of it remains on rows that Q was not found from


def find_rotation(mine: Tensor, theirs: Tensor) -> Tensor | None:
    """The orthogonal Q [H, H] with theirs ≈ mine · Q, for two tables [V, H] with the same rows; None without one.

    Procrustes' solution on every other row, judged on the rows between. None too where the tables are the same as they
    are, or have too few rows to tell.
    """
    rows = min(len(mine), 2 * ROWS_PER_COLUMN * mine.shape[1])
    if rows < 2 * mine.shape[1]:
        return None
    chosen = torch.linspace(0, len(mine) - 1, rows).long()
    mine, theirs = _centred(mine[chosen]), _centred(theirs[chosen])
    if _difference(mine, theirs) < FAR:
        return None
    left, _, right = torch.linalg.svd(mine[::2].T @ theirs[::2])
    rotation = left @ right
    return rotation if _difference(mine[1::2] @ rotation, theirs[1::2]) < NEAR else None


def rotate_blocks(weight: Tensor, rotation: Tensor) -> Tensor:
    """weight · blockdiag(Q, …, Q): a projection [H, A·Ht] of states that have been multiplied by Q [Ht, Ht]."""
    size = len(rotation)
    return (weight.view(len(weight), -1, size) @ rotation).reshape(weight.shape)


def _centred(table: Tensor) -> Tensor:
    """Rows of length one, so that a scale or a few large rows decide nothing."""
    return torch.nn.functional.normalize(table, dim=-1)


def _difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())
