"""Everything of a training run that comes before its first step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, TrainingArguments, set_seed
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.models.llama.modeling_llama import LlamaMLP

from draftkit.convert.unified import is_written_by_draftkit
from draftkit.data.columns import SampleTable
from draftkit.data.packing import PackedRows
from draftkit.data.sample_files import MANY, is_arrow, read_training_samples, samples_sha256, split
from draftkit.data.sample_media import MediaOfSamples, SampleMedia, no_media
from draftkit.data.states.online import check_lengths
from draftkit.data.vocabulary import choose_vocabulary, token_counts
from draftkit.errors import DraftkitError, command
from draftkit.io.atomic import check_writable
from draftkit.io.cache import local_file
from draftkit.layout.digest import target_sha256
from draftkit.layout.folder import Draft, tokenizer_files
from draftkit.loading import OpenedDraft, OpenedTarget, open_target
from draftkit.runtime.drafters import check_runs
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.media import Media
from draftkit.targets.rope import left_out_of_drafts, said_of_plain_rope
from draftkit.train.checkpoint import (
    check_same_run,
    inputs_of,
    newest_checkpoint,
    rows_of_process,
)
from draftkit.train.config import TrainConfig
from draftkit.train.lora import add_adapters
from draftkit.train.recipes import recipe_class
from draftkit.train.recipes.recipe import Origin, Recipe

PACKAGE_OF_TRACKER = {"azure_ml": "azureml", "flyte": "flytekit"}  # where it is not called as the tracker is
SAMPLE_BYTES = 5  # of a token that was parsed: its id and the loss mask


class LoadTarget(Protocol):
    """Loads a target, or only its embedding and output layer."""

    def __call__(self, target: OpenedTarget, *, device: str, dtype: torch.dtype) -> PreTrainedModel: ...


class ReadyRun(NamedTuple):
    """What a run has before its first step. `opened`: the target as it was named. `files`: that its draft takes over.
    `dtype`: the target's.

    `inputs` gives `inputs_of` the run, which are found once. `media`: of the samples.
    """

    opened: OpenedTarget
    target: PreTrainedModel
    recipe: Recipe
    samples: SampleTable
    files: tuple[Path, ...]
    training: PackedRows
    validating: PackedRows | None
    arguments: TrainingArguments
    dtype: torch.dtype
    inputs: Callable[[], dict[str, object]]
    media: RunMedia


class RunMedia:
    """What the target reads of the samples of a run besides their tokens: of those in the training file, then of those
    in the file of judges, where the run has one."""

    def __init__(self, config: TrainConfig, target: OpenedTarget, samples: SampleTable, training: int):
        self._samples = samples
        self._training = training
        self._of_training = self.of_judges = cast("MediaOfSamples", no_media)
        if samples.has_images():
            root, judges = config.media_root, config.validation.samples
            self._of_training = SampleMedia(local_file(config.data), target, root)
            self.of_judges = SampleMedia(local_file(judges), target, root) if judges else self._of_training

    def of_row(self, numbers: Sequence[int]) -> dict[int, Media]:
        """That of the samples of these numbers, by their places."""
        found: dict[int, Media] = {}
        for place, number in enumerate(numbers):
            of_file = self._of_training if number < self._training else self.of_judges
            if (media := of_file([self._samples[number]]).get(0)) is not None:
                found[place] = media
        return found


@contextmanager
def set_up(
    config: TrainConfig,
    resume: bool,
    load: LoadTarget,
    target: OpenedTarget | None = None,
    draft: OpenedDraft | None = None,
) -> Iterator[ReadyRun]:
    """Everything that comes before the first step, with the target that `load` gives; `target` and `draft` as of
    `train_draft`."""
    config.check()
    check_trackers(config.report_to)
    out = Path(config.out)
    _check_output(out, resume)
    opened = target or open_target(config.target)
    began = process_time()
    samples, training, validating = read_split(config)
    seconds = process_time() - began
    if samples.has_images():
        opened = opened.with_images()
        _check_images(config)
    with ExitStack() as stack:
        stack.enter_context(_no_empty_folder(out))
        device = device_named(config.device or None)
        arguments = training_arguments(
            config, opened, device
        )  # joins the other processes, and makes the first GPU current
        if arguments.process_index == 0 and len(samples) >= MANY and not is_arrow(local_file(config.data)):
            print(said_of_parsing(config, samples, seconds), file=sys.stderr)
        start = config.draft or recipe_class(config.recipe).starts_from
        started = draft or (OpenedDraft(start, opened, stack) if start else None)
        origin = None if started is None else started.draft
        newest = newest_checkpoint(out)
        arguments.gradient_accumulation_steps = rows_of_process(newest, config, arguments.world_size)
        inputs = cache(partial(inputs_of, config, opened, origin, rows_per_step(arguments)))
        if newest is not None and arguments.process_index == 0:
            print(said_of_resuming(newest, check_same_run(newest, config, inputs()), arguments), file=sys.stderr)
        dtype = dtype_named(config.target_dtype or None, device)
        model = load(opened, device=device, dtype=dtype)
        tune_for_cpu(model)
        set_seed(config.seed)  # after the target, whose loading draws numbers of its own
        check_lengths(samples, model.config)
        if origin is not None:
            check_runs(origin)
        counts = token_counts(samples, training, model.config.get_text_config().vocab_size)
        recipe = start_recipe(config, model, origin, counts)
        left_out = left_out_of_drafts(model.config)
        if origin is None and left_out and recipe.spec.architecture.rope is not None and arguments.process_index == 0:
            print(said_of_plain_rope(left_out), file=sys.stderr)
        if config.lora is not None:
            parallel = getattr(recipe.spec.architecture, "parallel", None) is not None
            base = started.located if started is not None and config.draft else None
            add_adapters(recipe.draft, config.lora, base=base, parallel=parallel)
        if config.optimization.recompute:
            recompute_activations(recipe.draft)
        _check_states(config)
        yield ReadyRun(
            opened=opened,
            target=model,
            recipe=recipe,
            samples=samples,
            files=origin.files if origin is not None else _tokenizer(opened, recipe),
            training=PackedRows(samples, training, config.tokens_per_row),
            validating=PackedRows(samples, validating, config.tokens_per_row) if len(validating) else None,
            arguments=arguments,
            dtype=dtype,
            inputs=inputs,
            media=RunMedia(config, opened, samples, len(training) if config.validation.samples else len(samples)),
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
        """The settings that the trackers of transformers record."""
        return super().to_dict() if self.told is None else dict(self.told)


def rows_per_step(arguments: TrainingArguments) -> int:
    """The rows of a step, of all processes together."""
    return arguments.gradient_accumulation_steps * arguments.world_size


def said_of_resuming(checkpoint: Path, changed: Sequence[str], arguments: TrainingArguments) -> str:
    """From where a run goes on, and with what other settings."""
    rows, processes = arguments.gradient_accumulation_steps, arguments.world_size
    shared = f"; {processes} process{'' if processes == 1 else 'es'}, {rows} row{'' if rows == 1 else 's'} a step each"
    return f"goes on from {checkpoint.name}{shared}" + "".join(f"\n  {line}" for line in changed)


def said_of_parsing(config: TrainConfig, samples: SampleTable, seconds: float) -> str:
    """What it took to parse samples from JSONL, and what to do instead."""
    taken = samples.lengths.sum() * SAMPLE_BYTES / 1e9
    return (
        f"{len(samples):,} samples were parsed from JSONL: {seconds:.0f} s of processor time and {taken:.2g} GB, in "
        "each process at every start; in Arrow they open at once and are shared: "
        f"{command('draftkit', 'data', 'prepare', config.data, 'OUT.arrow', '--target', config.target)}"
    )


def told_trackers(config: TrainConfig, target: OpenedTarget) -> dict[str, object]:
    """The settings of a run by their names in `--set`, and digests of what it trains on and for."""
    digests = {
        "data_sha256": samples_sha256(local_file(config.data)),
        "target_sha256": target.mark(target_sha256(target.folder)),
    }
    return config.by_name() | digests


def check_trackers(names: Sequence[str]) -> None:
    """Raise `DraftkitError` for a tracker that transformers does not know, and for one whose package is not there."""
    known = set(INTEGRATION_TO_CALLBACK)
    if unknown := [name for name in names if name not in known]:
        raise DraftkitError(f"report_to {', '.join(unknown)}", expected=", ".join(sorted(known)))
    missing = [name for name in names if find_spec(PACKAGE_OF_TRACKER.get(name, name)) is None]
    if missing:
        packages = " ".join(PACKAGE_OF_TRACKER.get(name, name).replace("_", "-") for name in missing)
        raise DraftkitError(f"report_to needs {' and '.join(missing)}", hint=f"pip install {packages}")


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
        learning_rate=config.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup,
        weight_decay=config.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        max_grad_norm=settings.clip,
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        bf16=precision == "bfloat16",
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
    if config.report_to and arguments.process_index == 0:  # which alone tells them, and reads all weights for it
        arguments.told = told_trackers(config, target)
    return arguments


@contextmanager
def _no_empty_folder(out: Path) -> Iterator[None]:
    """Remove the folder that transformers' trainer makes before it has anything to write, where the body raises."""
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


def read_split(config: TrainConfig) -> tuple[SampleTable, NDArray[np.int64], NDArray[np.int64]]:
    """All samples, and the numbers of those to train on and of those to judge the draft by."""
    samples = read_training_samples(local_file(config.data))
    settings = config.validation
    if settings.samples:
        judges = read_training_samples(local_file(settings.samples))
        training, validating = np.arange(len(samples)), np.arange(len(judges)) + len(samples)
        samples += judges
    else:
        training, validating = split(samples, settings.share)
    if not len(training):
        raise DraftkitError("no sample is left to train on", where=config.data, hint="lower validation.share")
    if settings.every and not len(validating):
        raise DraftkitError("no sample is held out for validation", hint="raise validation.share or give a file")
    return samples, training, validating[: settings.limit]


def _tokenizer(target: OpenedTarget, recipe: Recipe) -> tuple[Path, ...]:
    """What a new causal language model takes over from its target."""
    return tokenizer_files(target.folder) if recipe.spec.kind == "causal-lm" else ()


def _check_states(config: TrainConfig) -> None:
    """Raise `DraftkitError` for what states in files cannot serve."""
    if config.states and config.validation.samples:
        raise DraftkitError(
            "stored states cannot be used with validation.samples: the states are those of the training file",
            hint="train without --states",
        )


def _check_images(config: TrainConfig) -> None:
    """Raise `DraftkitError` for what is not done with samples that have images."""
    if config.stream is not None:
        raise DraftkitError(
            "samples with images are not trained on with --states-from vllm",
            where=config.data,
            hint="store their states first: draftkit data states",
        )


def recompute_activations(draft: nn.Module) -> None:
    """Have a draft keep less: the layers of a transformers model, the MLPs of the others, whose attention keeps the
    keys and values of its chains in any case."""
    if isinstance(draft, PreTrainedModel):
        draft.gradient_checkpointing_enable({"use_reentrant": False})
        return
    for module in draft.modules():
        if isinstance(module, LlamaMLP):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
