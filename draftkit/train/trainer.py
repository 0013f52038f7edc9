"""The training loop: transformers' Trainer, with drafts instead of language models.

What differs: the target's states are found for each row, checkpoints are unified draft folders, validation measures the
acceptance length, and a stop signal saves before it ends the run.
"""

from __future__ import annotations

import math
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from draftkit.data.packing import PackedRow, PackedRows, only_row
from draftkit.data.states.online import States
from draftkit.errors import DraftkitError
from draftkit.io.atomic import atomic_file, disk_failures
from draftkit.train.batch import TrainingBatch
from draftkit.train.log import LogLines, Pace, best_of, validated_steps
from draftkit.train.optimizers import MuonAndAdamW
from draftkit.train.recipes.recipe import Recipe, StepOutcome
from draftkit.train.sharding import judging, load_whole_optimizer, shard_trained_alone, whole, whole_optimizer
from draftkit.train.streaming import Prefetch
from draftkit.train.validation import Mode, held_out_loss, judge, metrics

TORCH_WRITER = (
    "inline_container.cc"  # part of what torch.save raises, which is no OSError, where a file cannot be written
)
StatesOf = Callable[[PackedRow], States]
SaveDraft = Callable[[Path, dict[str, Tensor]], None]


class DraftTrainer(Trainer):
    """Trains a recipe on packed rows.

    `states_of` gives the target's states of a row, which `prefetch` announces where that helps; `save_draft` writes a
    checkpoint's folder. `k` and `mode` are those of validation. `muon`: the optimizer, which is AdamW otherwise.
    """

    def __init__(
        self,
        recipe: Recipe,
        arguments: TrainingArguments,
        rows: PackedRows,
        held_out: PackedRows | None,
        *,
        states_of: StatesOf,
        prefetch: Prefetch | None,
        save_draft: SaveDraft,
        k: int,
        mode: Mode,
        muon: bool = False,
        callbacks: Sequence[TrainerCallback] = (),
    ):
        super().__init__(
            model=recipe,
            args=arguments,
            train_dataset=rows,
            eval_dataset=held_out,
            data_collator=only_row,
            callbacks=[signals := StopSignals(), AsNowSet(), *callbacks],
            optimizer_cls_and_kwargs=_muon_and_adamw(arguments, recipe) if muon else None,
        )
        self.signals = signals
        for other in (PrinterCallback, ProgressCallback):  # both write to stdout, which is for results
            self.remove_callback(other)
        a_row = rows.num_tokens / max(len(rows), 1)
        self._step_tokens = a_row * arguments.gradient_accumulation_steps * arguments.world_size
        self._pace: Pace | None = None  # from the first step on
        self.add_callback(LogLines(self._step_tokens))
        self._states_of = states_of
        self._prefetch = prefetch
        self._save_draft = save_draft
        self._k = k
        self._mode: Mode = mode
        self.judged_at: tuple[int, dict[str, float]] = -1, {}  # the step of the last validation, and what it found
        self._sums: dict[str, Tensor] = {}
        self._counted = 0

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The rows of a step, with those after them announced; none in a resumed run that has all of its steps."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        if self._pace is None:
            self._pace = Pace(self._step_tokens, self.state.global_step, self.state.log_history)
        rows = epoch_iterator if self._prefetch is None else self._prefetch.of_epoch(epoch_iterator)
        return super().get_batch_samples(rows, num_batches, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The recipe's loss; its statistics go into the next line of the log."""
        batch = self._batch(inputs)
        with self.accelerator.autocast():  # what is sharded is not wrapped in it
            outcome: StepOutcome = model(batch)
        if not torch.isfinite(outcome.loss):
            raise DraftkitError(
                f"the loss is {float(outcome.loss.detach())} at step {self.state.global_step}",
                hint="lower optimization.lr, or train in bfloat16 or float32",
            )
        for name, value in outcome.statistics.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()
        self._counted += 1
        return outcome.loss

    def _batch(self, inputs: Any) -> TrainingBatch:
        states = self._states_of(inputs)
        tokens, positions, sample_ids, loss_mask = (
            inputs[name] for name in ("tokens", "positions", "sample_ids", "loss_mask")
        )
        return TrainingBatch(tokens, positions, sample_ids, loss_mask, states.features, states.last)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._counted and "loss" in logs:
            logs |= {name: round(float(value) / self._counted, 6) for name, value in self._sums.items()}
            self._sums, self._counted = {}, 0
        if self._pace is not None and "loss" in logs:
            logs |= self._pace.at(self.state.global_step)
        spent = {} if self._pace is None else self._pace.spent(self.state.global_step)
        super().log(logs | spent, start_time)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """The acceptance length and loss on all held-out samples, on all processes together."""
        rows = self.eval_dataset
        assert isinstance(rows, PackedRows)
        recipe = self.accelerator.unwrap_model(self.model)
        with judging(recipe):
            judged, losses = [], []
            numbers = range(self.accelerator.process_index, len(rows), self.accelerator.num_processes)
            own = map(rows.__getitem__, numbers)
            for row in own if self._prefetch is None else self._prefetch.of(own):
                with self.accelerator.autocast():
                    batch = self._batch(self._prepare_inputs(row))
                    judged += judge(recipe, batch, row["numbers"], self._k, self._mode)
                    losses.append(held_out_loss(recipe, batch))
            if self.accelerator.num_processes > 1:
                judged, losses = gather_object(judged), gather_object(losses)
            judged.sort(key=lambda j: j.number)
            found = metrics(judged, {j.number: rows.samples[j.number].category for j in judged}, self._k)
            found["loss"] = math.fsum(losses) / len(losses)
        prefixed = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.judged_at = self.state.global_step, prefixed
        self.log(prefixed)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, prefixed)
        return prefixed

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate as it was launched; where that is with FSDP, it shards what is trained and nothing else."""
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            shard_trained_alone(self.accelerator.state.fsdp_plugin, self.model, self.model.layers_run_once)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if self.args.should_save:
            recipe = self.accelerator.unwrap_model(self.model)
            self._save_draft(Path(output_dir or self.args.output_dir), recipe.tensors())

    def save_checkpoint(self) -> None:
        """Save a checkpoint now, as after a step at which one is due."""
        self._save_checkpoint(self.model, trial=None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with whole(self.accelerator.unwrap_model(self.model)):
            self._save(output_dir)
        self.accelerator.wait_for_everyone()  # the folder appears whole; what other processes add comes after it

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as transformers does; where the disk takes no more, remove the half checkpoint and raise
        `DraftkitError`."""
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        self.state: TrainerState = WholeState(**vars(self.state))
        try:
            with disk_failures(f"writing {folder.name} failed", folder):
                super()._save_checkpoint(model, trial)
        except (DraftkitError, RuntimeError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if TORCH_WRITER in str(error):
                raise DraftkitError(
                    f"writing {folder.name} failed: the disk is full or has failed",
                    where=folder,
                    hint="free some space, and go on from the checkpoint before with --resume",
                ) from error
            raise

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with the generators of this process; one that was not there gets its own by the step and its number,
        instead of drawing again what the first step drew."""
        alone, rank = self.args.world_size == 1, self.args.process_index
        if checkpoint is None or Path(checkpoint, "rng_state.pth" if alone else f"rng_state_{rank}.pth").is_file():
            super()._load_rng_state(checkpoint)
        else:
            set_seed(zlib.crc32(f"{self.args.seed} {self.state.global_step} {rank}".encode()))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # what marks the checkpoint as complete comes next

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the recipe went on with it before it was given here, and may be sharded by now."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What one process writes, sharded or not, so that any number of processes can go on with it."""
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = whole_optimizer(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        state, schedule = (
            torch.load(Path(checkpoint, name), map_location="cpu", weights_only=True, mmap=True)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        load_whole_optimizer(self.optimizer, state)
        self.lr_scheduler.load_state_dict(schedule)


def _muon_and_adamw(arguments: TrainingArguments, recipe: Recipe) -> tuple[type[MuonAndAdamW], dict[str, Any]]:
    """The optimizer and its arguments; its AdamW is the one that the trainer would have for all."""
    adamw, of_adamw = Trainer.get_optimizer_cls_and_kwargs(arguments, recipe)
    return MuonAndAdamW, of_adamw | {"adamw": adamw, "spec": recipe.spec, "weight_decay": arguments.weight_decay}


class WholeState(TrainerState):
    """The state whose file marks a checkpoint as complete: a killed run leaves all of it or nothing."""

    def save_to_json(self, json_path: str) -> None:
        with atomic_file(Path(json_path), force=True) as file:
            super().save_to_json(file.name)  # opens the same file, empty so far, once more


class AsNowSet(TrainerCallback):
    """How often a run logs, validates and saves is as it says now; transformers would go on as the checkpoint says."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)


class KeepBest(TrainerCallback):
    """Saves a checkpoint whenever the draft is the best so far, whether or not one is due, and notes its step."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        steps = validated_steps(state.log_history)
        if steps and best_of(steps).step == state.global_step:
            state.best_global_step = state.global_step
            control.should_save = True
        return control


class Patience(TrainerCallback):
    """Ends a run after so many validations without a better draft; read off the log, which is resumed."""

    def __init__(self, validations: int):
        self._validations = validations

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        steps = validated_steps(state.log_history)
        if steps and len(steps) - 1 - steps.index(best_of(steps)) >= self._validations:
            control.should_training_stop = True
        return control


class StopSignals(TrainerCallback):
    """SIGTERM, SIGINT and SIGHUP let the step in hand finish, then save and stop. A second one ends the run at once.

    `received`: the first of them, None while there was none; processes that train together agree on it after every
    step, for one that went on would wait for the others without end. nohup's SIGHUP stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,))):
            self._before[number] = signal.signal(number, self._stop)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._before[number])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if args.world_size > 1:
            number = torch.tensor(self.received or 0, device=args.device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            self.received = int(number) or None
        if self.received is not None:
            control.should_save = True
            control.should_training_stop = True
        return control
