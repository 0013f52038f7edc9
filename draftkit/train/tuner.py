"""A draft beside a target whose weights may change: judged and trained a step at a time, by whoever runs the loop.

For loops that are not draftkit's: reinforcement learning that updates the target, or serving that collects answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from draftkit.data.columns import SampleTable
from draftkit.data.packing import PackedRows
from draftkit.data.sample_files import read_training_samples
from draftkit.data.sample_media import MediaOfSamples, no_media
from draftkit.data.samples import Sample
from draftkit.data.states.online import OnlineStates, check_lengths, load_training_target
from draftkit.errors import DraftkitError
from draftkit.loading import OpenedDraft, open_target
from draftkit.results.cell import Interval
from draftkit.results.statistics import Sums, length_over_prompts
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import save_draft
from draftkit.train.config import TrainConfig
from draftkit.train.lora import add_adapters
from draftkit.train.optimizers import optimizer_of
from draftkit.train.recipes import recipe_class, recipe_names
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.settings import LoraSettings, Optimization
from draftkit.train.validation import Judged, Mode, judge

TOKENS_PER_ROW = 2048


@dataclass(frozen=True)
class SimulatedAcceptance:
    """The acceptance length that serving would have on some answers.

    `sums`: of each sample with a round, by its number, the accepted drafts and the rounds; `categories`: of each
    sample.
    """

    sums: Mapping[int, tuple[int, int]]
    categories: tuple[str, ...]

    @cached_property
    def length(self) -> Interval:
        """The mean length with the 95 % interval over samples; NaN without any round."""
        return length_over_prompts(list(self.sums.values()))

    @cached_property
    def by_category(self) -> dict[str, Interval]:
        """The length of each category of samples."""
        return {name: length_over_prompts(self.of(name)) for name in sorted(set(self.categories))}

    def of(self, category: str) -> Sums:
        """The sums of a category's samples."""
        return [found for number, found in self.sums.items() if self.categories[number] == category]


class DraftTuner:
    """A draft in training on a target in this process.

    `draft`: a checkpoint of any format, by its name or opened already. `target`: its name, or the model itself, which
    then has to be one that transformers runs in its own way; its weights may change in place between calls. `recipe`:
    None for the one of the draft's kind, with its own `options`. `media` reads the images of samples (`SampleMedia`);
    without it samples with images are refused. Raises `DraftkitError` for what cannot be trained.
    """

    def __init__(
        self,
        draft: str | Path | OpenedDraft,
        target: str | PreTrainedModel,
        *,
        recipe: str | None = None,
        options: Mapping[str, object] | None = None,
        optimization: Optimization | None = None,
        lora: LoraSettings | None = None,
        tokens_per_row: int = TOKENS_PER_ROW,
        device: str | None = None,
        media: MediaOfSamples = no_media,
    ):
        self.media = media
        self.target_name = target if isinstance(target, str) else target.name_or_path
        named = draft.target if isinstance(draft, OpenedDraft) else open_target(self.target_name)
        if isinstance(target, str):
            place = device_named(device)
            target = load_training_target(named, device=place, dtype=dtype_named(None, place))
            tune_for_cpu(target)
        self.target = target
        self.tokens_per_row = tokens_per_row
        self.settings = optimization or Optimization()
        with ExitStack() as stack:
            source = draft if isinstance(draft, OpenedDraft) else OpenedDraft(str(draft), named, stack)
            opened = source.draft
            name = recipe or recipe_of(opened.spec.method)
            config = TrainConfig(
                recipe=name, target=self.target_name, draft=source.name, data="", out="",
                optimization=self.settings, options=dict(options or {}),
            )  # fmt: skip
            started = recipe_class(name).start(Origin(target, opened), config.recipe_options())
            self.recipe: Recipe = started.to(target.device)
            self._files = opened.files
        if lora is not None:
            parallel = getattr(self.recipe.spec.architecture, "parallel", None) is not None
            add_adapters(self.recipe.draft, lora, base=None, parallel=parallel)
        self._parameters = [p for p in self.recipe.parameters() if p.requires_grad]
        self._optimizer = optimizer_of(self._parameters, config, self.recipe.spec)
        self._states = OnlineStates(target, self.recipe.aux_layers)

    def simulate_acceptance(
        self, samples: str | Path | Sequence[Sample], *, k: int = 4, mode: Mode = "greedy"
    ) -> SimulatedAcceptance:
        """What serving would accept with `k` drafts a round on samples whose loss mask holds the target's own answers,
        drawn as `mode` says."""
        samples = self._checked(samples)
        rows, judged = PackedRows(samples, range(len(samples)), self.tokens_per_row), list[Judged]()
        self.recipe.eval()
        for number in range(len(rows)):
            with self._autocast():
                batch = self._batch(rows, number)
                judged += judge(self.recipe, batch, rows[number]["numbers"], k, mode)
        sums = {j.number: (sum(r.accepted for r in j.rounds), len(j.rounds)) for j in judged if j.rounds}
        return SimulatedAcceptance(dict(sorted(sums.items())), tuple(sample.category for sample in samples))

    def step(self, samples: str | Path | Sequence[Sample]) -> float:
        """One step of the optimizer on all samples; the loss before it, the mean over rows of packed samples.

        Raises `DraftkitError` for a loss that is not finite; the weights are then as they were.
        """
        samples = self._checked(samples)
        rows = PackedRows(samples, range(len(samples)), self.tokens_per_row)
        self.recipe.train()
        total = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for number in range(len(rows)):
            with self._autocast():
                loss = self.recipe(self._batch(rows, number)).loss / len(rows)
            if not torch.isfinite(loss):
                raise DraftkitError(f"the loss is {float(loss.detach())}", hint="lower optimization.lr")
            loss.backward()
            total += float(loss.detach())
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        self._optimizer.step()
        return total

    def save(self, out: str | Path, *, force: bool = False) -> Path:
        """Write the draft as it is, adapters merged, in the target's dtype: a folder that engines take."""
        save_draft(
            Path(out), self.recipe.spec, self.recipe.tensors(), target=self.target_name, files=self._files,
            dtype=self.target.dtype, force=force,
        )  # fmt: skip
        return Path(out)

    def _checked(self, samples: str | Path | Sequence[Sample]) -> Sequence[Sample]:
        """The samples; every call begins here, so that the target is taken as it now is."""
        if isinstance(samples, str | Path):
            samples = read_training_samples(Path(samples))
        if not samples:
            raise DraftkitError("there are no samples", expected="answers of the target's own")
        if self.media is no_media and SampleTable.of(samples).has_images():
            raise DraftkitError("the samples have images", hint="say what reads them: DraftTuner(…, media=…)")
        check_lengths(samples, self.target.config)
        self.recipe.follow(self.target)
        return samples

    def _batch(self, rows: PackedRows, number: int) -> TrainingBatch:
        row, device = rows[number], self.target.device
        tokens, positions, sample_ids = (row[name].to(device) for name in ("tokens", "positions", "sample_ids"))
        media = self.media([rows.samples[number] for number in row["numbers"]])
        states = self._states.states(tokens, positions, sample_ids, media=media)
        return TrainingBatch(tokens, positions, sample_ids, row["loss_mask"].to(device), states.features, states.last)

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        """The precision of training: bfloat16 on a GPU."""
        device = self.target.device.type
        return nullcontext() if device == "cpu" else torch.autocast(device, dtype=torch.bfloat16)


def simulate_acceptance(
    draft: str | Path,
    target: str | PreTrainedModel,
    samples: str | Path | Sequence[Sample],
    *,
    k: int = 4,
    mode: Mode = "greedy",
    device: str | None = None,
) -> SimulatedAcceptance:
    """The acceptance length that a draft of any format would have in serving, from one teacher-forced pass.

    `samples`: a file that `draftkit data prepare` wrote, or `Sample`s, whose loss masks hold answers of the target's
    own: decoded greedily, where the result is what decoding measures, round for round, or sampled, as `mode` says.
    Raises `DraftkitError`, also for a kind of draft that draftkit does not train.
    """
    return DraftTuner(draft, target, device=device).simulate_acceptance(samples, k=k, mode=mode)


def recipe_of(method: str) -> str:
    """The recipe that trains drafts of a method. Raises `DraftkitError` where there is none."""
    if method not in recipe_names():
        raise DraftkitError(f"no recipe trains a draft of the kind {method}", expected=", ".join(recipe_names()))
    return method
