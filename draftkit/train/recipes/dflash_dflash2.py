"""DFlash2: a block drafter with convolutions within the block, whose likeliest tokens a selector chooses from (z-lab).

z-lab has published the module, which serving runs; of its training nothing was found. Others train it alike
(speculators 0.9 `dflash2`, SpecForge): DFlash's loss on each row by itself, and beside it, with gradients through both,
the cross-entropy of the selector's scores over the row's candidates, with the true token before; a target's choice that
is not among the candidates takes the place of the last. Here the candidates stay those of serving, and where the
target's choice is not among them, its best one of them is the label. The selector's tables begin larger than 0.02 as in
speculators, from which they learn next to nothing at first (benchmarks/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.block import BlockConvolution
from draftkit.layout.families.dflash import CandidateSelector
from draftkit.train.batch import TrainingBatch
from draftkit.train.losses.candidates import Candidates, candidate_loss
from draftkit.train.losses.linear import LinearLoss
from draftkit.train.losses.table import Loss, LossText, parse_loss
from draftkit.train.losses.teacher import Teacher
from draftkit.train.losses.weights import Reach
from draftkit.train.recipes.bases.dflash import BlockHeads, BlockOptions, BlockRecipe, BlockRows, block_draft
from draftkit.train.recipes.recipe import Origin
from draftkit.train.settings import Positive, Repeats, Size


@dataclass(frozen=True, kw_only=True)
class DFlash2Options(BlockOptions):
    """The options of all block drafters, and the parts of a new draft or of a DFlash draft to start from.

    - `conv_taps`, `conv_group_size`: as in `BlockConvolution`. `selector_rank`, `selector_top_k`: as in
      `CandidateSelector`. A draft that begins without them drafts the same with them to begin with.
    - `selector_loss`: of each row's candidates, as `parse_loss` reads it. `selector_weight`: what it counts beside
      `loss`.
    - `causal`: not even layers with a window, as published.
    """

    causal: bool | None = setting("Whether all layers are causal within the block; none: those with a window.", False)
    conv_taps: Repeats = setting("How far a convolution reaches.", 2, unit="rows")
    conv_group_size: Size = setting("How many channels share coefficients.", 16, unit="channels")
    selector_rank: Size = setting(
        "The rank of the scores between candidates of neighboring rows.", 256, unit="features"
    )
    selector_top_k: Size = setting("The candidates of each row.", 16, unit="tokens")
    selector_loss: LossText = setting("The loss of each row's candidates, as ce, kl or 0.1*ce + kl.", "ce")
    selector_weight: Positive = setting("What that loss counts beside the other.", 1.0)


class DFlash2(BlockRecipe):
    """Trains DFlash2 drafts, also from DFlash drafts. What is measured is what the selector drafts."""

    options_type = DFlash2Options
    options: DFlash2Options

    def __init__(self, origin: Origin, options: DFlash2Options):
        heads = BlockHeads(
            convolution=BlockConvolution(conv_taps=options.conv_taps, conv_group_size=options.conv_group_size),
            selector=CandidateSelector(selector_rank=options.selector_rank, selector_top_k=options.selector_top_k),
        )
        draft = block_draft(origin, self.name, ("dflash2", "dflash"), options, heads)
        if draft.candidate_selector is None:
            raise DraftkitError("the draft has convolutions but no selector", expected="a draft of z-lab's DFlash2")
        if draft.spec.reduced_vocabulary:
            raise DraftkitError(
                "a draft vocabulary", expected="none: DFlash2 has all tokens, in its selector and in every engine"
            )
        super().__init__(draft, origin, options)
        self.selector_loss = parse_loss(options.selector_loss)

    @property
    def confidence_weight(self) -> float:
        return 0.0

    def compare(
        self,
        batch: TrainingBatch,
        rows: BlockRows,
        teacher: Teacher,
        weights: Tensor,
        loss: Loss,
        reach: Reach | None = None,
        candidates: Candidates | None = None,
    ) -> LinearLoss:
        """The comparison of a block drafter with the selector's loss added, and the selector's drafts in place of the
        rows' own."""
        selector, layer, temperature = self.draft.candidate_selector, self.draft.lm_head, self.options.temperature
        assert selector is not None
        assert isinstance(layer, nn.Linear)
        candidates = candidates or Candidates(len(rows.steps), selector.top_k, rows.output.device)
        found = super().compare(batch, rows, teacher, weights, loss, reach, candidates)
        taught, emitted = self.taught(batch, rows)
        states = rows.output * (self.draft.spec.logit_scale / temperature)
        follows = selector(batch.tokens[0, taught], candidates.ids, rows.output) / temperature
        scores = candidates.logits_of(states, layer.weight) + follows
        chosen = candidate_loss(scores, candidates, self.head, found.weights, self.selector_loss, emitted)
        share = self.options.selector_weight
        return found._replace(
            value=found.value + share * chosen.value,
            loss=found.loss + share * chosen.loss,
            agree=chosen.agree,
            alpha=chosen.alpha,
            ratio=chosen.ratio,
        )
