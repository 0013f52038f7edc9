"""Rounds replayed from CUDA graphs: one launch instead of hundreds.

On a GPU most of a small batch's time goes into launching kernels. A graph is captured for each kind of batch and K at
its first use; its inputs are copied in only when the batch has changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftkit.runtime.batch import Batch
from draftkit.runtime.rounds import Rounds
from draftkit.targets.device_map import is_spread
from draftkit.targets.target import Target

WARM_UPS = 3  # runs before a capture: kernels are compiled and libraries allocate their workspaces in them

Replay = Callable[[], Tensor]


@dataclass
class _Captured:
    """`batch` is the input memory of `replay`, and `holds` the batch whose values it has."""

    batch: Batch
    replay: Replay
    holds: Batch | None = None


class GraphedRounds:
    """`Rounds` with the same results. `capture` makes a round replayable."""

    def __init__(self, rounds: Rounds, num_slots: int, capacity: int, capture: Callable[[Replay], Replay]):
        self._rounds = rounds
        self._num_slots = num_slots
        self._capacity = capacity
        self._capture = capture
        self._captured: dict[tuple[object, ...], _Captured] = {}
        self._failed = False

    def rows(self, slots: Sequence[int]) -> list[int]:
        """As many as the next power of two, or the number of slots: few sizes, few graphs."""
        size = min(1 << (len(slots) - 1).bit_length(), self._num_slots)
        return [*slots, *[-1] * (size - len(slots))]

    def run(self, batch: Batch, k: int, length: int, *, drafting: bool = True) -> Tensor:
        """`Rounds.run`; the tensor that it returns is overwritten by the next round of the same kind."""
        captured = None if self._failed else self._capture_of(batch, k, drafting)
        if captured is None:
            return self._rounds.run(batch, k, length, drafting=drafting)
        if captured.holds is not batch:
            captured.batch.copy_(batch)
            captured.holds = batch
        return captured.replay()

    def _capture_of(self, batch: Batch, k: int, drafting: bool) -> _Captured | None:
        """The capture for batches of this kind; None, and a warning, where the model does not allow one."""
        key = *batch.kind, k, drafting
        if key not in self._captured:
            vacant = batch.vacant()  # rounds of it leave no trace in any slot
            try:
                replay = self._capture(lambda: self._rounds.run(vacant, k, self._capacity, drafting=drafting))
            except torch.OutOfMemoryError:  # other sizes may fit
                raise
            except RuntimeError as error:
                self._failed = True
                first = error.__context__ or error  # a capture that is broken off fails once more, at its end
                reason = str(first).strip().split("\n", 1)[0]
                warnings.warn(f"rounds run without CUDA graphs, and slower: {reason}", stacklevel=2)
                return None
            self._captured[key] = _Captured(vacant, replay)
        return self._captured[key]


class CudaCapture:
    """Captures rounds in CUDA graphs that share their memory, as they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        device = torch.cuda.current_device()
        stream = capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # which a capture that is broken off does not leave
            for _ in range(WARM_UPS):
                run()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                    outcome = run()
            except RuntimeError:
                with suppress(RuntimeError):  # torch 2.12 and later have told the allocator themselves
                    torch._C._cuda_endAllocateToPool(device, self._pool)
                raise
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return outcome

        return replay


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The one stream of all captures on a device: cuBLAS keeps a workspace for each stream that it has run on."""
    return torch.cuda.Stream(device)


def may_look(target: Target) -> bool:
    """Whether the host may look at a value in the middle of a round: on a CPU it waits for nothing."""
    return target.device.type == "cpu"


def capturable(target: Target) -> bool:
    """Whether rounds of this target may be captured: it is on CUDA, in one place, and what its rows see is no choice of
    its own."""
    return target.device.type == "cuda" and not target.chooses and not is_spread(target.model)
