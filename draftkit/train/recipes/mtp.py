"""MTP: a target's own head, trained on as serving uses it: one layer, K steps, each fed by the one before (FastMTP).

Serving runs the head again on its own state for every further token, which it was not trained for; step t at position i
counts where serving would draft there (`TrainingBatch.drafted`). Of several modules that draft in turn, step t trains
the t-th; beyond their number they are used again, and see keys of their own step as in the first round of a text, where
serving has in later rounds those of a module's last step for the earlier rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.io.dtypes import FLOATS
from draftkit.io.settings import setting
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import Draft
from draftkit.layout.spec import DraftSpec
from draftkit.models.chain import ChainOutput
from draftkit.models.mtp import MtpModel, fill_mtp, load_mtp, stored_mtp
from draftkit.targets.states import AuxLayers
from draftkit.train.attention import CHAIN_ATTENTION, ChainSteps
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.table import LossText, parse_loss
from draftkit.train.losses.weights import Reduction
from draftkit.train.recipes.bases.chain import ChainRecipe, Step
from draftkit.train.recipes.recipe import Origin, StepOutcome, step_statistics
from draftkit.train.settings import Positive, Repeats


@dataclass(frozen=True)
class MtpOptions:
    """The recipe's settings. `reduction` is over rows and steps."""

    steps: Repeats = setting("The steps of the head, each on the state of the one before.", 3)
    loss: LossText = setting("The loss of each step, as ce, kl or 0.1*ce + kl.", "kl")
    reduction: Reduction = field(default_factory=lambda: Reduction(decay=0.6))
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)


class Mtp(ChainRecipe):
    """Trains the head of a target."""

    options_type = MtpOptions
    starts_from = "mtp"
    draft: MtpModel

    def __init__(self, origin: Origin, options: MtpOptions):
        draft = _own_head(origin)
        self.num_target_layers = origin.target.config.get_text_config().num_hidden_layers
        super().__init__(draft, DraftSpec(architecture=draft.spec, dtype="F32"), origin, options.temperature)
        assert origin.draft is not None
        self.options = options
        self.loss = parse_loss(options.loss)
        known = stored_mtp(draft, draft.state_dict())
        self.kept = {name: handle.load() for name, handle in origin.draft.tensors.items() if name not in known}
        for name, parameter in draft.named_parameters():
            parameter.requires_grad_(not name.startswith(("embed_tokens.", "lm_head.")))

    @property
    def aux_layers(self) -> AuxLayers | None:
        return None if self.draft.spec.hidden_state == "after_norm" else AuxLayers((self.num_target_layers,))

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        drafted = batch.drafted(self.options.steps)
        rows = self.rows(self.steps(batch, drafted))
        teacher = self.head.teacher(batch.last[0])
        found = self.compare(batch, rows, teacher, self.options.reduction.weights(drafted), self.loss)
        return StepOutcome(found.value, step_statistics(found, rows.steps, rows.positions, drafted))

    def steps(self, batch: TrainingBatch, drafted: Tensor, *, detached: bool = False) -> list[Step]:
        if self.draft.spec.modules_run == 1:
            return super().steps(batch, drafted, detached=detached)
        return list(self._in_turn(batch, drafted))

    def _in_turn(self, batch: TrainingBatch, drafted: Tensor) -> Iterator[Step]:
        """Each step by the next module, over all positions: it sees those before it in its own step."""
        hidden = self.draft.fuse((batch.last if batch.features is None else batch.features).float())
        for t, wanted in enumerate(drafted):
            chain = ChainSteps(batch.sample_ids)
            output = self.draft(shifted(batch.tokens, 1 + t), hidden, batch.positions, step=t, chain=chain)
            rows = wanted.nonzero()[:, 0]
            yield Step(rows, ChainOutput(output.head_input[:, rows], output.feedback[:, rows]))
            hidden = output.feedback

    def stored(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return stored_mtp(self.draft, state) | self.kept

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            fill_mtp(self.draft, tensors, Path("checkpoint"))


def _own_head(origin: Origin) -> MtpModel:
    """The origin's head in float32. Raises `DraftkitError` for a draft of another kind, and for quantized heads."""
    draft = origin.draft
    assert draft is not None
    if draft.spec.method != "mtp":
        raise DraftkitError(
            f"the draft is of the kind {draft.spec.method}", where=draft.path, hint="recipe mtp trains a target's head"
        )
    _check_plain(draft)
    return load_mtp(draft, origin.target, attention=CHAIN_ATTENTION, dtype=torch.float32)


def _check_plain(draft: Draft) -> None:
    quantized = [t.name for t in draft.spec.architecture.expect(MtpSpec).weights if t.dtype not in FLOATS]
    if quantized:
        raise DraftkitError(
            f"the head is quantized ({quantized[0]})", where=draft.path, hint="train that of the original checkpoint"
        )
