"""DFlash: a block of masks filled in one pass (z-lab/dflash; SpecForge `dflash`, speculators 0.9 `dflash`)."""

from __future__ import annotations

from dataclasses import dataclass

from draftkit.io.settings import setting
from draftkit.train.recipes.bases.dflash import (
    DPACE,
    BlockHeads,
    BlockOptions,
    BlockRecipe,
    block_draft,
)
from draftkit.train.recipes.recipe import Origin
from draftkit.train.settings import Share


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockOptions):
    """The options of all block drafters, with the published defaults but for one: a draft accepts more where D-PACE
    (arXiv 2605.18810) weighs its tokens (benchmarks/LOG.md)."""

    dpace: Share | None = setting(DPACE, 0.5)


class DFlash(BlockRecipe):
    """Trains DFlash drafts, JetSpec's causal ones among them."""

    options_type = DFlashOptions
    optimizer = "muon"

    def __init__(self, origin: Origin, options: DFlashOptions):
        super().__init__(block_draft(origin, self.name, ("dflash",), options, BlockHeads()), origin, options)

    @property
    def confidence_weight(self) -> float:
        return 0.0
