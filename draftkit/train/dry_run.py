"""What a run takes, before it is begun: `draftkit train --dry-run` and `--dry-run-step`."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from draftkit.data.states import Encoding
from draftkit.data.states.encoding import states_bytes
from draftkit.data.states.online import load_target_embeddings, read_training_config
from draftkit.data.states.shards import read_manifest
from draftkit.engines.vllm.accepts import check_target
from draftkit.io.atomic import temporary_folder
from draftkit.io.cache import local_file
from draftkit.targets.pretrained import empty_model
from draftkit.targets.states import FINAL, TappedModel
from draftkit.train.config import TrainConfig
from draftkit.train.run import loader_of, open_source, stored_states, trainer_of
from draftkit.train.setup import ReadyRun, set_up
from draftkit.train.streaming import stream_manifest

PARAMETER_BYTES = 16  # of a trained parameter in float32: the weight, its gradient, and two numbers of the optimizer
STEPS = 2  # the first one compiles, and makes what the optimizer keeps


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """What a run takes.

    `sample_bytes`: of the files of samples. `states_bytes`: of the target's states of all samples, stored in
    `encoding`, whether they are or not. `trained`: the parameters that are trained. `ranks`: the processes of the run.
    """

    samples: int
    tokens: int
    sample_bytes: int
    states_bytes: int
    encoding: Encoding
    trained: int
    ranks: int

    @property
    def trained_bytes(self) -> int:
        """Weights, gradients and optimizer of what is trained, on all devices that share it."""
        return self.trained * PARAMETER_BYTES


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """What a step on a row of `tokens` took. `peak_bytes`: of the GPU's memory as its allocator says, or the most that
    this process held of a CPU's. `device`: which of the two."""

    tokens: int
    seconds: float
    peak_bytes: int
    device: str


def check_run(config: TrainConfig, *, resume: bool = False) -> RunSize:
    """Raise `DraftkitError` for what `train_draft` would refuse before its first step; nothing is written.

    Of the target, the embedding and the output layer are read. What only its layers' weights can show, as one that is
    missing, is not found.
    """
    with set_up(config, resume, load_target_embeddings) as ready:
        if config.states:
            stored_states(config, ready)
        elif config.stream is not None:
            check_target(ready.opened.config_folder)
            if ready.arguments.process_index == 0:  # all samples are read for it
                stream_manifest(config, config.stream, ready.opened, ready.recipe.aux_layers, ready.samples)
        else:
            TappedModel(empty_model(read_training_config(ready.opened), ready.dtype), ready.recipe.aux_layers)
        return _size(config, ready)


def _size(config: TrainConfig, ready: ReadyRun) -> RunSize:
    samples, tokens = len(ready.samples), int(ready.samples.lengths.sum())
    if config.states:
        manifest = read_manifest(config.states)
        encoding, stored = manifest.encoding, sum(shard.bytes for shard in manifest.shards)
    else:
        encoding = "bf16" if config.stream is None else config.stream.encoding
        layers = () if ready.recipe.aux_layers is None else {*ready.recipe.aux_layers.states} - {FINAL}
        width = ready.target.config.get_text_config().hidden_size
        stored = states_bytes(samples, tokens, states=len(layers) + 1, size=width, encoding=encoding)
    files = (config.data, config.validation.samples) if config.validation.samples else (config.data,)
    return RunSize(
        samples=samples,
        tokens=tokens,
        sample_bytes=sum(_bytes_below(local_file(file)) for file in files),
        states_bytes=stored,
        encoding=encoding,
        trained=sum(p.numel() for p in ready.recipe.parameters() if p.requires_grad),
        ranks=ready.arguments.world_size,
    )


def _bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def measure_step(config: TrainConfig) -> StepSize:
    """Train the longest row for a step, after one to warm up, on all processes that were launched; nothing is kept.

    Raises `DraftkitError` as `train_draft`.
    """
    with ExitStack() as stack:
        short = replace(
            config,
            out=str(stack.enter_context(temporary_folder()) / "run"),
            save_every=0,
            report_to=(),
            validation=replace(config.validation, every=0, patience=0),
            optimization=replace(config.optimization, max_steps=STEPS, accumulation=1),
        )
        ready = stack.enter_context(set_up(short, False, loader_of(short)))
        rows, clock = ready.training.longest_row(), StepClock()
        source = stack.enter_context(open_source(short, ready))
        trainer = trainer_of(short, ready._replace(training=rows, validating=None), source, callbacks=(clock,))
        device = ready.target.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
        return StepSize(tokens=rows.num_tokens, seconds=clock.seconds, peak_bytes=_peak(device), device=device.type)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts kilobytes


class StepClock(TrainerCallback):
    """Times each step; `seconds` are those of the last."""

    seconds = 0.0

    def on_step_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        self._began = _now(args.device)

    def on_step_end(self, args: TrainingArguments, *_: object, **__: object) -> None:
        self.seconds = _now(args.device) - self._began


def _now(device: torch.device) -> float:
    """The time, when all that a GPU was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
