"""EAGLE-1 and HASS: the draft's states are regressed onto the target's (arXiv 2401.15077, 2408.15766).

EAGLE-1 trains one pass on true features. HASS adds passes on the draft's own: its forward f at row r is step f − 1 of
the chain from position r − f + 1, with the same keys, so the steps of `chain_steps` are its forwards, each with
detached features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from draftkit.convert.formats.eagle.eagle import fusion_spec
from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.families.eagle import EagleSpec
from draftkit.train.batch import TrainingBatch
from draftkit.train.losses.table import LossText, parse_loss
from draftkit.train.losses.weights import Reduction
from draftkit.train.recipes.bases.chain import Step
from draftkit.train.recipes.bases.eagle import EagleFamily, eagle_draft, fresh_eagle
from draftkit.train.recipes.bases.initialization import fresh_decoder
from draftkit.train.recipes.recipe import Origin, StepOutcome, step_statistics
from draftkit.train.settings import Index, Positive, Repeats, Size, Weight, sinks_setting, window_setting

NOISE_LENGTH = 512  # tokens of the samples for which the published noise was chosen


@dataclass(frozen=True)
class EagleOptions:
    """The recipe's settings; those of the architecture hold for a new draft only. `HASS` has those of HASS."""

    forwards: Repeats = setting(
        "How many forwards are trained: 1 is EAGLE-1; the losses of more are added up, as HASS does.", 1
    )
    regression: Weight = setting("The weight of the smooth L1 distance between states.", 1.0)
    loss: LossText = setting("The loss on tokens, as ce, kl or 0.1*ce + kl.", "0.1*soft_ce")
    noise: Weight = setting("The width of the uniform noise on the features, 0 for none.", 0.2)
    noise_scale: Literal["length", "fixed"] = setting(
        "The noise times 512 / sample length (length, as published in code), or as it is (fixed, as published"
        " in print).",
        "length",
        needs="options.noise",
    )
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    num_layers: Repeats = setting("The layers of the draft.", 1)
    fusion_bias: bool = setting("Whether fc has a bias, which vLLM does not read.", False)
    sliding_window: Size | None = window_setting()
    sink_tokens: Index = sinks_setting()


HASS = EagleOptions(forwards=3, loss="0.1*soft_ce + top_k(10)")


class Eagle(EagleFamily):
    """Trains EAGLE-1 drafts."""

    options_type = EagleOptions

    def __init__(self, origin: Origin, options: EagleOptions):
        draft = eagle_draft(origin, self.name, lambda: fresh_eagle(eagle_spec(origin, options), origin))
        super().__init__(draft, origin, options.temperature)
        self.options = options
        self.loss = parse_loss(options.loss)
        self.reduction = Reduction(normalized=False)

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        drafted = batch.drafted(self.options.forwards)
        steps = self.steps(self.noisy(batch), drafted, detached=True)
        rows = self.rows(steps)
        weights = self.reduction.weights(drafted)
        found = self.compare(batch, rows, self.head.teacher(batch.last[0]), weights, self.loss)
        distance = torch.dot(weights[rows.steps, rows.positions], state_distances(batch, steps))
        statistics = step_statistics(found, rows.steps, rows.positions, drafted)
        statistics["regression"] = distance.detach()
        return StepOutcome(found.value + self.options.regression * distance, statistics)

    def noisy(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with noise on what the draft reads; what it is taught stays as it is."""
        if not self.training or self.options.noise == 0:
            return batch
        noise = torch.rand_like(batch.last, dtype=torch.float32) - 0.5
        width = torch.full_like(noise[..., :1], self.options.noise)
        if self.options.noise_scale == "length":
            width *= NOISE_LENGTH / sample_lengths(batch.sample_ids)[..., None]
        return batch._replace(last=batch.last + noise * width)


def state_distances(batch: TrainingBatch, steps: list[Step]) -> Tensor:
    """The smooth L1 distance of each row's feedback to the state that it stands for: float32 [R], step after step."""
    size = batch.tokens.shape[1]
    distances = []
    for t, step in enumerate(steps):
        true = batch.last[0, (step.rows + 1 + t) % size]
        distances.append(smooth_l1(step.output.feedback[0], true))
    return torch.cat(distances)


def smooth_l1(draft: Tensor, target: Tensor) -> Tensor:
    """Huber's loss with β = 1, the mean over the width: float32 [N] of states [N, H] (EAGLE-1, HASS)."""
    return smooth_l1_loss(draft.float(), target.float(), reduction="none").mean(-1)


def sample_lengths(sample_ids: Tensor) -> Tensor:
    """How long the sample of each position is: int64 [1, N], of padding how long that is."""
    numbers = sample_ids + 1
    counts = numbers.new_zeros(numbers.shape[1] + 1)  # for as many samples as there can be
    return counts.index_add_(0, numbers[0], torch.ones_like(numbers[0]))[numbers]


def eagle_spec(origin: Origin, options: EagleOptions) -> EagleSpec:
    """The architecture of a new draft."""
    if origin.d2t_ids is not None:
        raise DraftkitError(
            "a draft vocabulary", expected="none: EAGLE-1 drafts read the target's head", hint="or recipe eagle3"
        )
    return fusion_spec(
        fresh_decoder(origin.target, options.num_layers, options.sliding_window, options.sink_tokens),
        origin.target.config.get_text_config().vocab_size,
        fusion_bias=options.fusion_bias,
        embed_tokens="target",
    )
