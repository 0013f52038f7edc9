"""EAGLE-3: a training-time test of K steps on states of several target layers (arXiv 2503.01840).

The loss of step t at position i counts where serving would draft there (`TrainingBatch.drafted`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from draftkit.io.settings import setting
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.target import default_aux_layer_ids
from draftkit.train.batch import TrainingBatch
from draftkit.train.losses.table import LossText, parse_loss
from draftkit.train.losses.weights import Reduction
from draftkit.train.recipes.bases.eagle import EagleFamily, eagle_draft, fresh_eagle
from draftkit.train.recipes.bases.initialization import check_layers, fresh_decoder
from draftkit.train.recipes.recipe import Origin, StepOutcome, step_statistics
from draftkit.train.settings import Index, Positive, Repeats, Size, sinks_setting, window_setting


@dataclass(frozen=True)
class Eagle3Options:
    """The recipe's settings; those of the architecture hold for a new draft only.

    `reduction` is over rows and steps.
    """

    steps: Repeats = setting("The steps of the training-time test.", 7)
    loss: LossText = setting("The loss of each step, as ce, kl or 0.1*ce + kl.", "kl")
    reduction: Reduction = field(default_factory=lambda: Reduction(decay=0.8))
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    out_of_vocabulary: Literal["keep", "drop"] = setting(
        "What becomes of rows whose token the draft vocabulary lacks: kept and taught within it "
        "(speculators), or dropped.",
        "keep",
    )
    train_head: bool = setting("Whether the draft's own output layer is trained.", True)
    train_embeddings: bool = setting("Whether the draft's own embedding is trained.", False)
    layers: tuple[Index, ...] = setting("The captured target layers; (2, n/2, n−3) where empty.", ())
    num_layers: Repeats = setting("The layers of the draft.", 1)
    norm_before_residual: bool = setting(
        "Whether layer 0's residual is the normed hidden state instead of the raw one.", False
    )
    feature_norm: Literal["none", "joint", "per_layer"] = setting(
        "An RMSNorm before fc: one over all captured states (joint) or one for each (per_layer).", "joint"
    )
    norm_output: bool = setting("Whether the next step gets the layer output after the final norm (EAGLE-3.1).", False)
    sliding_window: Size | None = window_setting()
    sink_tokens: Index = sinks_setting()


class Eagle3(EagleFamily):
    """Trains EAGLE-3 drafts."""

    options_type = Eagle3Options
    optimizer = "muon"

    def __init__(self, origin: Origin, options: Eagle3Options):
        draft = eagle_draft(origin, self.name, lambda: fresh_eagle(eagle3_spec(origin, options), origin))
        super().__init__(draft, origin, options.temperature)
        self.options = options
        self.loss = parse_loss(options.loss)
        self.train_own(head=options.train_head, embeddings=options.train_embeddings)

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        drafted = batch.drafted(self.options.steps)
        rows = self.rows(self.steps(batch, drafted))
        teacher = self.head.teacher(batch.last[0])
        counted = drafted
        if self.options.out_of_vocabulary == "drop":
            counted = drafted & self.drawable(teacher, drafted)
        weights = self.options.reduction.weights(counted)
        found = self.compare(batch, rows, teacher, weights, self.loss)
        return StepOutcome(found.value, step_statistics(found, rows.steps, rows.positions, counted))


def eagle3_spec(origin: Origin, options: Eagle3Options) -> EagleSpec:
    """The architecture of a new draft."""
    target = origin.target.config.get_text_config()
    layers = options.layers or default_aux_layer_ids(target.num_hidden_layers)
    check_layers(layers, origin.target)
    return EagleSpec(
        decoder=fresh_decoder(origin.target, options.num_layers, options.sliding_window, options.sink_tokens),
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if origin.d2t_ids is None else len(origin.d2t_ids),
        target_hidden_size=target.hidden_size,
        aux_layer_ids=layers,
        token_entry="attention",
        concatenation="embedding_hidden",
        fusion_bias=False,
        feature_norm=options.feature_norm,
        embedding_norm=True,
        hidden_norm=True,
        input_norm=False,
        norm_before_residual=options.norm_before_residual,
        final_norm=True,
        feedback="post_norm" if options.norm_output else "pre_norm",
        logit_scale=1.0,
        embed_tokens="draft" if options.train_embeddings else "target",
        lm_head="draft",
        parallel=None,
    )
