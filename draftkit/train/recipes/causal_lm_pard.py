"""PARD: a causal language model made into a parallel draft (arXiv 2504.18583).

The draft reads the text up to an anchor and K − 1 mask tokens; depth d drafts the token d + 1 after the anchor. The
anchor is a token's position here, the i + 1 of the chains that `TrainingBatch` and `Chains` index by i. N positions,
K depths, R rows, H draft width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.spec import DraftSpec
from draftkit.targets.attention import Sight, narrow
from draftkit.targets.states import AuxLayers, decoder_layers, decoder_of
from draftkit.targets.target import load_target
from draftkit.train.attention import MASKED_ATTENTION, masks_of_parallel_rows
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.linear import LinearLoss, joined, linear_loss
from draftkit.train.losses.table import Loss, LossText, parse_loss
from draftkit.train.losses.teacher import OutputHead, Teacher, require_plain_logits, target_head
from draftkit.train.losses.weights import Reduction
from draftkit.train.parallel import (
    ConditionalDrop,
    ParallelRows,
    bounded_partitions,
    check_mask_token,
    default_mask_token,
    drafts_of,
    row_weights,
)
from draftkit.train.recipes.causal_lm_draft_model import require_causal_lm, require_own_names
from draftkit.train.recipes.recipe import Chains, Origin, Recipe, StepOutcome, step_statistics
from draftkit.train.settings import Index, Positive, Repeats

KINDS = ("draft-model", "pard")


@dataclass(frozen=True)
class PardOptions:
    """The recipe's settings, with the defaults of PARD.

    `drop`: which chains are trained how deep. `reduction`: over rows and steps; None is the mean over all rows.
    """

    steps: Repeats = setting("The tokens of a chain.", 8, unit="tokens")
    drop: ConditionalDrop = field(default_factory=ConditionalDrop)
    loss: LossText = setting(
        "The loss of each row, as ce, kl or 0.1*ce + kl; ce is that of the text's tokens, others ask the target.",
        "ce",
    )
    reduction: Reduction | None = None
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    train_prompt: bool = setting("Whether all of a text is drafted, not only what the target produced.", True)
    mask_token_id: Index | None = setting(
        "A token that no text contains; none for the draft's own, or the last one unused in its tokenizer.", None
    )


class Pard(Recipe):
    """Trains PARD drafts."""

    needs_draft = True
    options_type = PardOptions
    draft: PreTrainedModel

    def __init__(self, origin: Origin, options: PardOptions):
        lm = pard_spec(origin, options)
        assert origin.draft is not None
        device = origin.target.device
        draft = load_target(origin.draft.path, device=str(device), dtype=torch.float32, attention=MASKED_ATTENTION)
        require_plain_logits(draft, "draft")
        narrow(draft, Sight(lm.sliding_window, lm.sink_tokens))
        spec = DraftSpec(architecture=lm, dtype="F32")
        super().__init__(draft.requires_grad_(True), spec)
        require_own_names(self)
        assert lm.parallel is not None
        self.mask_token_id = lm.parallel.mask_token_id
        self.head = target_head(origin.target, None, options.temperature)
        self.options = options
        self.loss = parse_loss(options.loss)

    @property
    def aux_layers(self) -> AuxLayers | None:
        return None

    @property
    def layers_run_once(self) -> Sequence[nn.Module]:
        return decoder_layers(decoder_of(self.draft))

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        k = self.options.steps
        possible = batch.complete(k) if self.options.train_prompt else batch.drafted(k)
        kept = self.options.drop.keep(possible.roll(1, -1))
        teacher = self.head.teacher(batch.last[0])
        rows = ParallelRows(kept, batch)
        counted = kept.to(batch.tokens.device)
        weights = row_weights(counted, self.options.reduction)
        teacher_or_text = teacher if self.loss.needs_target else None
        found = self.measure(batch, rows, teacher_or_text, weights, self.loss)
        return StepOutcome(found.value, step_statistics(found, *rows.drafts, counted))

    def measure(
        self,
        batch: TrainingBatch,
        rows: ParallelRows,
        teacher: Teacher | None,
        weights: Tensor,
        loss: Loss,
    ) -> LinearLoss:
        """The rows of a pass that draft, against the text and the target's distribution; `weights` float32 [K, N]."""
        depths, anchors = rows.drafts
        taught = (anchors + depths) % batch.tokens.shape[1]
        following = shifted(batch.tokens[0], 1)[taught]
        layer = self.draft.get_output_embeddings()
        return linear_loss(
            self.hidden(batch, rows),
            OutputHead(layer.weight, layer.bias),
            None if teacher is None else teacher.at(taught),
            weights[depths, anchors],
            loss,
            labels=following,
            emitted=None if teacher is None else following,
        )

    def hidden(self, batch: TrainingBatch, rows: ParallelRows) -> Tensor:
        """The states of the rows that draft, which the head reads: [M, H]."""
        true = batch.tokens[:, rows.context]
        tokens = rows.place(true, true.new_tensor(self.mask_token_id))
        states = self.draft.get_decoder()(
            input_ids=tokens, position_ids=rows.positions, use_cache=False, masks=masks_of_parallel_rows(rows)
        ).last_hidden_state
        return states[0, rows.drafting]

    @torch.no_grad()
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        drafted = batch.drafted(k)
        by_anchor = drafted.roll(1, -1)
        teacher = self.head.teacher(batch.last[0])
        loss = parse_loss("tv")
        rows = [ParallelRows(part, batch) for part in bounded_partitions(by_anchor)]
        found = joined([self.measure(batch, part, teacher, by_anchor.float(), loss) for part in rows])
        depths, anchors = drafts_of(rows)
        return Chains.of(drafted, found, depths, anchors - 1)


def pard_spec(origin: Origin, options: PardOptions) -> CausalLMSpec:
    """The architecture of the origin's draft as PARD. Raises `DraftkitError` where it cannot be one."""
    if origin.draft is None:
        raise DraftkitError(
            "recipe pard has no draft to start from", hint="pass a small causal language model as draft"
        )
    spec = require_causal_lm(origin, KINDS)
    mask = options.mask_token_id
    if mask is None:
        mask = (
            default_mask_token(origin.draft.path, spec.vocab_size)
            if spec.parallel is None
            else spec.parallel.mask_token_id
        )
    check_mask_token(mask, spec.vocab_size)
    return replace(spec, parallel=ParallelDrafting(mask_token_id=mask, mask_state=False))
