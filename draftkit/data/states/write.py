"""`draftkit data states`: the hidden states of a target for a file of samples, stored for training without it.

T tokens of a sample, S states of H numbers: those of the layers, then the one after the final norm.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.data.columns import SampleTable
from draftkit.data.packing import pack, row_tensors
from draftkit.data.sample_files import open_samples, samples_sha256
from draftkit.data.sample_media import MediaOfSamples, SampleMedia, no_media
from draftkit.data.samples import Sample
from draftkit.data.states import ENCODINGS, Encoding
from draftkit.data.states.encoding import BY_CHANNEL, DTYPES, LARGEST, encode
from draftkit.data.states.folder import StatesFolder, folder_at
from draftkit.data.states.online import OnlineStates, check_lengths, load_training_target
from draftkit.data.states.shards import (
    SCHEMA,
    WHOLE,
    Manifest,
    Part,
    begin,
    enter,
    offsets_of,
    read_manifest,
    shard_name,
    shard_ranges,
    write_shard,
)
from draftkit.data.states.vllm import vllm_extractor
from draftkit.errors import DraftkitError, TargetError, require_count, require_setting
from draftkit.hub.local_paths import public_name
from draftkit.io.store import is_address
from draftkit.layout.digest import weights_sha256
from draftkit.loading import OpenedTarget, open_target
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.media import Media
from draftkit.targets.states import AuxLayers

ON_GPU, ON_CPU = 4096, 1024  # tokens of a row
WAIT = 0.5  # seconds between two looks at shards that others are at
FILE_BYTES = 4096  # what a shard's header and its line in the manifest take at most


class Extractor(Protocol):
    """Computes the states of samples: the target in this process, or vLLM."""

    def __call__(self, samples: Sequence[Sample], /) -> Iterator[tuple[int, Tensor]]:
        """The states [T, S, H] of every sample, by its place among them, in any order."""


class TargetExtractor:
    """Runs the target in this process, on rows of at most `tokens_per_row` packed tokens. `media` of samples with
    images."""

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[int], tokens_per_row: int, media: MediaOfSamples = no_media
    ):
        self._media = media
        self._source = OnlineStates(model, AuxLayers(tuple(layers)) if layers else None)
        self._device = model.device
        self._tokens_per_row = tokens_per_row

    def __call__(self, samples: Sequence[Sample]) -> Iterator[tuple[int, Tensor]]:
        lengths = [len(sample) for sample in samples]
        for row in pack(lengths, self._tokens_per_row):
            states = self._row([samples[place] for place in row])
            yield from zip(row, states.split([lengths[place] for place in row]), strict=True)

    def _row(self, samples: Sequence[Sample]) -> Tensor:
        """The states [N, S, H] of samples one after the other. Raises `TargetError` naming the one that fails alone."""
        media = self._media(samples)  # whose errors name their sample
        try:
            return self._forward(samples, media)
        except TargetError as error:
            if len(samples) > 1:  # one sample's NaN reaches the others of its row
                for sample in samples:
                    self._row([sample])
            names = ", ".join(sample.id for sample in samples)
            raise TargetError(f"sample {names}: {error}") from error

    def _forward(self, samples: Sequence[Sample], media: Mapping[int, Media]) -> Tensor:
        row = row_tensors(samples, sum(map(len, samples)))
        tokens, positions, sample_ids = (
            row[name][None].to(self._device) for name in ("tokens", "positions", "sample_ids")
        )
        features, last = self._source.states(tokens, positions, sample_ids, media=media)
        last = last[0, :, None]
        return last if features is None else torch.cat((features[0].unflatten(1, (-1, last.shape[2])), last), dim=1)


@dataclass(frozen=True)
class StatesPlan:
    """The work that is left, before any of it is begun.

    `bytes_per_token` without what a sample and a shard add, `bytes` with it except for the files' headers. `seconds`
    is an estimate from `probe_tokens`. `free_bytes`: None in a store.
    """

    documents: int
    tokens: int
    shards: int
    bytes_per_token: int
    bytes: int
    free_bytes: int | None
    probe_tokens: int
    seconds: float


def remaining(manifest: Manifest, lengths: Sequence[int], part: Part) -> dict[int, range]:
    """The shards of a part that are still to be written: number → samples."""
    done = {shard.first for shard in manifest.shards}
    ranges = list(enumerate(shard_ranges(lengths, manifest.shard_tokens)))
    return {number: samples for number, samples in ranges[part.number :: part.of] if samples.start not in done}


def plan(
    folder: StatesFolder,
    manifest: Manifest,
    samples: Sequence[Sample],
    extractor: Extractor,
    probe_tokens: int,
    part: Part,
) -> StatesPlan:
    """Count what is to do, and time the first samples of it, about `probe_tokens` tokens, after one to warm up."""
    left = remaining(manifest, [len(sample) for sample in samples], part)
    todo = [samples[number] for shard in left.values() for number in shard]
    tokens = sum(map(len, todo))
    probe = _first(todo, probe_tokens)
    probed = sum(map(len, probe))
    seconds = 0.0
    if probe:
        _run(extractor, probe[:1])
        begin = time.perf_counter()
        _run(extractor, probe)
        seconds = (time.perf_counter() - begin) * tokens / probed
    return StatesPlan(
        documents=len(todo),
        tokens=tokens,
        shards=len(left),
        bytes_per_token=manifest.token_bytes,
        bytes=tokens * manifest.token_bytes + len(todo) * manifest.sample_bytes + len(left) * torch.int64.itemsize,
        free_bytes=folder.free_bytes(),
        probe_tokens=probed,
        seconds=seconds,
    )


def _first(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """The first sample, and those after it as long as they fit."""
    chosen: list[Sample] = []
    for sample in samples:
        tokens -= len(sample)
        if chosen and tokens < 0:
            break
        chosen.append(sample)
    return chosen


def _run(extractor: Extractor, samples: Sequence[Sample]) -> None:
    for _, states in extractor(samples):
        states.cpu()  # waits for the device


def check_room(plan: StatesPlan, folder: StatesFolder, scratch: int = 0) -> None:
    """Raise `DraftkitError` when what is left, and `scratch` bytes meanwhile, do not fit on the disk."""
    needed = plan.bytes + plan.shards * FILE_BYTES + scratch
    if plan.free_bytes is not None and needed > plan.free_bytes:
        raise DraftkitError(
            f"the states take {needed / 1e9:,.1f} GB, and the disk has {plan.free_bytes / 1e9:,.1f} GB free",
            where=folder.place,
            hint="choose another disk, fewer samples or layers, or --encoding int8",
        )


def check_samples(samples: Sequence[Sample], vocab_size: int, longest: int) -> None:
    """Raise `DraftkitError` naming the first sample that the target cannot read in one piece."""
    for sample in samples:
        if not 0 < len(sample) <= longest:
            raise DraftkitError(
                f"sample {sample.id} has {len(sample)} tokens",
                expected=f"1 to {longest}",
                hint="raise --tokens-per-row, or prepare the data with a smaller --max-length",
            )
        if (largest := int(sample.tokens.max())) >= vocab_size:
            raise TargetError(
                f"sample {sample.id} has token {largest}; the target has {vocab_size}",
                hint="prepare the data with this target",
            )


def write_states(
    place: Path | str | StatesFolder,
    manifest: Manifest,
    samples: Sequence[Sample],
    extractor: Extractor,
    on_tokens: Callable[[int], None] = lambda _: None,
    alive: Callable[[], bool] = lambda: True,
    part: Part = WHOLE,
) -> Manifest:
    """Write the shards of a part that are missing, and tell `on_tokens` how many tokens are done after each.

    On a disk other processes may do the same: each shard is written by the one that has its lock, and what others have
    is waited for, as the lock is free again where they end. Finished shards stay whatever happens; it ends early where
    the process is no longer wanted (`alive`). Raises `DraftkitError` for states that are not finite or that the
    encoding cannot hold, naming the sample, and when the disk is full.
    """
    folder, lengths = folder_at(place), [len(sample) for sample in samples]
    manifest = enter(folder, manifest, part)  # first: it says whose the shards are, should the run be killed
    done = _tokens_of(manifest)
    try:
        while (left := remaining(manifest, lengths, part)) and alive():
            for number, numbers in left.items():
                manifest = _write_locked(folder, manifest, number, numbers, samples, extractor, part) or manifest
                on_tokens(_tokens_of(manifest) - done)
                done = _tokens_of(manifest)
            manifest = read_manifest(folder)
            if left.keys() == remaining(manifest, lengths, part).keys():
                time.sleep(WAIT)
        return manifest
    finally:
        folder.settle_locks()


def _tokens_of(manifest: Manifest) -> int:
    return sum(shard.tokens for shard in manifest.shards)


def _write_locked(
    folder: StatesFolder,
    manifest: Manifest,
    number: int,
    numbers: range,
    samples: Sequence[Sample],
    extractor: Extractor,
    part: Part,
) -> Manifest | None:
    """Write a shard, unless it is there by now; None where another process is at it."""
    with folder.lock(shard_name(number)) as mine:
        if not mine:
            return None
        manifest = read_manifest(folder)
        if any(shard.first == numbers.start for shard in manifest.shards):
            return manifest
        tensors = shard_tensors([samples[i] for i in numbers], extractor, manifest)
        return write_shard(folder, number, numbers.start, tensors, manifest, part)


def shard_tensors(samples: Sequence[Sample], extractor: Extractor, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a shard with these samples.

    Raises `TargetError` for states that are not finite or that the encoding cannot hold.
    """
    offsets = offsets_of([len(sample) for sample in samples])
    tokens = int(offsets[-1])
    states = torch.empty(tokens, manifest.num_states, manifest.hidden_size, dtype=DTYPES[manifest.encoding])
    by_channel = manifest.encoding in BY_CHANNEL
    scales = torch.empty((len(samples), *states.shape[1:]) if by_channel else states.shape[:2])
    for place, found in extractor(samples):
        run = slice(int(offsets[place]), int(offsets[place + 1]))
        encoded = encode(found, manifest.encoding)
        if not torch.isfinite(encoded.values if encoded.scales is None else encoded.scales).all():
            raise TargetError(
                f"sample {samples[place].id}: its hidden states are not finite",
                expected=f"numbers that {manifest.encoding} holds",
                hint="run the target in bfloat16 or float32",
            )
        states[run] = encoded.values
        if encoded.scales is not None:
            scales[place if by_channel else run] = encoded.scales.squeeze(0 if by_channel else -1)
    named = {"states": states, "offsets": offsets}
    return named | {"scales": scales} if manifest.encoding in LARGEST else named


@dataclass(frozen=True, kw_only=True)
class StatesSettings:
    """Settings of which states are stored and how they are computed.

    - `layers` in convention S, EAGLE-3's where None. `shard_tokens`: of a file, which is held in memory meanwhile.
    - `tokens_per_row`: packed for one forward; None for what suits the device (`row_tokens`). `vllm_python`: the
      interpreter of a vLLM installation that runs the target, on `tensor_parallel` GPUs from `device` on; None runs it
      in this process, on `device`.
    - `dtype` of the target; None is bfloat16, and float32 on the CPU in this process.
    - `media_root`: the folder of the samples' images; None: where they were when the samples were prepared.
    - `part`: of the shards, which this process writes.

    Raises `SettingError` for values outside their range.
    """

    target: str
    layers: tuple[int, ...] | None = None
    encoding: Encoding = "bf16"
    tokens_per_row: int | None = None
    shard_tokens: int = 32768
    vllm_python: str | None = None
    tensor_parallel: int = 1
    device: str | None = None
    dtype: str | None = None
    media_root: str | None = None
    part: Part = WHOLE

    def __post_init__(self) -> None:
        require_setting(0 <= self.part.number < self.part.of, "shard", str(self.part), "I/N, with I from 0 to N - 1")
        require_setting(self.encoding in ENCODINGS, "encoding", self.encoding, ", ".join(ENCODINGS))
        require_count("shard_tokens", self.shard_tokens)
        require_count("tensor_parallel", self.tensor_parallel)
        if self.tokens_per_row is not None:
            require_count("tokens_per_row", self.tokens_per_row)

    def row_tokens(self, longest: int) -> int:
        """Tokens of a row where samples have up to `longest`. A CPU gains nothing from long rows, and computes the
        attention between their samples too, which the mask then takes away."""
        if self.tokens_per_row is not None:
            return self.tokens_per_row
        on_cpu = self.vllm_python is None and device_named(self.device) == "cpu"
        return max(longest, ON_CPU) if on_cpu else ON_GPU


@dataclass(frozen=True)
class StateJob:
    """Writing to a folder what it lacks; `plan` says what that takes, `manifest` what is there."""

    folder: StatesFolder
    plan: StatesPlan
    manifest: Manifest
    samples: Sequence[Sample]
    extractor: Extractor
    scratch_bytes: int
    part: Part

    def write(
        self, on_tokens: Callable[[int], None] = lambda _: None, alive: Callable[[], bool] = lambda: True
    ) -> Manifest:
        """Write, telling `on_tokens` how many tokens each new shard has. Raises `DraftkitError` as `write_states`."""
        check_room(self.plan, self.folder, self.scratch_bytes)
        return write_states(self.folder, self.manifest, self.samples, self.extractor, on_tokens, alive, self.part)


@contextmanager
def open_states_job(data: Path, out: Path | str, settings: StatesSettings) -> Iterator[StateJob]:
    """The job of storing in `out` the states of the samples in `data`, with the target ready; a killed one goes on.

    On a disk other processes may have the same job, on this machine or others, and share the work. Raises
    `DraftkitError` for samples that the target cannot read, for a folder that was begun with other settings, and while
    a process writes something else to it.
    """
    folder = folder_at(out)
    with folder.shared():
        target = open_target(settings.target)
        if settings.vllm_python is not None:
            target.require_no_adapter("vLLM")
        samples = open_samples(data)
        media = None
        if samples.has_images():
            target = target.with_images()
            media = SampleMedia(data, target, settings.media_root)
        longest = int(samples.lengths.max(initial=0))
        check_lengths(samples, target.language_model)
        row_tokens = settings.row_tokens(longest)
        check_samples(samples, target.facts.vocab_size, longest if settings.vllm_python else row_tokens)
        folder.settle_leftovers()
        manifest = begin(folder, _manifest(settings, target, data, samples))
        with _extractor(settings, target, manifest, samples, media, out) as extractor:
            cost = plan(folder, manifest, samples, extractor, row_tokens, settings.part)
            scratch = _scratch_bytes(settings, manifest)
            yield StateJob(folder, cost, manifest, samples, extractor, scratch, settings.part)


def _manifest(settings: StatesSettings, target: OpenedTarget, data: Path, samples: Sequence[Sample]) -> Manifest:
    """The manifest of the folder, without its shards."""
    facts, located = target.facts, target.located
    layers = facts.default_aux_layer_ids() if settings.layers is None else settings.layers
    if len(set(layers)) < len(layers) or not all(0 <= layer <= facts.num_hidden_layers for layer in layers):
        raise TargetError(
            f"states after layers {list(layers)}",
            expected=f"different numbers from 0 to {facts.num_hidden_layers}, the target's number of layers",
            hint="say which with --layers, as 1,3,5",
        )
    return Manifest(
        schema=SCHEMA,
        target=public_name(located.name),
        target_revision=located.revision,
        target_sha256=target.mark(weights_sha256(target.folder)),
        engine="vllm" if settings.vllm_python else "transformers",
        dtype=str(_dtype(settings)).removeprefix("torch."),
        data=data.name,
        data_sha256=samples_sha256(data),
        num_documents=len(samples),
        num_tokens=sum(map(len, samples)),
        layers=layers,
        hidden_size=facts.hidden_size,
        encoding=settings.encoding,
        shard_tokens=settings.shard_tokens,
    )


def _dtype(settings: StatesSettings) -> torch.dtype:
    return dtype_named(settings.dtype, "vllm" if settings.vllm_python else device_named(settings.device))


def _scratch_bytes(settings: StatesSettings, manifest: Manifest) -> int:
    """The bytes that vLLM's own files of one shard take on the disk."""
    if settings.vllm_python is None:
        return 0
    return manifest.shard_tokens * manifest.num_states * manifest.hidden_size * _dtype(settings).itemsize


@contextmanager
def _extractor(
    settings: StatesSettings,
    target: OpenedTarget,
    manifest: Manifest,
    samples: SampleTable,
    media: SampleMedia | None,
    out: Path | str,
) -> Iterator[Extractor]:
    dtype, longest = _dtype(settings), int(samples.lengths.max(initial=0))
    if settings.vllm_python is None:
        device = device_named(settings.device)
        model = load_training_target(target, device=device, dtype=dtype)
        tune_for_cpu(model)
        yield TargetExtractor(model, manifest.layers, settings.row_tokens(longest), media or no_media)
        return
    with vllm_extractor(
        settings.vllm_python,
        target.folder,
        manifest.layers,
        num_layers=target.facts.num_hidden_layers,
        dtype=dtype,
        longest=longest,
        tensor_parallel=settings.tensor_parallel,
        device=settings.device,
        beside=Path(tempfile.gettempdir()) / "draftkit" if is_address(out) else Path(out).absolute(),
        media=media,
        most_images=0 if media is None else max(len(sample.images) for sample in samples),
    ) as extractor:
        yield extractor
