"""What CUDA graphs ask of a round, on a fake GPU: its memory stays where it was, captures compile nothing and share a
stream, and a capture that failed leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fixtures.engines.drafter_cases import Load, V, dflash_draft, draft_model, eagle3, target
from fixtures.gpu.fake_cuda import Recorder, Work, fake_cuda, moved
from torch import Tensor

from draftkit.requests import Request, SamplingParameters
from draftkit.runtime import engine as engine_module
from draftkit.runtime import graphs
from draftkit.runtime.batch import Batch
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.graphs import WARM_UPS, CudaCapture, Replay
from draftkit.targets.target import Target

pytest.importorskip("triton")

CUT = SamplingParameters(temperature=0.9, top_k=9, top_p=0.9)
DRAFTERS: dict[str, Callable[[Load], Drafter]] = {
    "n-gram": lambda load: NgramDrafter(V, min_n=1, max_n=3),
    "draft model": lambda load: draft_model(load).drafter,
    "EAGLE-3": lambda load: eagle3(load).drafter,
    "DFlash": lambda load: dflash_draft(load).drafter,
}


class SimulatedCapture:
    """In the place of `CudaCapture`: a replay runs the round again, and fails where that is not what was captured, be
    it an operation or the memory that it works on. `captures` counts."""

    def __init__(self, gpu: Recorder):
        self.gpu = gpu
        self.captures = 0

    def __call__(self, run: Replay) -> Replay:
        self.captures += 1
        warm = {launch.variant for launch in self.gpu.during(run).launches}
        outcome: list[Tensor] = []
        captured = self.gpu.during(lambda: outcome.append(run()))
        assert not captured.reads + captured.uploads
        assert warm.issuperset(launch.variant for launch in captured.launches), "Triton compiles in a capture"

        def replay() -> Tensor:
            again = self.gpu.during(run)
            assert again.launches == captured.launches, "a replayed round would do something else"
            assert memory(again) == memory(captured), "a replayed round would use memory that is gone"
            return outcome[0]

        return replay


def memory(work: Work) -> set[int]:
    return set(work.memory)


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, load: Load) -> Drafter:
    return DRAFTERS[request.param](load)


@pytest.fixture
def gpu(drafter: Drafter) -> Iterator[Recorder]:  # what is loaded is no fake
    with fake_cuda() as recorder:
        yield recorder


@pytest.fixture
def capture(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> SimulatedCapture:
    simulated = SimulatedCapture(gpu)
    monkeypatch.setattr(engine_module, "CudaCapture", lambda: simulated)
    return simulated


def run(engine: Engine, sequences: int, length: int = 60) -> None:
    """As `generate` does."""
    engine.reserve(length)
    engine._rounds.run(batch_of(engine, sequences), engine.k, length)


def batch_of(engine: Engine, sequences: int) -> Batch:
    running = {slot: Request(str(slot), (5, 6), 4, CUT) for slot in range(sequences)}
    return Batch.of(running, engine.draft_sampling, engine.target.device, engine._rounds.rows(range(sequences)))


@pytest.mark.long
def test_two_engines_take_turns_with_a_drafter(drafter: Drafter, capture: SimulatedCapture) -> None:
    """It has room for the sequences of one of them; the other must not replay rounds over memory that is gone."""
    model, moved_drafter = moved((target(), drafter))
    first, second = (
        Engine(Target(model, drafter.aux_layers), moved_drafter, num_speculative_tokens=3, num_slots=slots)
        for slots in (4, 2)
    )
    for engine in (first, second, first):
        run(engine, 2)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["EAGLE-3"], indirect=True)
def test_rounds_are_captured_anew_for_longer_sequences(drafter: Drafter, capture: SimulatedCapture) -> None:
    model, moved_drafter = moved((target(), drafter))
    engine = Engine(Target(model, drafter.aux_layers), moved_drafter, num_speculative_tokens=3, num_slots=2)
    for length, captures in ((60, 1), (50, 1), (90, 2)):
        run(engine, 2, length)
        assert capture.captures == captures


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["EAGLE-3"], indirect=True)
def test_nothing_is_captured_in_a_timed_run(
    drafter: Drafter, capture: SimulatedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has warmed up: whatever number of sequences runs together, with the K that goes with it."""
    model, moved_drafter = moved((target(), drafter))
    engine = Engine(
        Target(model, drafter.aux_layers), moved_drafter, num_speculative_tokens=3, num_slots=6, k_by_batch={2: 3, 4: 1}
    )
    engine.reserve(60)
    monkeypatch.setattr(Engine, "generate", lambda engine, requests: run(engine, 1))  # without reading tokens
    engine.warm_up([Request("0", (5, 6), 4, CUT)])
    captures = capture.captures
    assert captures
    with torch.inference_mode():
        for sequences in (5, 1, 2, 3, 4, 6):
            engine._rounds.run(batch_of(engine, sequences), engine._k_for(sequences), 60)
    assert capture.captures == captures


class FakeDriver:
    """The part of torch.cuda that captures. `broken`: why an operation in a capture fails. Its end then fails too, as
    torch's does, and neither goes back to the stream before nor tells the allocator."""

    def __init__(self, patch: pytest.MonkeyPatch, broken: str | None = None):
        self.broken = broken
        self.current: object = "default stream"
        self.used: list[object] = []
        self.streams = 0
        self.ended: list[object] = []
        patch.setattr(torch.cuda, "Stream", self.stream)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "graph", self.graph)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda _: None))
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *pool: self.ended.append(pool), raising=False)
        graphs.capture_stream.cache_clear()

    def stream(self, device: int) -> object:
        self.streams += 1
        return SimpleNamespace(number=self.streams, wait_stream=lambda _: None)

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: object) -> Iterator[None]:
        self.current = stream
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    def run(self) -> Tensor:
        self.used.append(self.current)
        if self.broken and len(self.used) > WARM_UPS:
            raise RuntimeError(self.broken)
        return torch.zeros(1)


def test_captures_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    for capture in (CudaCapture(), CudaCapture()):
        for _ in range(2):
            capture(driver.run)()
    assert driver.streams == 1
    assert len(driver.used) == 4 * (WARM_UPS + 1)
    assert all(stream is driver.used[0] for stream in driver.used)
    assert driver.current == "default stream"


def test_a_capture_that_failed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch, broken="operation not permitted when stream is capturing")
    rounds = SimpleNamespace(run=lambda *_, **__: driver.run())
    batch = SimpleNamespace(kind=(1, True), vacant=lambda: None)
    with (
        pytest.warns(UserWarning, match="slower: operation not permitted when stream is capturing"),
        pytest.raises(RuntimeError, match="not permitted"),  # as launched rounds fail here too
    ):
        graphs.GraphedRounds(rounds, 1, 8, CudaCapture()).run(batch, 1, 8)
    assert driver.current == "default stream"
    assert driver.ended == [(0, (0, 1))]
