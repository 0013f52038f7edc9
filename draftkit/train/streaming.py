"""The training run's side of states that a worker computes meanwhile."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import PartialState

from draftkit.data.columns import SampleTable
from draftkit.data.packing import PackedRow
from draftkit.data.sample_files import samples_sha256
from draftkit.data.samples import Sample
from draftkit.data.states.shards import SCHEMA, Manifest, read_manifest, sampled_sha256
from draftkit.data.states.stream import StreamedStates, begin_stream, local_worker
from draftkit.engines.vllm.process import find_python
from draftkit.errors import command
from draftkit.io.cache import local_file
from draftkit.io.lock import sole_writer
from draftkit.loading import OpenedTarget
from draftkit.targets.devices import device_named, dtype_named
from draftkit.targets.states import FINAL, AuxLayers
from draftkit.train.config import TrainConfig
from draftkit.train.settings import StreamSettings

_log = logging.getLogger(__name__)


@contextmanager
def open_stream(
    config: TrainConfig,
    stream: StreamSettings,
    target: OpenedTarget,
    aux_layers: AuxLayers | None,
    samples: Sequence[Sample],
) -> Iterator[StreamedStates]:
    """The states of `samples` from a worker, which the first process of the run keeps where it has been told how.

    That process alone reads weights and samples to say whose states are wanted; the others read what it has said.
    """
    folder = Path(stream.folder or Path(config.out) / "stream")
    rank = int(os.environ.get("RANK", "0"))
    worker = None
    with ExitStack() as stack:
        if rank == 0:
            manifest = stream_manifest(config, stream, target, aux_layers, samples)
            stack.enter_context(sole_writer(folder, folder=True))
            begin_stream(folder, manifest)
        PartialState().wait_for_everyone()  # before others read the folder, and write into it
        manifest = read_manifest(folder)
        if rank == 0 and stream.python:
            worker = stack.enter_context(
                local_worker(
                    folder,
                    target.located.at_commit,
                    stream.python,
                    tensor_parallel=stream.tensor_parallel,
                    device=stream.device or None,
                )
            )
        elif rank == 0:
            worker_command = command("draftkit", "data", "stream", folder, "--target", target.located.at_commit)
            _log.warning("states are awaited from: %s", worker_command)
        yield StreamedStates(
            folder,
            manifest,
            samples,
            aux_layers,
            dtype=dtype_named(config.target_dtype or None, device_named(config.device or None)),
            rank=rank,
            check=(lambda: None) if worker is None else worker.check,
        )


def stream_manifest(
    config: TrainConfig,
    stream: StreamSettings,
    target: OpenedTarget,
    aux_layers: AuxLayers | None,
    samples: Sequence[Sample],
) -> Manifest:
    """What the worker is told to compute. Raises `DraftkitError` for a vLLM that is not there."""
    if stream.python:
        find_python(stream.python)
    lengths = SampleTable.of(samples).lengths
    return Manifest(
        schema=SCHEMA,
        target=target.located.name,
        target_revision=target.located.revision,
        target_sha256=target.mark(sampled_sha256(target.folder)),
        engine="vllm",
        dtype=stream.dtype,
        data=Path(config.data).name,
        data_sha256=samples_sha256(local_file(config.data)),
        num_documents=len(samples),
        num_tokens=int(lengths.sum()),
        layers=() if aux_layers is None else tuple(sorted({*aux_layers.states} - {FINAL})),
        hidden_size=target.facts.hidden_size,
        encoding=stream.encoding,
        shard_tokens=int(lengths.max()),
    )


class Prefetch:
    """Tells `announce` the samples of rows, up to `count` rows before training comes to them."""

    def __init__(self, announce: Callable[[Sequence[int]], None], count: int):
        self._announce = announce
        self._count = count
        self._epoch: Iterator[PackedRow] | None = None
        self._rows: Iterator[PackedRow] = iter(())

    def of_epoch(self, rows: Iterator[PackedRow]) -> Iterator[PackedRow]:
        """The rows of an iterator that is asked for again and again: the same one goes on where it was."""
        if rows is not self._epoch:
            self._epoch, self._rows = rows, self.of(rows)
        return self._rows

    def of(self, rows: Iterator[PackedRow]) -> Iterator[PackedRow]:
        waiting: deque[PackedRow] = deque()
        for row in rows:
            self._announce(row["numbers"])
            waiting.append(row)
            if len(waiting) > self._count:
                yield waiting.popleft()
        yield from waiting
