"""`draftkit data states`: the hidden states of a target for a file of documents, stored for training without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from draftkit.data.encoding import Encoding
from draftkit.data.extract import (
    Extractor,
    Plan,
    TargetExtractor,
    check_documents,
    check_room,
    plan,
    write_states,
)
from draftkit.data.fingerprint import file_sha256, target_sha256
from draftkit.data.samples import Document, read_documents
from draftkit.data.shards import SCHEMA, Manifest, begin
from draftkit.data.training_target import check_lengths, load_training_target
from draftkit.engines.vllm.states import vllm_extractor
from draftkit.errors import TargetError
from draftkit.hub.locate import Located, locate
from draftkit.layout.target import TargetFacts, read_target_facts
from draftkit.models.devices import device_named, dtype_named, limit_threads
from draftkit.models.target import read_target_config


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """What is stored and how it is computed.

    - `layers` in convention S, EAGLE-3's where None. `shard_tokens`: of a file, which is held in memory meanwhile.
    - `tokens_per_row`: packed for one forward. `vllm_python`: the interpreter of a vLLM installation that runs the
      target, on `tensor_parallel` devices; None runs it in this process, on `device`.
    - `dtype` of the target; None is bfloat16, and float32 on the CPU in this process.
    """

    target: str
    layers: tuple[int, ...] | None = None
    encoding: Encoding = "bf16"
    tokens_per_row: int = 4096
    shard_tokens: int = 32768
    vllm_python: str | None = None
    tensor_parallel: int = 1
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class StateJob:
    """Writing to a folder what it lacks; `plan` says what that takes, `manifest` what is there."""

    folder: Path
    plan: Plan
    manifest: Manifest
    documents: Sequence[Document]
    extractor: Extractor
    scratch_bytes: int

    def write(self, on_tokens: Callable[[int], None] = lambda _: None) -> Manifest:
        """Write, telling `on_tokens` how many tokens each new shard has. Raises `DraftkitError` as `write_states`."""
        check_room(self.plan, self.folder, self.scratch_bytes)
        return write_states(self.folder, self.manifest, self.documents, self.extractor, on_tokens)


@contextmanager
def open_states_job(data: Path, out: Path, settings: StateSettings) -> Iterator[StateJob]:
    """The job of storing in `out` the states of the documents in `data`, with the target ready; a killed one goes on.

    Raises `DraftkitError` for documents that the target cannot read, and for a folder that was begun with other
    settings.
    """
    located = locate(settings.target)
    facts = read_target_facts(located.path, located.name, located.revision)
    documents = list(read_documents(data))
    longest = max((len(document) for document in documents), default=0)
    check_lengths(documents, read_target_config(located.path))
    check_documents(documents, facts.vocab_size, longest if settings.vllm_python else settings.tokens_per_row)
    manifest = begin(out, _manifest(settings, located, facts, data, documents))
    with _extractor(settings, located, facts, manifest, longest, out) as extractor:
        cost = plan(out, manifest, documents, extractor, settings.tokens_per_row)
        yield StateJob(out, cost, manifest, documents, extractor, _scratch_bytes(settings, manifest))


def _manifest(
    settings: StateSettings, located: Located, facts: TargetFacts, data: Path, documents: Sequence[Document]
) -> Manifest:
    """What the folder is to say, without shards."""
    layers = facts.default_aux_layer_ids() if settings.layers is None else settings.layers
    if len(set(layers)) < len(layers) or not all(0 <= layer <= facts.num_hidden_layers for layer in layers):
        raise TargetError(
            f"states after layers {list(layers)}",
            expected=f"different numbers from 0 to {facts.num_hidden_layers}, the target's number of layers",
        )
    return Manifest(
        schema=SCHEMA,
        target=located.name,
        target_revision=located.revision,
        target_sha256=target_sha256(located.path),
        engine="vllm" if settings.vllm_python else "transformers",
        dtype=str(_dtype(settings)).removeprefix("torch."),
        data=data.name,
        data_sha256=file_sha256(data),
        num_documents=len(documents),
        num_tokens=sum(map(len, documents)),
        layers=layers,
        hidden_size=facts.hidden_size,
        encoding=settings.encoding,
        shard_tokens=settings.shard_tokens,
    )


def _dtype(settings: StateSettings) -> torch.dtype:
    return dtype_named(settings.dtype, "vllm" if settings.vllm_python else device_named(settings.device))


def _scratch_bytes(settings: StateSettings, manifest: Manifest) -> int:
    """What vLLM's own files of a shard take."""
    if settings.vllm_python is None:
        return 0
    return manifest.shard_tokens * manifest.num_states * manifest.hidden_size * _dtype(settings).itemsize


@contextmanager
def _extractor(
    settings: StateSettings, located: Located, facts: TargetFacts, manifest: Manifest, longest: int, out: Path
) -> Iterator[Extractor]:
    dtype = _dtype(settings)
    if settings.vllm_python is None:
        device = device_named(settings.device)
        model = load_training_target(settings.target, device=device, dtype=dtype)
        limit_threads(model)
        yield TargetExtractor(model, manifest.layers, settings.tokens_per_row)
        return
    with vllm_extractor(
        settings.vllm_python,
        located.path,
        manifest.layers,
        num_layers=facts.num_hidden_layers,
        dtype=dtype,
        longest=longest,
        tensor_parallel=settings.tensor_parallel,
        beside=out.absolute(),
    ) as extractor:
        yield extractor
