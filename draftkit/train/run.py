"""A training run from its configuration: `draftkit train`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from transformers import TrainerCallback

from draftkit.convert.api import ADAPTER_FOLDER
from draftkit.data.packing import PackedRow
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.online import OnlineStates, States, load_target_embeddings, load_training_target
from draftkit.data.states.stream import StreamedStates, finish_stream
from draftkit.data.vocabulary import Ceiling, plan_vocabulary, token_counts
from draftkit.hub.local_paths import copy_named
from draftkit.io.cache import local_file
from draftkit.io.lock import sole_writer
from draftkit.io.shown import Rows, Shown
from draftkit.loading import OpenedDraft, OpenedTarget, open_target
from draftkit.train.checkpoint import (
    CONFIG_FILE,
    INPUTS_FILE,
    load_tensors,
    newest_checkpoint,
    save_draft,
)
from draftkit.train.config import TrainConfig
from draftkit.train.log import said_of_judges
from draftkit.train.lora import has_adapters, load_adapter, save_adapter
from draftkit.train.recipes.recipe import Recipe
from draftkit.train.setup import LoadTarget, ReadyRun, read_split, set_up
from draftkit.train.streaming import Prefetch, open_stream
from draftkit.train.trainer import DraftTrainer, KeepBest, Patience, StatesOf
from draftkit.version import __version__

VERSIONS_FILE = "versions.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors")


@dataclass(frozen=True)
class Trained(Shown):
    """`draft`: the folder of the best checkpoint, or of the last where none was judged; None when the run was stopped.

    `metrics` are those of the last validation. `stopped_by`: the signal that stopped the run, None without one.
    """

    draft: Path | None
    checkpoint: Path
    metrics: dict[str, float]
    stopped_by: int | None = None

    def to_dict(self) -> dict[str, object]:
        """The result as `train --json` prints it."""
        draft = None if self.draft is None else str(self.draft)
        return {"draft": draft, "checkpoint": str(self.checkpoint), "metrics": self.metrics}

    def shown(self) -> Iterator[str | Rows]:
        """Where the draft is, and the metrics of the last validation."""
        yield f"stopped at {self.checkpoint}" if self.draft is None else str(self.draft)
        yield Rows(("held out", ""), [(k.removeprefix("eval_"), f"{v:.4g}") for k, v in self.metrics.items()])


def plan_draft_vocabulary(config: TrainConfig) -> list[Ceiling]:
    """What draft vocabularies of several sizes would allow, on the samples held out. No weights are loaded."""
    config.check()
    samples, training, validating = read_split(config)
    vocab_size = open_target(config.target).language_model.vocab_size
    counts = token_counts(samples, training, vocab_size)
    judged = [samples[number] for number in (validating if len(validating) else training)]
    return plan_vocabulary(judged, counts, config.validation.k)


def train_draft(
    config: TrainConfig,
    *,
    resume: bool = False,
    callbacks: tuple[TrainerCallback, ...] = (),
    target: OpenedTarget | None = None,
    draft: OpenedDraft | None = None,
) -> Trained:
    """Train a draft. `resume` goes on from the newest complete checkpoint in `config.out`, where it is of this run.

    `target` and `draft`: those that `config` names, where they have been opened already.

    Writes `out/checkpoint-N` (unified draft folders that can be resumed) and, when the run is finished, `out/draft` in
    the target's dtype. Raises `DraftkitError` for bad input, before the first step where it can be known, and while
    another run writes to `out`.
    """
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0":  # the first process holds it for all of the run
            stack.enter_context(sole_writer(Path(config.out), folder=True))
        ready = stack.enter_context(set_up(config, resume, loader_of(config), target, draft))
        source = stack.enter_context(open_source(config, ready))
        if ready.arguments.process_index == 0:  # the process that writes
            ready.inputs()  # digests are taken now, as files may be replaced while it trains
        newest = newest_checkpoint(Path(config.out))
        if newest is not None:
            _load_checkpoint(newest, recipe=ready.recipe)
        trainer = trainer_of(config, ready, source, callbacks=(*callbacks, *_watching(config)))
        if ready.validating is not None and trainer.is_world_process_zero():
            print(said_of_judges(len(ready.validating.numbers), len(ready.samples)), file=sys.stderr)
        trainer.train(resume_from_checkpoint=str(newest) if newest is not None else None)
        trained = _finish(trainer, config, ready)
        if source.stream is not None and trained.draft is not None and trainer.is_world_process_zero():
            finish_stream(source.stream.folder)
        return trained


def loader_of(config: TrainConfig) -> LoadTarget:
    """What a run loads of its target: all of it, or where its states are computed elsewhere, its ends."""
    return load_training_target if config.states == "" and config.stream is None else load_target_embeddings


class StateSource(NamedTuple):
    """What finds the target's states of a row; `prefetch` and `stream` where a worker computes them."""

    states_of: StatesOf
    prefetch: Prefetch | None = None
    stream: StreamedStates | None = None


@contextmanager
def open_source(config: TrainConfig, ready: ReadyRun) -> Iterator[StateSource]:
    """The source of a run's states: the target in this process, the files of `config.states`, or a worker."""
    if config.stream is None:
        yield StateSource(_states_of(config, ready, None))
        return
    with open_stream(config, config.stream, ready.opened, ready.recipe.aux_layers, ready.samples) as stream:
        yield StateSource(_states_of(config, ready, stream), Prefetch(stream.announce, config.stream.ahead), stream)


def trainer_of(
    config: TrainConfig, ready: ReadyRun, source: StateSource, *, callbacks: Sequence[TrainerCallback]
) -> DraftTrainer:
    """What trains a run that is ready."""
    return DraftTrainer(
        ready.recipe,
        ready.arguments,
        ready.training,
        ready.validating,
        states_of=source.states_of,
        prefetch=source.prefetch,
        save_draft=partial(_save_checkpoint, config=config, ready=ready),
        k=config.validation.k,
        mode=config.validation.mode,
        muon=config.optimizer == "muon",
        callbacks=callbacks,
    )


def _states_of(config: TrainConfig, ready: ReadyRun, stream: StreamedStates | None) -> StatesOf:
    target = ready.target
    if not config.states and stream is None:
        online = OnlineStates(target, ready.recipe.aux_layers)
        media = ready.media.of_row
        return lambda row: online.states(
            row["tokens"], row["positions"], row["sample_ids"], media=media(row["numbers"])
        )
    source = stored_states(config, ready) if stream is None else stream

    def of_files(row: PackedRow) -> States:
        features, last = source.states_of(row["numbers"], row["tokens"].shape[1])
        return States(None if features is None else features.to(target.device), last.to(target.device))

    return of_files


def stored_states(config: TrainConfig, ready: ReadyRun) -> OfflineStates:
    """The states in `config.states`. Raises `DraftkitError` for those that are not of this run."""
    is_first = os.environ.get("RANK", "0") == "0"  # all weights and samples are read to know them: once is enough
    return OfflineStates(
        config.states,
        data=local_file(config.data) if is_first else None,
        target=ready.opened.folder if is_first else None,
        aux_layers=ready.recipe.aux_layers,
        dtype=ready.target.dtype,
        verify=config.verify_states and is_first,
    )


def _watching(config: TrainConfig) -> Iterator[TrainerCallback]:
    """What saves and ends a run by the acceptance length."""
    settings = config.validation
    if settings.keep == "best":
        yield KeepBest()
    if settings.patience:
        yield Patience(settings.patience)


def _finish(trainer: DraftTrainer, config: TrainConfig, ready: ReadyRun) -> Trained:
    """The last checkpoint, and unless the run was stopped, the best one as the final draft."""
    state = trainer.state
    out = Path(config.out)
    last = out / f"checkpoint-{state.global_step}"
    trainer.accelerator.wait_for_everyone()  # one process could look before another has written
    if newest_checkpoint(out) != last:
        trainer.save_checkpoint()
    if trainer.signals.received is not None and state.global_step < state.max_steps:
        return Trained(None, last, {}, trainer.signals.received)
    if trainer.eval_dataset is not None and trainer.judged_at[0] != state.global_step:
        trainer.evaluate()
    best = out / f"checkpoint-{state.best_global_step}"
    if config.validation.keep == "last" or not best.is_dir():
        best = last
    if trainer.is_world_process_zero():
        _write_final(best, config, ready)
    trainer.accelerator.wait_for_everyone()
    return Trained(out / "draft", last, trainer.judged_at[1])


def _write_final(best: Path, config: TrainConfig, ready: ReadyRun) -> None:
    """The final draft: the best checkpoint's, in the target's dtype. It is what is published, so that the files beside
    it have names; where all lies, and the base of an adapter, those of the checkpoints say, to go on with."""
    out, recipe = Path(config.out), ready.recipe
    tensors = load_tensors(best)
    parallel = getattr(recipe.spec.architecture, "parallel", None) is not None
    steps = getattr(recipe.options, "steps", None) if parallel else None  # a chain may be longer than in training
    save_draft(
        out / "draft", recipe.spec, tensors, target=config.target, files=ready.files, dtype=ready.dtype,
        speculative_tokens=steps, longest=ready.training.longest, force=True,
    )  # fmt: skip
    _record(out / "draft", config, ready.inputs())
    copy_named(out / "draft" / CONFIG_FILE, out / "draft" / CONFIG_FILE)
    if (best / ADAPTER_FOLDER).is_dir():
        shutil.copytree(best / ADAPTER_FOLDER, out / "draft" / ADAPTER_FOLDER, copy_function=copy_named)


def _save_checkpoint(out: Path, tensors: dict[str, Tensor], *, config: TrainConfig, ready: ReadyRun) -> None:
    save_draft(
        out, ready.recipe.spec, tensors, target=config.target, files=ready.files, longest=ready.training.longest,
        force=True,
    )  # fmt: skip
    if has_adapters(ready.recipe.draft):
        save_adapter(ready.recipe.draft, out / ADAPTER_FOLDER)
    _record(out, config, ready.inputs())


def _load_checkpoint(folder: Path, *, recipe: Recipe) -> None:
    if has_adapters(recipe.draft):
        load_adapter(recipe.draft, folder / ADAPTER_FOLDER)
    else:
        recipe.load(load_tensors(folder))


def _record(out: Path, config: TrainConfig, inputs: Mapping[str, object]) -> None:
    """The resolved run, what it is of, and the exact versions, beside a draft."""
    (out / CONFIG_FILE).write_text(config.to_yaml(), encoding="utf-8")
    (out / INPUTS_FILE).write_text(json.dumps(inputs, indent=2) + "\n", encoding="utf-8")
    versions = {"draftkit": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES}
    (out / VERSIONS_FILE).write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")
