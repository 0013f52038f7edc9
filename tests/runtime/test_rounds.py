"""Rounds can be captured in CUDA graphs: nothing in them looks at the host, and replayed ones give the same tokens.

Without a GPU a capture is stood in for by running the round again on the capture's own memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.recurrent_targets import KINDS, recurrent_target
from fixtures.engines.drafter_cases import Case, Load, V, confident_dspark, requests, sampled, target
from fixtures.gpu.kernels import NATIVE, Launches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from draftkit.layout.families.suffix import SuffixSpec
from draftkit.requests import DraftSampling, Request, SamplingParameters, Verification
from draftkit.runtime import engine as engine_module
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.drafters.suffix import SuffixDrafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.graphs import Replay
from draftkit.runtime.rounds import Rounds
from draftkit.targets.target import Target

torch.set_num_threads(1)

CUTS = SamplingParameters(temperature=0.9, top_k=9, top_p=0.9, min_p=0.01)
# The references look at the host; the drafts and targets of this file are on the CPU.
interpreted = pytest.mark.skipif(NATIVE, reason="rounds on the CPU have kernels in the interpreter only")
# What reads a tensor on the host, copies from it, or has a result whose shape depends on values.
ON_THE_HOST = {"_local_scalar_dense", "is_nonzero", "lift_fresh", "nonzero", "masked_select", "unique", "equal"}


class Watch(TorchDispatchMode):
    """Collects the operations that no CUDA graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.operations += 1
        if name in ON_THE_HOST:
            self.found.add(name)
        if name in ("index", "index_put", "index_put_"):
            self.found.update(
                f"{name} by a mask" for index in args[1] if index is not None and index.dtype is torch.bool
            )
        return function(*args, **(kwargs or {}))


def ngram() -> Drafter:
    return NgramDrafter(V, min_n=1, max_n=3)


def suffix() -> Drafter:
    return SuffixDrafter(V, SuffixSpec(max_depth=24, max_spec_factor=1.0, min_token_prob=0.1))


def decode(
    drafter: Drafter | None, wanted: tuple[Request, ...], k: int, num_slots: int, model: PreTrainedModel | None,
    floor: float = 0.0,
) -> list[list[int]]:  # fmt: skip
    engine = Engine(
        Target(model or target(), drafter.aux_layers if drafter else None), drafter,
        num_speculative_tokens=k, num_slots=num_slots,
        verification="coupled", draft_sampling=DraftSampling(mode="probabilistic", min_confidence=floor),
    )  # fmt: skip
    return [generation.tokens for generation in engine.generate(wanted)]


def check_replayed(
    drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel | None = None, floor: float = 0.0
) -> None:
    k = 3 if drafter else 0
    wanted = {"greedy": requests(), "sampled": sampled()}
    launched = {name: decode(drafter, these, k, 4, model, floor) for name, these in wanted.items()}
    sizes = set()

    class Again:
        def __call__(self, run: Replay) -> Replay:
            sizes.add(run().shape[0])
            return run

    monkeypatch.setattr(engine_module, "capturable", lambda _: True)
    monkeypatch.setattr(engine_module, "CudaCapture", Again)
    assert {name: decode(drafter, these, k, 4, model, floor) for name, these in wanted.items()} == launched
    assert sizes == {1, 2, 4}  # three sequences ran as four rows


@pytest.mark.slow
@pytest.mark.few(3)
def test_replayed_rounds_equal_launched_ones(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replayed(case.drafter, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, ngram(), suffix()], ids=["no draft", "n-gram", "suffix"])
def test_replayed_rounds_without_a_draft_model(drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replayed(drafter, monkeypatch)


@pytest.mark.slow
def test_replayed_rounds_that_end_where_confidence_does(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replayed(confident_dspark(load), monkeypatch, floor=0.5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_replayed_rounds_of_hybrid_targets(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replayed(ngram(), monkeypatch, recurrent_target(kind))


def test_a_capture_that_fails_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        def __call__(self, run: Replay) -> Replay:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    expected = decode(ngram(), requests(), 3, 4, None)
    monkeypatch.setattr(engine_module, "capturable", lambda _: True)
    monkeypatch.setattr(engine_module, "CudaCapture", Fails)
    with pytest.warns(UserWarning, match="without CUDA graphs, and slower: operation not permitted when stream is"):
        assert decode(ngram(), requests(), 3, 4, None) == expected


def check_host(
    drafter: Drafter | None,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParameters,
    mode: Verification,
    model: PreTrainedModel | None = None,
    floor: float = 0.0,
) -> None:
    """One round; the first token comes from the prefill."""
    watch, run, tolist = Watch(), Rounds.run, Tensor.tolist

    def watched(*arguments: Any, **options: Any) -> Any:
        with watch, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "tolist", lambda tensor: watch.found.add("tolist") or tolist(tensor))
            return run(*arguments, **options)

    monkeypatch.setattr(Rounds, "run", watched)
    monkeypatch.setattr(engine_module, "may_look", lambda _: False)  # as on a GPU
    engine = Engine(
        Target(model or target(), drafter.aux_layers if drafter else None), drafter,
        num_speculative_tokens=2 if drafter else 0, num_slots=1, verification=mode,
        draft_sampling=DraftSampling(mode="probabilistic", min_confidence=floor),
    )  # fmt: skip
    engine.generate([[5, 6]], sampling, max_new_tokens=2)
    assert watch.operations > 50
    assert not watch.found


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.interpreter
@interpreted
def test_rounds_never_look_at_the_host(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_host(case.drafter, monkeypatch, CUTS, "rejection")


@pytest.mark.slow
@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("sampling", [SamplingParameters(), CUTS], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["rejection", "coupled", "block"])
def test_no_kind_of_round_looks_at_the_host(
    mode: Verification, sampling: SamplingParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_host(ngram(), monkeypatch, sampling, mode)


@pytest.mark.slow
@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("drafter", [None, suffix()], ids=["no draft", "suffix"])
def test_no_round_without_a_model_looks_at_the_host(drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_host(drafter, monkeypatch, CUTS, "rejection")


@pytest.mark.slow
@pytest.mark.interpreter
@interpreted
def test_rounds_that_end_where_confidence_does_never_look_at_the_host(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_host(confident_dspark(load), monkeypatch, CUTS, "rejection", floor=0.5)


@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_hybrid_targets_never_look_at_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_host(ngram(), monkeypatch, SamplingParameters(), "rejection", recurrent_target(kind))


def test_the_watch_sees_the_references_look(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="tolist"):
        check_host(None, monkeypatch, CUTS, "rejection")


@pytest.mark.gpu
def test_captured_rounds_equal_launched_ones() -> None:
    """On a GPU, with real graphs."""
    model = pico.llama(eos_token_id=None).to("cuda")
    model.set_attn_implementation(ATTENTION)
    runs = []
    for eager in (True, False):
        drafter = NgramDrafter(V, min_n=1, max_n=3, device="cuda")
        engine = Engine(Target(model), drafter, num_speculative_tokens=3, num_slots=4, eager=eager)
        runs.append([generation.tokens for generation in engine.generate(requests())])
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [5])
@pytest.mark.parametrize("k_by_batch", [None, {1: 3, 3: 2, 6: 1}])
def test_nothing_is_captured_in_a_timed_run(
    num_slots: int, k_by_batch: dict[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of different lengths leave one by one, and the batch shrinks through all sizes."""
    captures: list[int] = []

    class Counted:
        def __call__(self, run: Replay) -> Replay:
            captures.append(run().shape[0])
            return run

    monkeypatch.setattr(engine_module, "capturable", lambda _: True)
    monkeypatch.setattr(engine_module, "CudaCapture", Counted)
    drafter = ngram()
    monkeypatch.setattr(drafter, "max_positions", 20)
    wanted = [Request(str(i), (5, 6, 7 + i), 4 + 3 * i, ignore_eos=True) for i in range(6)]
    for drafts in (None, drafter):
        engine = Engine(
            Target(target()), drafts, num_speculative_tokens=3 if drafts else 0, num_slots=num_slots,
            k_by_batch=k_by_batch if drafts else None, like="vllm-v1",
        )  # fmt: skip
        engine.reserve(max(request.max_length for request in wanted))
        engine.warm_up(wanted)
        warm = len(captures)
        assert warm
        met: set[int] = set()
        generations = engine.generate(wanted, on_round=lambda touched, met=met: met.add(len(touched)))
        assert met == set(range(1, num_slots + 1))
        assert len(captures) == warm
        if drafts:
            assert {r.beyond for g in generations for r in g.rounds} == {False, True}


@pytest.mark.slow
def test_every_mix_of_ways_to_draw_is_captured_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []

    class Counted:
        def __call__(self, run: Replay) -> Replay:
            captures.append(run().shape[0])
            return run

    monkeypatch.setattr(engine_module, "capturable", lambda _: True)
    monkeypatch.setattr(engine_module, "CudaCapture", Counted)
    ways = (SamplingParameters(), SamplingParameters(temperature=0.8), CUTS)
    wanted = [Request(str(i), (5, 6, 7 + i), 2 + i, ways[i % 3], ignore_eos=True) for i in range(6)]
    engine = Engine(Target(target()), ngram(), num_speculative_tokens=2, num_slots=3)
    engine.reserve(40)
    engine.warm_up(wanted)
    warm = len(captures)
    for order in (wanted, wanted[::-1], sorted(wanted, key=lambda request: request.sampling.temperature)):
        engine.generate(order)
    assert len(captures) == warm


@pytest.mark.slow
@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize(
    "sampling", [SamplingParameters(), pytest.param(CUTS, marks=pytest.mark.long)], ids=["greedy", "sampled"]
)
def test_nothing_is_compiled_in_a_timed_run(sampling: SamplingParameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds launched from the host, over texts that grow past other splits of attention, after prompts of other
    lengths than those of the warm-up."""
    launches = Launches(monkeypatch)
    model = pico.llama(eos_token_id=None, num_hidden_layers=1)
    model.set_attn_implementation(ATTENTION)
    engine = Engine(
        Target(model), ngram(), num_speculative_tokens=2, num_slots=2, verification="block", k_by_batch={1: 2, 2: 1},
        draft_sampling=DraftSampling(mode="probabilistic"),
    )  # fmt: skip
    lengths = ((2, 3), (4, 3), (20, 2), (136, 8))  # of prompt and answer
    wanted = [Request(str(prompt), (5, 6) * (prompt // 2), answer, sampling) for prompt, answer in lengths]
    engine.reserve(200)
    engine.warm_up(wanted)
    warm, specialized = launches.compiled.copy(), launches.specialized.copy()
    engine.generate(wanted)
    assert launches.compiled == warm
    assert launches.specialized > specialized, "the run met nothing that Triton specializes on"
