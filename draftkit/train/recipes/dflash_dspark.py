"""DSpark: a block drafter whose tokens depend on each other through a Markov head (deepseek-ai/DeepSpec)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from draftkit.io.records import Bounds
from draftkit.io.settings import setting
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
    """

    loss: LossText = setting("The loss of each row, as ce, kl or 0.1*ce + kl.", "0.1*ce + 1.8*tv")
    slots: Literal["fill-in", "anchor-first"] = setting(
        "What the rows of a block predict. fill-in: each mask the token in its own place; anchor-first: each "
        "row the token after it.",
        "anchor-first",
    )
    block_size: Repeats = setting("The rows of a block.", 7, unit="rows")
    markov_type: Literal["vanilla", "gated", "rnn"] = setting(
        "vanilla is a bias from the token before alone, gated weighs it by the row's output, rnn keeps a "
        "state over the block.",
        "vanilla",
    )
    markov_rank: Size = setting("The width of the table from which the bias is computed.", 256, unit="features")
    confidence: bool = setting(
        "Whether there is a head that tells a draft's chance of acceptance.",
        True,
    )
    confidence_weight: Annotated[float, Bounds(0)] = setting(
        "The weight of the head's cross-entropy with the chance of acceptance.", 1.0
    )


class DSpark(BlockRecipe):
    """Trains DSpark drafts, also from DFlash drafts."""

    options_type = DSparkOptions
    optimizer = "muon"
    options: DSparkOptions

    def __init__(self, origin: Origin, options: DSparkOptions):
        markov = MarkovHead(markov_type=options.markov_type, markov_rank=options.markov_rank)
        heads = BlockHeads(markov, confidence="hidden_and_token" if options.confidence else "none")
        draft = block_draft(origin, self.name, ("dspark", "dflash"), options, heads)
        super().__init__(draft, origin, options)

    @property
    def confidence_weight(self) -> float:
        return self.options.confidence_weight
