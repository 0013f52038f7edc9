"""DFlash: a block of masks filled in one pass (z-lab/dflash; SpecForge `dflash`, speculators 0.9 `dflash`)."""

from __future__ import annotations

from dataclasses import dataclass

from draftkit.train.recipes.bases.dflash import (
    BlockHeads,
    BlockOptions,
    BlockRecipe,
    block_draft,
)
from draftkit.train.recipes.recipe import Origin


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockOptions):
    """The options of all block drafters, with the published defaults except for how a draft begins: its loss is lower
    after equal steps where that is as the target's last layers (benchmarks/training.md)."""


class DFlash(BlockRecipe):
    """Trains DFlash drafts, JetSpec's causal ones among them."""

    options_type = DFlashOptions

    def __init__(self, origin: Origin, options: DFlashOptions):
        super().__init__(block_draft(origin, self.name, ("dflash",), options, BlockHeads()), origin, options)

    @property
    def confidence_weight(self) -> float:
        return 0.0
