"""Parallel drafts in training: the mask token, and chains from many anchors in one pass.

A row (a, d) belongs to the chain that starts at the anchor a (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469). Those
of depth 0 are the true rows; a row of depth d ≥ 1 holds the mask token, which stands for what is not drafted yet, at
position a + d. N positions, K depths, R rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftkit.errors import DraftkitError, TargetError
from draftkit.io.records import Bounds
from draftkit.io.settings import setting
from draftkit.targets.chat import load_tokenizer
from draftkit.train.batch import TrainingBatch
from draftkit.train.losses.weights import Reduction
from draftkit.train.settings import Share, Size

RESERVED = re.compile(r"reserved|unused|extra_id|placeholder|mask", re.IGNORECASE)
HINT = "set mask_token_id to an id of the vocabulary that no text contains"


def pick_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int, used: Collection[int] = ()) -> int:
    """The last unused id below `vocab_size`: one without a token, or a special token whose name says that it is spare.

    Where there is neither, the last special token without a role that the chat template does not write, as SmolLM2's
    `<empty_output>`, which is for notebooks. Never one of `used`, nor a token with a role, as the end token. Raises
    `DraftkitError` where there is none.
    """
    known = set(tokenizer.get_vocab().values())
    idle = _idle_tokens(tokenizer)
    spare = {token for token, text in idle.items() if RESERVED.search(text)}
    for unused in (set(range(vocab_size)) - known | spare, set(idle)):
        if free := [token for token in unused if token < vocab_size and token not in used]:
            return max(free)
    raise DraftkitError("the tokenizer has no unused token", where=tokenizer.name_or_path, hint=HINT)


def _idle_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens that have no role and that no chat template writes, by id."""
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    templates = str(tokenizer.chat_template)  # a text, or several by name
    return {
        token: added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and token not in roles and added.content not in templates
    }


def default_mask_token(folder: str | Path, vocab_size: int) -> int:
    """`pick_mask_token` with the tokenizer in `folder`. Raises `DraftkitError`."""
    try:
        tokenizer = load_tokenizer(folder, "target")
    except TargetError as error:
        raise DraftkitError("no tokenizer to pick a mask token from", where=folder, hint=HINT) from error
    return pick_mask_token(tokenizer, vocab_size)


def check_mask_token(token: int, vocab_size: int) -> None:
    """Raise `DraftkitError` for a mask token outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise DraftkitError(f"mask_token_id {token}", expected=f"0 to {vocab_size - 1}")


ROWS_AT_ONCE = 4096  # mask rows of a pass that has to cover every chain
SMALLEST_SUM = 1e-6  # the least that a sum of weights is taken as where it divides


@dataclass(frozen=True)
class ConditionalDrop:
    """Which chains go how deep (COD): depth d keeps max(retention^d, least) of the A chains, of A − d of them."""

    retention: Annotated[float, Bounds(above=0, most=1)] = setting(
        "The share of chains that go one depth further.", 0.7
    )
    least: Share = setting("The least share of chains that any depth keeps.", 0.2)
    max_anchors: Size | None = setting(
        "How many chains of a batch go beyond depth 0, chosen at random; none for all.", None, unit="chains"
    )

    def keep(self, drafted: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The part of `drafted` bool [K, N] that is trained: depth 0 whole, and a random part of each further depth.

        A chain kept at a depth was kept at the one before. `generator` is one of the CPU, where the result is too; None
        for torch's own, whose state the Trainer saves, so that a resumed run draws the same.
        """
        possible = drafted.cpu()
        kept = torch.zeros_like(possible)
        kept[0] = possible[0]
        pool = possible[0].nonzero()[:, 0]
        pool = _some(pool, len(pool) if self.max_anchors is None else self.max_anchors, generator)
        chains = len(pool)
        for depth in range(1, len(possible)):
            pool = pool[possible[depth, pool]]
            pool = _some(pool, int((chains - depth) * max(self.retention**depth, self.least)), generator)
            kept[depth, pool] = True
        return kept


def _some(pool: Tensor, size: int, generator: torch.Generator | None) -> Tensor:
    if len(pool) <= size:
        return pool
    return pool[torch.randperm(len(pool), generator=generator)[: max(size, 0)]]


class ParallelRows:
    """The rows of a pass that drafts `kept` bool [K, N]: its mask rows, and all true rows that they see.

    - `anchors`, `depths` int64 [R]: first the true rows, ascending, then the mask rows, chain by chain.
    - `context`: the positions of the true rows, from the start of the first sample with a chain.
    - `drafting` int64 [M]: which rows those of `kept` are.

    How many rows there are is found on the CPU: of a GPU, each count would be waited for.
    """

    def __init__(self, kept: Tensor, batch: TrainingBatch):
        kept = kept.cpu()
        anchors = kept.any(0).nonzero()[:, 0]
        first, last = (int(anchors[0]), int(anchors[-1])) if len(anchors) else (0, 0)
        self.context = slice(first - int(batch.positions[0, first]), last + 1)
        true = torch.arange(self.context.start, self.context.stop)
        masked = kept[1:].T.nonzero()
        rows = torch.stack((torch.cat((true, masked[:, 0])), torch.cat((torch.zeros_like(true), masked[:, 1] + 1))))
        self.drafting = kept[rows[1], rows[0]].nonzero()[:, 0].to(batch.tokens.device)
        self.anchors, self.depths = rows.to(batch.tokens.device)
        self.positions = batch.positions[:, self.anchors] + self.depths  # [1, R]
        self.sample_ids = batch.sample_ids[0, self.anchors]  # [R]

    @property
    def drafts(self) -> tuple[Tensor, Tensor]:
        """Depths and anchors int64 [M] of the rows that draft."""
        return self.depths[self.drafting], self.anchors[self.drafting]

    def place(self, true: Tensor, mask: Tensor) -> Tensor:
        """Inputs of all rows: of `true` [1, C, …] each anchor's, of the mask rows all `mask` […]: [1, R, …]."""
        masks = mask.expand(1, len(self.anchors) - true.shape[1], *mask.shape)
        return torch.cat((true, masks), dim=1)


def partitions(kept: Tensor, number: int) -> list[Tensor]:
    """`kept` bool [K, N] in up to `number` parts by equal ranges of anchors, empty ones left out; at least one.

    A chain sees true rows and itself, so a part needs, beside its own rows, the true rows before them and nothing else:
    the losses of the parts add up to that of the whole exactly, gradients too (P-EAGLE's Algorithm 1).
    """
    size = kept.shape[1]
    bucket = torch.arange(size, device=kept.device) * number // size
    parts = [kept & (bucket == index) for index in range(number)]
    return [part for part in parts if part.any()] or [kept]


def bounded_partitions(drafted: Tensor) -> list[Tensor]:
    """Parts of bool [K, N] with about `ROWS_AT_ONCE` mask rows at most, or one anchor."""
    return partitions(drafted, min(-(-drafted.numel() // ROWS_AT_ONCE), drafted.shape[1]))


def drafts_of(parts: list[ParallelRows]) -> tuple[Tensor, Tensor]:
    """Depths and anchors int64 [M] of the rows that draft, part by part."""
    depths, anchors = zip(*(part.drafts for part in parts), strict=True)
    return torch.cat(depths), torch.cat(anchors)


def row_weights(mask: Tensor, reduction: Reduction | None) -> Tensor:
    """The weight of each row of `mask` [K, N], bool or numbers: float32. Without a reduction all depths are one mean,
    so that those kept more often count more, as published."""
    return mask / mask.sum().clamp(min=SMALLEST_SUM) if reduction is None else reduction.weights(mask)
