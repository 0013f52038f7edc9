"""A training run from its configuration: `draftkit train`."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from draftkit.convert.unified import is_written_by_draftkit
from draftkit.data.packing import PackedRow, PackedRows, row_tensors
from draftkit.data.samples import Sample, held_out, read_training_samples
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.online import (
    OnlineStates,
    States,
    check_lengths,
    load_target_ends,
    load_training_target,
    read_training_config,
)
from draftkit.data.states.shards import file_sha256, read_manifest
from draftkit.data.states.stream import StreamedStates, finish_stream
from draftkit.data.states.ways import Ways, compare_ways
from draftkit.data.vocabulary import Ceiling, choose_vocabulary, plan_vocabulary, token_counts
from draftkit.engines.vllm.accepts import check_target
from draftkit.errors import DraftkitError
from draftkit.hub.local_paths import copy_named
from draftkit.io.atomic import check_writable
from draftkit.io.html import said_html, table_html
from draftkit.io.lock import sole_writer
from draftkit.layout.digest import target_sha256
from draftkit.layout.folder import Draft, tokenizer_files
from draftkit.loading import OpenedDraft, OpenedTarget, open_target
from draftkit.runtime.drafters import check_runs
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.pace import token_seconds
from draftkit.targets.pretrained import empty_model
from draftkit.targets.states import FINAL, TappedModel
from draftkit.train.ahead import Ahead
from draftkit.train.checkpoint import load_tensors, save_draft
from draftkit.train.config import StreamSettings, TrainConfig
from draftkit.train.gap import Gap, SaveDraft, report_gap
from draftkit.train.lora import add_adapters, has_adapters, load_adapter, save_adapter
from draftkit.train.recipes import recipe_class
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.recompute import recompute_activations
from draftkit.train.rejections import RejectionStage
from draftkit.train.resume import CONFIG_FILE, INPUTS_FILE, check_same_run, inputs_of, newest_checkpoint
from draftkit.train.streaming import open_stream, stream_manifest
from draftkit.train.trainer import DraftTrainer, KeepBest, Patience, StatesOf
from draftkit.version import __version__

VERSIONS_FILE = "versions.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors")
ADAPTER_FOLDER = "adapter"  # where the run trains one: the checkpoint's own weights have it merged


class LoadTarget(Protocol):
    """Loads a target, or its ends."""

    def __call__(self, target: OpenedTarget, *, device: str, dtype: torch.dtype) -> PreTrainedModel: ...


@dataclass(frozen=True)
class Trained:
    """`draft`: the folder of the best checkpoint, or of the last where none was judged; None when the run was stopped.

    `metrics` are those of the last validation. `stopped_by`: the signal that stopped the run, None without one.
    """

    draft: Path | None
    checkpoint: Path
    metrics: dict[str, float]
    stopped_by: int | None = None

    def to_dict(self) -> dict[str, object]:
        """As `train --json` prints it."""
        draft = None if self.draft is None else str(self.draft)
        return {"draft": draft, "checkpoint": str(self.checkpoint), "metrics": self.metrics}

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        rows = ((name.removeprefix("eval_"), f"{value:.4g}") for name, value in self.metrics.items())
        said = f"stopped at {self.checkpoint}" if self.draft is None else str(self.draft)
        return said_html(said) + table_html(("held out", ""), rows)


def plan_draft_vocabulary(config: TrainConfig) -> list[Ceiling]:
    """What draft vocabularies of several sizes would allow, on the samples held out. No weights are loaded."""
    config.check()
    samples, training, validating = _samples(config)
    vocab_size = open_target(config.target).language_model.vocab_size
    counts = token_counts(samples, training, vocab_size)
    judged = [samples[number] for number in validating or training]
    return plan_vocabulary(judged, counts, config.validation.k)


def check_run(config: TrainConfig, *, resume: bool = False) -> Ways:
    """Raise `DraftkitError` for what `train_draft` would refuse before its first step; nothing is written.

    Returns what the target's states take, by each way to have them.

    Of the target, the embedding and the output layer are read. What only its layers' weights can show, as one that is
    missing, is not found.
    """
    with _set_up(config, resume, load_target_ends) as ready:
        if config.states:
            _stored_states(config, ready)
        elif config.stream is not None:
            check_target(ready.opened.config_folder)
            stream_manifest(config, config.stream, ready.opened, ready.recipe.aux_layers, ready.samples)
        online = not config.states and config.stream is None
        settings = read_training_config(ready.opened) if online else ready.opened.own_config(whole=False)
        whole = empty_model(settings, ready.dtype)
        if online:
            TappedModel(whole, ready.recipe.aux_layers)
        return _ways(config, ready, whole)


def _ways(config: TrainConfig, ready: _Ready, whole: PreTrainedModel) -> Ways:
    """What the states of this run take; `whole`: its target without memory."""
    stream = config.stream or StreamSettings()
    encoding = read_manifest(Path(config.states)).encoding if config.states else stream.encoding
    layers = set() if ready.recipe.aux_layers is None else {*ready.recipe.aux_layers.states} - {FINAL}
    processes = max(ready.arguments.world_size, 1)
    each_step = config.optimization.accumulation * processes
    per_epoch = -(-len(ready.training) // each_step)
    steps = config.optimization.max_steps or math.ceil(config.optimization.epochs * per_epoch)
    judgments = 0 if ready.validating is None else max(steps // (config.validation.every or steps), 1)
    training = sum(len(ready.samples[number]) for number in ready.training.numbers)
    judging = 0 if ready.validating is None else sum(len(ready.samples[number]) for number in ready.validating.numbers)
    read = steps * each_step / len(ready.training) * training + judgments * judging
    tokens = sum(map(len, ready.samples))
    return compare_ways(
        samples=len(ready.samples),
        tokens=tokens,
        states=len(layers) + 1,
        size=whole.config.get_text_config().hidden_size,
        encoding=encoding,
        passes=read / tokens,
        waiting_tokens=(stream.ahead + 1) * config.tokens_per_row * processes,
        token_seconds=token_seconds(whole, ready.target.device, ready.dtype, config.tokens_per_row),
        estimate="at the speed of a product of matrices of the target's sizes",
    )


def train_draft(config: TrainConfig, *, resume: bool = False, callbacks: tuple[TrainerCallback, ...] = ()) -> Trained:
    """Train a draft. `resume` goes on from the newest complete checkpoint in `config.out`, where it is of this run.

    Writes `out/checkpoint-N` (unified draft folders that can be resumed) and, when the run is finished, `out/draft` in
    the target's dtype. Raises `DraftkitError` for bad input, before the first step where it can be known, and while
    another run writes to `out`.
    """
    load = load_training_target if config.states == "" and config.stream is None else load_target_ends
    with ExitStack() as stack:
        if os.environ.get("RANK", "0") == "0":  # for all processes of the run
            stack.enter_context(sole_writer(Path(config.out), folder=True))
        ready = stack.enter_context(_set_up(config, resume, load))
        recipe, stream = ready.recipe, None
        if config.stream is not None:
            stream = stack.enter_context(
                open_stream(config, config.stream, ready.opened, recipe.aux_layers, ready.samples)
            )
        if ready.arguments.process_index == 0:  # which writes; found now, as files may be replaced while it trains
            ready.inputs()
        save = partial(_save_checkpoint, config=config, ready=ready)
        trainer = DraftTrainer(
            recipe,
            ready.arguments,
            ready.training,
            ready.validating,
            states_of=_state_source(config, ready, stream),
            ahead=None if stream is None or config.stream is None else Ahead(stream.announce, config.stream.ahead),
            save_draft=save,
            load_draft=partial(_load_checkpoint, recipe=recipe),
            k=config.validation.k,
            mode=config.validation.mode,
            decode=_decoding(config, recipe, ready.target, ready.validating, save),
            stage=_stage(config, ready.target),
            callbacks=(*callbacks, *_watching(config)),
        )
        newest = newest_checkpoint(Path(config.out))
        trainer.train(resume_from_checkpoint=str(newest) if newest is not None else None)
        trained = _finish(trainer, config, ready)
        if stream is not None and trained.draft is not None and trainer.is_world_process_zero():
            finish_stream(stream.folder)
        return trained


class _Ready(NamedTuple):
    """What a run has before its first step. `opened`: the target as it was named. `files`: that its draft takes over.
    `dtype`: the target's.

    `inputs` gives `inputs_of` the run, which are found once.
    """

    opened: OpenedTarget
    target: PreTrainedModel
    recipe: Recipe
    samples: list[Sample]
    files: tuple[Path, ...]
    training: PackedRows
    validating: PackedRows | None
    arguments: TrainingArguments
    dtype: torch.dtype
    inputs: Callable[[], dict[str, object]]


@contextmanager
def _set_up(config: TrainConfig, resume: bool, load: LoadTarget) -> Iterator[_Ready]:
    """Everything that comes before the first step, with the target that `load` gives."""
    config.check()
    check_trackers(config.report_to)
    out = Path(config.out)
    _check_output(out, resume)
    opened = open_target(config.target)
    if config.validation.decode:
        opened.require_runtime("leave out validation.decode, which decodes with it")
    if config.on_policy is not None and config.on_policy.rounds == "decoded":
        opened.require_runtime("set on_policy.rounds=walked, which decodes nothing")
    samples, training, validating = _samples(config)
    with ExitStack() as stack:
        stack.enter_context(_no_empty_folder(out))
        device = device_named(config.device or None)
        arguments = training_arguments(
            config, opened, device
        )  # joins the other processes, and makes the first GPU current
        start = config.draft or recipe_class(config.recipe).starts_from
        started = OpenedDraft(start, opened, stack) if start else None
        draft = None if started is None else started.draft
        inputs = cache(partial(inputs_of, config, opened, draft, max(arguments.world_size, 1)))
        newest = newest_checkpoint(out)
        if newest is not None and arguments.process_index == 0:
            check_same_run(newest, config, inputs())
        dtype = dtype_named(config.target_dtype or None, device)
        target = load(opened, device=device, dtype=dtype)
        tune_for_cpu(target)
        set_seed(config.seed)  # after the target, whose loading draws numbers of its own
        check_lengths(samples, target.config)
        if draft is not None:
            check_runs(draft)
        counts = token_counts(samples, training, target.config.get_text_config().vocab_size)
        recipe = start_recipe(config, target, draft, counts)
        if config.lora is not None:
            parallel = getattr(recipe.spec.architecture, "parallel", None) is not None
            base = started.located if started is not None and config.draft else None
            add_adapters(recipe.draft, config.lora, base=base, parallel=parallel)
        if config.optimization.recompute:
            recompute_activations(recipe.draft)
        _check_states(config, recipe)
        yield _Ready(
            opened=opened,
            target=target,
            recipe=recipe,
            samples=samples,
            files=draft.files if draft is not None else _tokenizer(opened, recipe),
            training=PackedRows(samples, training, config.tokens_per_row),
            validating=PackedRows(samples, validating, config.tokens_per_row) if validating else None,
            arguments=arguments,
            dtype=dtype,
            inputs=inputs,
        )


def start_recipe(config: TrainConfig, target: PreTrainedModel, draft: Draft | None, counts: Tensor) -> Recipe:
    """The recipe with its draft; a new draft vocabulary is chosen from `counts` int64 [V]."""
    size = config.draft_vocab_size
    d2t_ids = None
    if size and size != len(counts):
        d2t_ids = choose_vocabulary(counts, size).to(target.device)
    recipe = recipe_class(config.recipe).start(Origin(target, draft, d2t_ids), config.recipe_options())
    return recipe.to(target.device)


class OneDevice(TrainingArguments):
    """The run of a process on the current device. Transformers would split rows among all GPUs that it sees.

    `told`: what trackers are told of the run, by name: draftkit's own settings, not what they become for transformers.
    """

    told: Mapping[str, object] | None = None

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)

    @property
    def device(self) -> torch.device:
        found = super().device
        return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" else found

    def to_dict(self) -> dict[str, Any]:
        """Which the trackers of transformers record."""
        return super().to_dict() if self.told is None else dict(self.told)


def told_trackers(config: TrainConfig, target: OpenedTarget) -> dict[str, object]:
    """The settings of a run by their names in `--set`, and digests of what it trains on and for."""
    digests = {
        "data_sha256": file_sha256(Path(config.data)),
        "target_sha256": target_sha256(target.folder),
    }
    return config.by_name() | digests


def check_trackers(names: Sequence[str]) -> None:
    """Raise `DraftkitError` for a tracker whose package is not there."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise DraftkitError(f"report_to needs {' and '.join(missing)}", hint=f"pip install {' '.join(missing)}")


def training_arguments(config: TrainConfig, target: OpenedTarget, device: str) -> TrainingArguments:
    """The run in transformers' terms."""
    settings = config.optimization
    precision = settings.precision
    if precision == "auto":
        precision = "float32" if device == "cpu" else "bfloat16"
    every = config.validation.every
    saves = config.save_every or every
    arguments = OneDevice(
        output_dir=config.out,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.lr,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        max_grad_norm=settings.clip,
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        bf16=precision == "bfloat16",
        fp16=precision == "float16",
        torch_compile=settings.compile,
        eval_strategy="steps" if every else "no",
        eval_steps=every or None,
        save_strategy="steps" if saves else "no",
        save_steps=saves or 500,
        save_total_limit=config.keep,
        logging_steps=config.log_every,
        report_to=list(config.report_to),
        seed=config.seed,
        use_cpu=device == "cpu",
        remove_unused_columns=False,
        dataloader_pin_memory=device != "cpu",
        label_names=[],
        disable_tqdm=None,
    )
    if config.report_to:
        arguments.told = told_trackers(config, target)
    return arguments


@contextmanager
def _no_empty_folder(out: Path) -> Iterator[None]:
    """Where the body raises, take away the folder that transformers' trainer makes before it has anything to write."""
    existed = out.exists()
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):
                out.rmdir()
        raise


def _check_output(out: Path, resume: bool) -> None:
    """Raise `DraftkitError` where a run would replace what is not its own, and where it could not write."""
    there = [
        path for path in (*sorted(out.glob("checkpoint-*")), out / "draft") if path.is_dir() and any(path.iterdir())
    ]
    if there and not resume:
        raise DraftkitError(
            f"{out} already has {', '.join(path.name for path in there)}",
            hint="--resume goes on with a run that lies there, or use another folder",
        )
    for path in there:
        if not is_written_by_draftkit(path):
            raise DraftkitError(
                f"{path.name} holds what draftkit has not written",
                where=path,
                hint="move it away, or use another folder",
            )
    check_writable(out / "draft")


def _samples(config: TrainConfig) -> tuple[list[Sample], list[int], list[int]]:
    """All samples, and the numbers of those to train on and of those to judge the draft by."""
    samples = read_training_samples(Path(config.data))
    settings = config.validation
    if settings.samples:
        judges = read_training_samples(Path(settings.samples))
        training = list(range(len(samples)))
        validating = list(range(len(samples), len(samples) + len(judges)))
        samples += judges
    else:
        training, validating = held_out(samples, settings.share)
    if not training:
        raise DraftkitError("no sample is left to train on", where=config.data, hint="lower validation.share")
    if settings.every and not validating:
        raise DraftkitError("no sample is held out for validation", hint="raise validation.share or give a file")
    return samples, training, validating[: settings.limit]


def _state_source(config: TrainConfig, ready: _Ready, stream: StreamedStates | None) -> StatesOf:
    """What finds the target's states of a row: the target in this process, the files of `config.states`, a worker."""
    target = ready.target
    if not config.states and stream is None:
        online = OnlineStates(target, ready.recipe.aux_layers)
        return lambda row: online.states(row["tokens"], row["positions"], row["sample_ids"])
    source = _stored_states(config, ready) if stream is None else stream

    def of_files(row: PackedRow) -> States:
        features, last = source.states_of(row["numbers"], row["tokens"].shape[1])
        return States(None if features is None else features.to(target.device), last.to(target.device))

    return of_files


def _stored_states(config: TrainConfig, ready: _Ready) -> OfflineStates:
    is_first = os.environ.get("RANK", "0") == "0"  # all of the target's weights are read to know it: once is enough
    return OfflineStates(
        Path(config.states),
        data=Path(config.data),
        target=ready.opened.folder if is_first else None,
        aux_layers=ready.recipe.aux_layers,
        dtype=ready.target.dtype,
    )


def _tokenizer(target: OpenedTarget, recipe: Recipe) -> tuple[Path, ...]:
    """What a new causal language model takes over from its target."""
    return tokenizer_files(target.folder) if recipe.spec.kind == "causal-lm" else ()


def _check_states(config: TrainConfig, recipe: Recipe) -> None:
    """Raise `DraftkitError` for what states in files cannot serve."""
    settings = config.validation
    problem = None
    if settings.samples and config.states:
        problem = "validation.samples: the states are those of the training file"
    elif settings.decode:
        problem = "validation.decode: decoding takes the whole target"
    elif config.on_policy is not None and config.on_policy.rounds == "decoded":
        problem = "on_policy.rounds=decoded: decoding takes the whole target (walked does not)"
    elif recipe.resamples:
        problem = "the draft's own text: the target has to read it"
    if (config.states or config.stream is not None) and problem is not None:
        raise DraftkitError(
            f"states from files do not go with {problem}", hint="train without --states and --states-from"
        )


def _decoding(
    config: TrainConfig,
    recipe: Recipe,
    target: PreTrainedModel,
    validating: PackedRows | None,
    save: SaveDraft,
) -> Callable[[], Gap] | None:
    """What decodes held-out prompts for real; None where the run does not want it."""
    settings = config.validation
    if not settings.decode or validating is None:
        return None
    source = OnlineStates(target, recipe.aux_layers)

    def states_of(sample: Sample) -> States:
        row = row_tensors([sample], len(sample))
        return source.states(*(row[name][None].to(target.device) for name in ("tokens", "positions", "sample_ids")))

    return lambda: report_gap(
        recipe,
        [validating.samples[number] for number in validating.numbers[: settings.decode]],
        target,
        states_of=states_of,
        save_draft=save,
        k=settings.k,
        mode=settings.mode,
        temperature=settings.temperature if settings.mode == "sampled" else 0.0,
    )


def _watching(config: TrainConfig) -> Iterator[TrainerCallback]:
    """What saves and ends a run by the acceptance length."""
    settings = config.validation
    if settings.keep == "best":
        yield KeepBest()
    if settings.patience:
        yield Patience(settings.patience)


def _stage(config: TrainConfig, target: PreTrainedModel) -> RejectionStage | None:
    settings = config.on_policy
    return None if settings is None else RejectionStage(settings, config.validation, target, config.seed)


def _finish(trainer: DraftTrainer, config: TrainConfig, ready: _Ready) -> Trained:
    """The last checkpoint, and unless the run was stopped, the best one as the final draft."""
    state = trainer.state
    out = Path(config.out)
    last = out / f"checkpoint-{state.global_step}"
    trainer.accelerator.wait_for_everyone()  # or one process may look before another has written
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


def _write_final(best: Path, config: TrainConfig, ready: _Ready) -> None:
    """The final draft: the best checkpoint's, in the target's dtype. It is what is published, so that the files beside
    it have names; where all lies, and the base of an adapter, those of the checkpoints say, to go on with."""
    out, recipe = Path(config.out), ready.recipe
    tensors = load_tensors(best)
    parallel = getattr(recipe.spec.architecture, "parallel", None) is not None
    steps = getattr(recipe.options, "steps", None) if parallel else None  # a chain may be longer than in training
    save_draft(
        out / "draft", recipe.spec, tensors, target=config.target, files=ready.files, dtype=ready.dtype,
        speculative_tokens=steps, force=True,
    )  # fmt: skip
    _record(out / "draft", config, ready.inputs())
    copy_named(out / "draft" / CONFIG_FILE, out / "draft" / CONFIG_FILE)
    if (best / ADAPTER_FOLDER).is_dir():
        shutil.copytree(best / ADAPTER_FOLDER, out / "draft" / ADAPTER_FOLDER, copy_function=copy_named)


def _save_checkpoint(out: Path, tensors: dict[str, Tensor], *, config: TrainConfig, ready: _Ready) -> None:
    save_draft(out, ready.recipe.spec, tensors, target=config.target, files=ready.files, force=True)
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
