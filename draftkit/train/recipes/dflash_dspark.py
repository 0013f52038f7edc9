"""DSpark: a block drafter whose tokens depend on each other through a Markov head (deepseek-ai/DeepSpec)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from draftkit.io.records import Bounds
from draftkit.layout.families.dflash import MarkovHead
from draftkit.train.losses.table import LossText
from draftkit.train.recipes.bases.dflash import BlockHeads, BlockOptions, BlockRecipe, block_draft
from draftkit.train.recipes.recipe import Origin
from draftkit.train.settings import Repeats, Size


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(BlockOptions):
    """The options of all block drafters, and the heads of a new draft or of a DFlash draft to start from.

    - `loss`: DeepSpec's 0.1·CE + 0.9·‖p − q‖₁, which is twice `tv`.
    - `markov_type`, `markov_rank`: as in `MarkovHead`. `confidence`: whether there is a confidence head, with what
      weight `confidence_weight` of its cross-entropy with the chance of acceptance.
    - `begin`: at random, since the target's layers were not seen to help here (benchmarks/training.md).
    """

    loss: LossText = "0.1*ce + 1.8*tv"
    slots: Literal["fill-in", "anchor-first"] = "anchor-first"
    block_size: Repeats = 7
    begin: Literal["target", "random"] = "random"
    markov_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: Size = 256
    confidence: bool = True
    confidence_weight: Annotated[float, Bounds(0)] = 1.0


class DSpark(BlockRecipe):
    """Trains DSpark drafts, also from DFlash drafts."""

    options_type = DSparkOptions
    options: DSparkOptions

    def __init__(self, origin: Origin, options: DSparkOptions):
        markov = MarkovHead(markov_type=options.markov_type, markov_rank=options.markov_rank)
        heads = BlockHeads(markov, confidence="hidden_and_token" if options.confidence else "none")
        draft = block_draft(origin, self.name, ("dspark", "dflash"), options, heads)
        super().__init__(draft, origin, options)

    @property
    def confidence_weight(self) -> float:
        return self.options.confidence_weight
