"""PARD: a causal language model made into a parallel draft (arXiv 2504.18583), and PARD-2 (AMD-AGI/PARD).

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
from draftkit.layout.families.causal_lm import CausalLMSpec, TargetFeatures
from draftkit.layout.spec import DraftSpec
from draftkit.targets.attention import Sight, narrow
from draftkit.targets.states import FINAL, AuxLayers, decoder_layers, decoder_of
from draftkit.targets.target import load_target
from draftkit.train.attention import MASKED_ATTENTION, masks_of_parallel_rows
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.linear import LinearLoss, joined, linear_loss
from draftkit.train.losses.table import Loss, LossText, parse_loss
from draftkit.train.losses.teacher import OutputHead, Teacher, require_plain_logits, rows_at_once, target_head
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
from draftkit.train.recipes.bases.initialization import INITIAL_STD
from draftkit.train.recipes.causal_lm_draft_model import require_causal_lm, require_own_names
from draftkit.train.recipes.recipe import Chains, Origin, Recipe, StepOutcome, step_statistics
from draftkit.train.settings import Finite, Index, Positive, Repeats, Share

KINDS = ("draft-model", "pard", "pard-2")


@dataclass(frozen=True)
class PardOptions:
    """The recipe's settings, with the defaults of PARD.

    `drop`: which chains are trained how deep (PARD-2: 16 steps, at least 0.1). `reduction`: over rows and steps; None
    is the mean over all rows.
    """

    steps: Repeats = setting("The tokens of a chain.", 8, unit="tokens")
    drop: ConditionalDrop = field(default_factory=ConditionalDrop)
    loss: LossText = setting(
        "The loss of each row, as ce, kl or 0.1*ce + kl; ce is that of the text's tokens, others ask the "
        "target (PARD-2: 0.1*ce + kl).",
        "ce",
    )
    reduction: Reduction | None = None
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    train_prompt: bool = setting(
        "Whether all of a text is drafted, not only what the target produced (PARD-2: false).", True
    )
    confidence: bool = setting(
        "Whether a row counts as much as the target believed in the draft tokens before it (PARD-2: true).", False
    )
    mask_token_id: Index | None = setting(
        "A token that no text contains; none for the draft's own, or the last one unused in its tokenizer.", None
    )
    feature_layers: tuple[int, ...] = setting(
        "The target's states added to the embeddings of a draft that has none yet, as indexes of "
        "transformers' hidden_states (PARD-2: −1, −8, −16, −24).",
        (),
    )
    feature_scale: Finite = setting("The factor on the added states.", 0.02, needs="options.feature_layers")
    feature_dropout: Share = setting(
        "The share of samples that are drafted without added states (PARD-2: 0.1), so that the draft can do both.", 0.0
    )


class Pard(Recipe):
    """Trains PARD and PARD-2 drafts. Of PARD-2, `draft` has the projection as `target_proj`."""

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
        if lm.target_features is not None:
            draft.target_proj = _projection(origin, lm.target_features, draft.config.get_text_config().hidden_size)
        spec = DraftSpec(architecture=lm, dtype="F32")
        super().__init__(draft.requires_grad_(True), spec)
        require_own_names(self)
        assert lm.parallel is not None
        self.mask_token_id = lm.parallel.mask_token_id
        self.features = lm.target_features
        self.num_states = origin.target.config.get_text_config().num_hidden_layers + 1
        self.head = target_head(origin.target, None, options.temperature)
        self.options = options
        self.loss = parse_loss(options.loss)

    @property
    def aux_layers(self) -> AuxLayers | None:
        if self.features is None:
            return None
        states = (index % self.num_states for index in self.features.layer_ids)  # transformers' last one is normed
        return AuxLayers(tuple(FINAL if state == self.num_states - 1 else state for state in states))

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
        believed = counted * self.confidence(batch, teacher, k) if self.options.confidence else counted
        weights = row_weights(believed, self.options.reduction)
        teacher_or_text = teacher if self.loss.needs_target else None
        found = self.measure(batch, rows, teacher_or_text, weights, self.loss, self._without(batch))
        return StepOutcome(found.value, step_statistics(found, *rows.drafts, counted))

    def confidence(self, batch: TrainingBatch, teacher: Teacher, k: int) -> Tensor:
        """The target's probability of all tokens of a chain before the one that depth d drafts: [K, N] by anchors."""
        probability = _probability(teacher, shifted(batch.tokens[0], 1))
        steps = [torch.ones_like(probability), *(shifted(probability, d) for d in range(k - 1))]
        return torch.stack(steps).cumprod(0)

    def _without(self, batch: TrainingBatch) -> Tensor | None:
        """Whether the features of each sample are dropped, bool [N] by its number; drawn by torch's generator of the
        CPU."""
        if self.features is None or self.options.feature_dropout == 0:
            return None
        return torch.rand(batch.tokens.shape[1]) < self.options.feature_dropout

    def measure(
        self,
        batch: TrainingBatch,
        rows: ParallelRows,
        teacher: Teacher | None,
        weights: Tensor,
        loss: Loss,
        without: Tensor | None = None,
    ) -> LinearLoss:
        """The rows of a pass that draft, against the text and the target's distribution; `weights` float32 [K, N]."""
        depths, anchors = rows.drafts
        taught = (anchors + depths) % batch.tokens.shape[1]
        following = shifted(batch.tokens[0], 1)[taught]
        layer = self.draft.get_output_embeddings()
        return linear_loss(
            self.hidden(batch, rows, without),
            OutputHead(layer.weight, layer.bias),
            None if teacher is None else teacher.at(taught),
            weights[depths, anchors],
            loss,
            labels=following,
            emitted=None if teacher is None else following,
        )

    def hidden(self, batch: TrainingBatch, rows: ParallelRows, without: Tensor | None = None) -> Tensor:
        """The states of the rows that draft, which the head reads: [M, H]. `without` bool [D]: samples that have no
        features."""
        true = batch.tokens[:, rows.context]
        tokens = rows.place(true, true.new_tensor(self.mask_token_id))
        embeddings = self.draft.get_input_embeddings()(tokens)
        if self.features is not None:
            embeddings = embeddings + self.projected(batch, rows, without)
        states = self.draft.get_decoder()(
            inputs_embeds=embeddings, position_ids=rows.positions, use_cache=False, masks=masks_of_parallel_rows(rows)
        ).last_hidden_state
        return states[0, rows.drafting]

    def projected(self, batch: TrainingBatch, rows: ParallelRows, without: Tensor | None) -> Tensor:
        """The projected features that PARD-2 adds to the embeddings [1, R, H]: those before the anchor, zero before the
        first."""
        assert batch.features is not None
        assert self.features is not None
        absent = batch.positions == 0
        if without is not None:
            absent |= without.to(absent.device)[batch.sample_ids]
        before = batch.features.float().roll(1, 1).masked_fill(absent[..., None], 0)
        added = self.draft.get_submodule("target_proj")(before[:, rows.context]) * self.features.scale
        return added[:, rows.anchors - rows.context.start]

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
    """The architecture of the origin's draft as PARD or PARD-2. Raises `DraftkitError` where it cannot be either."""
    if origin.draft is None:
        raise DraftkitError(
            "recipe pard has no draft to start from", hint="pass a small causal language model as draft"
        )
    spec = require_causal_lm(origin, KINDS)
    target = origin.target.config.get_text_config()
    mask = options.mask_token_id
    if mask is None:
        mask = (
            default_mask_token(origin.draft.path, spec.vocab_size)
            if spec.parallel is None
            else spec.parallel.mask_token_id
        )
    check_mask_token(mask, spec.vocab_size)
    features = spec.target_features
    if features is None and options.feature_layers:
        features = TargetFeatures(
            layer_ids=options.feature_layers,
            size=len(options.feature_layers) * target.hidden_size,
            scale=options.feature_scale,
            projection_bias=False,
        )
    if features is not None:
        _check_layers(features, target.num_hidden_layers, target.hidden_size)
    return replace(spec, parallel=ParallelDrafting(mask_token_id=mask, mask_state=False), target_features=features)


def _check_layers(features: TargetFeatures, num_layers: int, hidden_size: int) -> None:
    indexes, size = features.layer_ids, len(features.layer_ids) * hidden_size
    if min(indexes) < -num_layers - 1 or max(indexes) > num_layers or features.size != size:
        raise DraftkitError(
            f"the draft reads {features.size} numbers of the target's states {list(indexes)}",
            expected=f"{size}, of states from {-num_layers - 1} to {num_layers}",
        )


def _projection(origin: Origin, features: TargetFeatures, hidden_size: int) -> nn.Linear:
    """The origin's projection where it has one, else a new one."""
    assert origin.draft is not None
    projection = nn.Linear(features.size, hidden_size, bias=features.projection_bias)
    prefix = "target_proj."
    stored = {name.removeprefix(prefix): t for name, t in origin.draft.tensors.items() if name.startswith(prefix)}
    if stored:
        projection.load_state_dict({name: tensor.load() for name, tensor in stored.items()})
    else:
        nn.init.normal_(projection.weight, std=INITIAL_STD)
    return projection.to(origin.target.device)


@torch.no_grad()
def _probability(teacher: Teacher, tokens: Tensor) -> Tensor:
    """The target's probability of `tokens` int64 [N], each after its position: float32 [N]."""
    found = []
    with torch.autocast(tokens.device.type, enabled=False):
        places = torch.arange(len(tokens), device=tokens.device)
        for rows in places.split(rows_at_once(len(teacher.head), tokens.device)):
            distribution = teacher.logits(rows).log_softmax(-1)
            found.append(distribution.gather(-1, tokens[rows, None])[:, 0].exp())
    return torch.cat(found)
