"""Rounds, prompts and admission of every drafter on a fake GPU: nothing waits for the device, nothing mixes devices."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import product

import pytest
import torch
from fixtures.checkpoints.recurrent_targets import recurrent_target
from fixtures.engines.drafter_cases import Load, V
from fixtures.engines.drafter_pairs import PAIRS, Pair
from fixtures.gpu.fake_cuda import Recorder, fake_cuda, moved
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)

from draftkit.requests import DraftSampling, Request, SamplingParameters, Verification
from draftkit.runtime import drafters, prefill
from draftkit.runtime.batch import Batch
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Expands
from draftkit.runtime.engine import Engine
from draftkit.runtime.fusion import fuse
from draftkit.runtime.ops import slot_attention
from draftkit.runtime.prefill import Prefill, Prefilled
from draftkit.runtime.records import Generation
from draftkit.runtime.rounds import Rounds
from draftkit.runtime.slot_rows import SlotRows
from draftkit.runtime.tree_kinds import Beam, DraftTree
from draftkit.targets.target import Target

pytest.importorskip("triton")
torch.set_num_threads(1)

K, SLOTS, LENGTH = 3, 4, 64
GREEDY = SamplingParameters()
SAMPLED = SamplingParameters(temperature=0.7)
CUT = SamplingParameters(temperature=0.9, top_k=9, top_p=0.9, min_p=0.01)
LOSSLESS: tuple[Verification, ...] = ("rejection", "coupled", "block")
# At temperature 0 all lossless modes come to one.
ROUNDS: list[tuple[Verification, SamplingParameters]] = [
    ("rejection", GREEDY),
    *product(LOSSLESS, (SAMPLED, CUT)),
]
FEW: list[tuple[Verification, SamplingParameters]] = [("rejection", GREEDY), ("coupled", CUT)]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return PAIRS[request.param](load, tmp_path_factory)


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    with fake_cuda() as recorder:
        yield recorder


def engine(pair: Pair, floor: float = 0.0) -> Engine:
    """With every slot reserved, and rounds that are launched from the host: a graph would hold the same."""
    with unset_fake_temporarily():  # what is taken over is found by numbers
        for module in (pair[0], None if pair[1] is None else pair[1].module):
            if module is not None:
                fuse(module)
    model, drafter = moved(pair)
    made = Engine(
        Target(model, drafter.aux_layers if drafter else None), drafter, num_speculative_tokens=K if drafter else 0,
        num_slots=SLOTS, draft_sampling=DraftSampling("probabilistic", min_confidence=floor), eager=True,
    )  # fmt: skip
    made.reserve(LENGTH)
    with torch.inference_mode():
        list(prefilled(made, [(5, 6)]))  # a cache has its pools from its first prompt on
    return made


def prefilled(made: Engine, prompts: Sequence[tuple[int, ...]], chunk: int = 2048) -> Iterator[list[Prefilled]]:
    """What each forward of the prompts, in slots from 0 on, has completed."""
    prefill = Prefill(made.target, made._cache, chunk)
    for slot, prompt in enumerate(prompts):
        prefill.add(Generation(Request(str(slot), prompt, 4, CUT)), slot)
    while prefill:
        yield prefill.step()


@pytest.mark.slow
@pytest.mark.few(3)
def test_no_round_waits_for_the_gpu(pair: Pair, gpu: Recorder) -> None:
    """Verification is the same for every drafter; one of them meets all its kinds."""
    check_rounds(pair, gpu, ROUNDS if isinstance(pair[1], EagleDrafter) else FEW)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_no_round_of_a_hybrid_waits_for_the_gpu(kind: str, request: pytest.FixtureRequest) -> None:
    """Whose states are kept beside keys and values, and whose norms may have a gate."""
    pair = recurrent_target(kind), NgramDrafter(V, min_n=1, max_n=3)
    check_rounds(pair, request.getfixturevalue("gpu"), ROUNDS[:2])


@pytest.mark.long
def test_no_round_of_a_tree_waits_for_the_gpu(pair: Pair, gpu: Recorder) -> None:
    if not isinstance(pair[1], Expands):
        pytest.skip("drafts no tree")
    engine(pair)  # which takes over what is found by numbers
    model, drafter = moved(pair)
    assert isinstance(drafter, Expands)
    tree = DraftTree("test", "test", Beam(3, 3, 3, 9))
    made = Engine(
        Target(model, drafter.aux_layers), drafter, num_speculative_tokens=3, num_slots=SLOTS, tree=tree, eager=True
    )
    made.reserve(LENGTH)
    with torch.inference_mode():
        list(prefilled(made, [(5, 6)]))
    for sampling in (GREEDY, CUT):
        requests = {slot: Request(str(slot), (5, 6), 4, sampling) for slot in (0, 2)}
        batch = Batch.of(requests, made.draft_sampling, made.target.device)
        work = gpu.during(lambda batch=batch: made._rounds.run(batch, made.k, LENGTH))
        assert any(launch.variant for launch in work.launches)
        assert not work.reads + work.uploads, sampling


def check_rounds(pair: Pair, gpu: Recorder, cases: list[tuple[Verification, SamplingParameters]]) -> None:
    made = engine(pair)
    rounds = made._rounds
    assert isinstance(rounds, Rounds)
    scored, forward = [], made.target.forward
    made.target.forward = lambda *rows, **named: scored.append(forward(*rows, **named)) or scored[0]
    for mode, sampling in cases:
        requests = {slot: Request(str(slot), (5, 6), 4, sampling) for slot in (0, 2)}
        batch = Batch.of(requests, made.draft_sampling, made.target.device)
        rounds.mode = mode if made.k else "rejection"
        work = gpu.during(lambda batch=batch: rounds.run(batch, made.k, LENGTH))
        assert any(launch.variant for launch in work.launches)
        assert not work.reads + work.uploads, (mode, sampling)
        made.target.forward = lambda *_, **__: scored[0]  # the same in all modes


def test_a_batch_is_one_upload(gpu: Recorder) -> None:
    requests = {slot: Request(str(slot), (5, 6), 4, CUT) for slot in (0, 2)}
    work = gpu.during(lambda: Batch.of(requests, DraftSampling("probabilistic"), torch.device("cuda"), [0, 2, -1]))
    assert len(work.uploads) == 1


PROMPTS = [tuple(range(5 + n, 16 + 2 * n)) for n in range(SLOTS)]


def admit(made: Engine, chunk: int) -> None:
    for prompts in prefilled(made, [tuple(range(5, 16)), tuple(range(7, 18))], chunk):
        made._admit(prompts)


@pytest.mark.few(2)
@pytest.mark.slow
def test_a_prompt_is_waited_for_once(pair: Pair, gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its first token; in pieces, as a long one is run, and with another one in a forward."""
    made = engine(pair)
    looks: list[Tensor] = []
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: looks.append(tensor) or [[1, 1]] * len(tensor))
    for chunk, waits in ((4, 2), (2048, 1 if made.target.joins_prompts else 2)):
        looks.clear()
        work = gpu.during(lambda chunk=chunk: admit(made, chunk))
        assert work.launches
        assert not work.reads
        assert len(looks) == waits


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["EAGLE-3"], indirect=True)
def test_no_mask_is_made_for_a_prompt(pair: Pair, gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for a piece that begins in the middle of one, of the target or of the draft."""
    made = engine(pair)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [[1, 1]] * len(tensor))
    monkeypatch.setattr(SlotRows, "bias", None)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 4)
    assert gpu.during(lambda: admit(made, 4)).launches


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["no draft", "EAGLE-3", "DFlash", "draft model"], indirect=True)
def test_prompts_attend_in_one_call_a_layer(pair: Pair, gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are in a forward, of the target or of the draft; and none by a function for which torch might
    choose cuDNN, which builds a plan for every new length."""
    made = engine(pair)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [[1, 1]] * len(tensor))
    for module in (prefill, slot_attention):
        monkeypatch.setattr(module, "scaled_dot_product_attention", None)
    calls = [attention_calls(gpu, made, prompts) for prompts in (PROMPTS[:2], PROMPTS)]
    assert calls[0] == calls[1] > 0


def attention_calls(gpu: Recorder, made: Engine, prompts: Sequence[tuple[int, ...]]) -> int:
    def run() -> None:
        for pieces in prefilled(made, prompts):
            made._admit(pieces)

    launches = gpu.during(run).launches
    return sum("attention" in launch.kernel for launch in launches)


@pytest.mark.slow
def test_every_file_of_a_drafter_is_met(load: Load, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = {f"{drafters.__name__}.{module.name}" for module in pkgutil.iter_modules(drafters.__path__)}
    families = {name for name in files if hasattr(import_module(name), "load_drafter")}
    made = (make(load, tmp_path_factory)[1] for make in PAIRS.values())
    assert families <= {base.__module__ for drafter in made for base in type(drafter).__mro__}


def test_the_fake_gpu_refuses_what_a_graph_cannot_hold(gpu: Recorder) -> None:
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    for look in (lambda: there.sum().item(), lambda: bool(there[0]), lambda: there.tolist(), there.nonzero):
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            gpu.during(look)
    with pytest.raises(RuntimeError):
        gpu.during(lambda: there[there > 0])
    with pytest.raises(RuntimeError, match="two devices"):
        there + here
    assert gpu.during(lambda: there.cpu()).reads == ["_to_copy"]
    with torch.inference_mode():
        assert gpu.during(lambda: torch.tensor([1.0], device="cuda")).uploads == ["_to_copy"]
    assert [launch.kernel for launch in gpu.during(lambda: (there[1:] * 2).view(2, 1)).launches] == ["aten.mul"]
