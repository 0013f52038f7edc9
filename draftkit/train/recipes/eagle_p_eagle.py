"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass, with a learned state for what is unseen (arXiv 2602.01469).

Chains of mask rows start from every position; deeper rows are thinned out (`ConditionalDrop`). The loss of depth d at
anchor i counts where serving would draft there (`TrainingBatch.drafted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftkit.io.settings import setting
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.families.eagle import EagleSpec
from draftkit.models.eagle import EagleLayer, EagleModel, load_eagle
from draftkit.train.attention import MASKED_ATTENTION, masks_of_parallel_rows
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.linear import LinearLoss, joined
from draftkit.train.losses.table import Loss, LossText, parse_loss
from draftkit.train.losses.teacher import Teacher
from draftkit.train.losses.weights import Reach, Reduction, reached
from draftkit.train.parallel import (
    SMALLEST_SUM,
    ConditionalDrop,
    ParallelRows,
    bounded_partitions,
    check_mask_token,
    default_mask_token,
    drafts_of,
    partitions,
    row_weights,
)
from draftkit.train.recipes.bases.chain import ChainRows
from draftkit.train.recipes.bases.eagle import EagleFamily, eagle_draft, fresh_eagle
from draftkit.train.recipes.eagle_eagle3 import Eagle3Options, eagle3_spec
from draftkit.train.recipes.recipe import Chains, Origin, StepOutcome, step_statistics
from draftkit.train.settings import Index, Positive, Repeats, Share, Size, sinks_setting, window_setting


@dataclass(frozen=True)
class PEagleOptions:
    """The recipe's settings; those of the architecture hold for a new draft only.

    `drop`: which chains are trained how deep. `reduction`: over rows and steps; None is the mean over all rows. A new
    draft has an embedding of its own only if it is trained, or if its EAGLE-3 has one.
    """

    steps: Repeats = setting("The tokens of a chain.", 8, unit="tokens")
    drop: ConditionalDrop = field(default_factory=ConditionalDrop)
    partitions: Size = setting(
        "Parts of a batch whose activations are kept one at a time and computed twice, for samples whose rows"
        " do not fit; the gradient is the same.",
        1,
    )
    loss: LossText = setting("The loss of each row, as ce, kl or 0.1*ce + kl.", "kl")
    reduction: Reduction | None = None
    reached: Share | None = setting(
        "A row counts the chance that the drafts before it are accepted, from the draft's own probabilities p"
        " ← (1 − α)·p + α with this α; none for 1.",
        0.1,
    )
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    out_of_vocabulary: Literal["keep", "drop"] = setting(
        "What becomes of rows whose token the draft vocabulary lacks: kept and taught within it "
        "(speculators), or dropped.",
        "keep",
    )
    train_head: bool = setting("Whether the draft's own output layer is trained.", True)
    train_embeddings: bool = setting("Whether the draft's own embedding is trained, the mask token's with it.", True)
    layers: tuple[Index, ...] = setting("The captured target layers; (2, n/2, n−3) where empty.", ())
    num_layers: Repeats = setting(
        "The layers of the draft; those that an EAGLE-3 to start from lacks add nothing at first.", 4
    )
    norm_before_residual: bool = setting(
        "Whether layer 0's residual is the normed hidden state instead of the raw one.", False
    )
    feature_norm: Literal["none", "joint", "per_layer"] = setting(
        "An RMSNorm before fc: one over all captured states (joint) or one for each (per_layer).", "joint"
    )
    mask_token_id: Index | None = setting(
        "A token that no text contains; none for the last one that the target's tokenizer does not use.", None
    )
    sliding_window: Size | None = window_setting()
    sink_tokens: Index = sinks_setting()


class PEagle(EagleFamily):
    """Trains P-EAGLE drafts."""

    options_type = PEagleOptions
    optimizer = "muon"

    def __init__(self, origin: Origin, options: PEagleOptions):
        if origin.draft is not None and origin.draft.spec.method == "eagle3":
            draft = p_eagle_from_eagle3(origin, options)
        else:
            draft = eagle_draft(origin, self.name, lambda: fresh_p_eagle(origin, options), MASKED_ATTENTION)
        super().__init__(draft, origin, options.temperature)
        self.options = options
        self.loss = parse_loss(options.loss)
        self.train_own(head=options.train_head, embeddings=options.train_embeddings)

    @property
    def layers_run_once(self) -> Sequence[nn.Module]:
        return list(self.draft.layers) if self.options.partitions == 1 else ()

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        kept = self.options.drop.keep(batch.drafted(self.options.steps))
        teacher = self.head.teacher(batch.last[0])
        counted = kept.to(batch.tokens.device)
        if self.options.out_of_vocabulary == "drop":
            counted = counted & self.drawable(teacher, counted)
        rows = [ParallelRows(part, batch) for part in partitions(kept, self.options.partitions)]
        weights = row_weights(counted, self.options.reduction)
        measure = self.measure
        if self.options.partitions > 1:
            measure = partial(checkpoint, self.measure, use_reentrant=False)
        alpha = self.options.reached
        found = joined([measure(batch, part, teacher, weights, self.loss, alpha) for part in rows])
        value = found.value * (weights.sum() / found.weights.sum().clamp(min=SMALLEST_SUM))
        return StepOutcome(value, step_statistics(found, *drafts_of(rows), counted))

    def measure(
        self,
        batch: TrainingBatch,
        rows: ParallelRows,
        teacher: Teacher,
        weights: Tensor,
        loss: Loss,
        alpha: float | None = None,
    ) -> LinearLoss:
        """The rows of a pass that draft, against the target's distribution. `alpha`: as the option `reached`."""
        drafts = ChainRows(*rows.drafts, self.hidden(batch, rows))
        reach = None
        if alpha is not None:  # depths of a chain come one after the other
            k, size = weights.shape
            reach = Reach(drafts.positions * k + drafts.steps, (size, k), reached, together=1, alpha=alpha)
        return self.compare(batch, drafts, teacher, weights, loss, reach)

    def hidden(self, batch: TrainingBatch, rows: ParallelRows) -> Tensor:
        """The states of the rows that draft, which the head reads: [M, H]."""
        parallel = self.draft.spec.parallel
        features = batch.last if batch.features is None else batch.features
        assert parallel is not None
        following = shifted(batch.tokens, 1)[:, rows.context]
        tokens = rows.place(following, following.new_tensor(parallel.mask_token_id))
        fused = self.draft.fuse(features[:, rows.context].float())  # the draft's parameters are, whatever the target's
        states = rows.place(fused, self.draft.fuse(self.draft.mask_hidden)[0, 0])
        output = self.draft(tokens, states, rows.positions, masks=masks_of_parallel_rows(rows))
        return output.head_input[0, rows.drafting]

    @torch.no_grad()
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        drafted = batch.drafted(k)
        teacher = self.head.teacher(batch.last[0])
        loss = parse_loss("tv")
        rows = [ParallelRows(part, batch) for part in bounded_partitions(drafted)]
        found = joined([self.measure(batch, part, teacher, drafted.float(), loss) for part in rows])
        return Chains.of(drafted, found, *drafts_of(rows))


def fresh_p_eagle(origin: Origin, options: PEagleOptions) -> EagleModel:
    """A new draft: EAGLE-3's, with an embedding table of its own and a random mask state."""
    like = Eagle3Options(
        layers=options.layers,
        num_layers=options.num_layers,
        norm_before_residual=options.norm_before_residual,
        feature_norm=options.feature_norm,
        sliding_window=options.sliding_window,
        sink_tokens=options.sink_tokens,
    )
    return _parallel(eagle3_spec(origin, like), origin, options)


def p_eagle_from_eagle3(origin: Origin, options: PEagleOptions) -> EagleModel:
    """The origin's EAGLE-3 with what a parallel draft has beyond it: its own table, a mask state, and layers up to
    `num_layers`, which add nothing to begin with."""
    assert origin.draft is not None
    older = load_eagle(origin.draft, origin.target, attention=MASKED_ATTENTION, dtype=torch.float32)
    depth = older.spec.decoder.num_hidden_layers
    decoder = replace(older.spec.decoder, num_hidden_layers=max(depth, options.num_layers))
    draft = _parallel(
        replace(older.spec, decoder=decoder), replace(origin, draft=None, d2t_ids=older.target_ids), options
    )
    draft.load_state_dict(older.state_dict(), strict=False)  # what is not in it keeps its beginning
    for layer in cast("list[EagleLayer]", list(draft.layers)[depth:]):
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return draft


def _parallel(spec: EagleSpec, origin: Origin, options: PEagleOptions) -> EagleModel:
    """A new draft of a spec made parallel."""
    vocab_size = origin.target.config.get_text_config().vocab_size
    token = options.mask_token_id
    if token is None:
        token = default_mask_token(origin.target.name_or_path, vocab_size)
    check_mask_token(token, vocab_size)
    parallel = ParallelDrafting(mask_token_id=token, mask_state=True)
    owner: Literal["draft", "target"] = "draft" if options.train_embeddings else spec.embed_tokens
    draft = fresh_eagle(replace(spec, embed_tokens=owner, parallel=parallel), origin, MASKED_ATTENTION)
    nn.init.normal_(draft.mask_hidden)
    return draft
