"""No attention over prompts waits for a plan of cuDNN, which builds one for each exact length: on a fake GPU, over 40
prompts of lengths that no warm-up has met, in pieces, eight at a time, and later turns; and in `data regenerate`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fixtures.gpu.fake_cuda import Recorder, fake_cuda
from fixtures.gpu.launch_counts import eagle, model
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig

from draftkit.data.responses import EngineResponder, RowPrompt, Sampling
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime import engine as engine_module
from draftkit.runtime import prefill
from draftkit.runtime.engine import Engine
from draftkit.runtime.ops import slot_attention
from draftkit.runtime.records import Generation
from draftkit.runtime.rounds import Outcome
from draftkit.targets.devices import use_device
from draftkit.targets.target import Target

pytest.importorskip("triton")

SLOTS, PIECE, LENGTH = 8, 512, 4096
ROWS = 12  # of two turns


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    with fake_cuda() as recorder:
        yield recorder


@pytest.fixture
def chosen_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The queries of every call of torch's own choice among attentions: on a GPU in half precision, that may be
    cuDNN's where it is on."""
    found: list[tuple[int, ...]] = []

    def counted(query: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        found.append(tuple(query.shape))
        return torch.nn.functional.scaled_dot_product_attention(query, *args, **named)

    for module in (prefill, slot_attention):
        monkeypatch.setattr(module, "scaled_dot_product_attention", counted)
    return found


@pytest.mark.long
def test_no_prompt_waits_for_a_plan_of_attention(
    gpu: Recorder, chosen_by_torch: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model(LlamaConfig, 3)
    drafter = eagle(target)
    engine = Engine(
        Target(target, drafter.aux_layers), drafter, num_speculative_tokens=3, num_slots=SLOTS, eager=True,
        prefill_chunk=PIECE,
    )  # fmt: skip
    engine.reserve(LENGTH)
    draw = random.Random(0)
    lengths = [draw.randrange(8, 1500) for _ in range(40)]
    later = [length + draw.randrange(40, 900) for length in lengths[:SLOTS]]
    with torch.inference_mode():
        for begin in range(0, len(lengths), SLOTS):
            take_in(engine, lengths[begin : begin + SLOTS])
        work = gpu.during(lambda: take_in(engine, later), strict=False)
        assert any("flash_attention" in launch.kernel for launch in work.launches)
        assert chosen_by_torch == []
        monkeypatch.setattr(prefill, "_has_flash", lambda query: False)
        take_in(engine, later[:1])
        assert chosen_by_torch == []  # where FlashAttention cannot, the kernel of rounds does
        monkeypatch.setattr(slot_attention, "attend_in_blocks", slot_attention.attend_reference)
        take_in(engine, later[:1])
        assert chosen_by_torch, "what is counted would not be seen"


def take_in(engine: Engine, lengths: list[int]) -> None:
    """The prompts of these lengths, into target and drafter."""
    waiting = prefill.Prefill(engine.target, engine._cache, PIECE, engine.drafter.overlap if engine.drafter else 0)
    for slot, length in enumerate(lengths):
        waiting.add(Generation(Request(str(slot), (5,) * length, 4)), slot)
    while waiting:
        engine._prefill_drafter(waiting.step())


@pytest.mark.long
def test_no_turn_of_answers_waits_for_a_plan_of_attention(
    gpu: Recorder, chosen_by_torch: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `data regenerate` asks for them: each row's turns one after the other, on all that was said before."""
    monkeypatch.setattr(engine_module, "capturable", lambda target: False)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: [[7, 1]] * len(tensor))  # a first token, which is usable
    emitted = Outcome((), [7], (), None)
    monkeypatch.setattr(engine_module, "outcomes", lambda packed, k: [emitted] * len(packed))
    responder = EngineResponder(model(LlamaConfig, 1), Sampling(SamplingParameters(), 4, frozenset()), SLOTS)
    draw = random.Random(0)
    waiting = [RowPrompt(str(n), (5,) * draw.randrange(8, 1500), n) for n in range(ROWS)]
    answers = 0
    for prompt, answer in responder.respond(lambda: waiting.pop() if waiting else None):
        assert answer == (7,) * 4
        answers += 1
        if not prompt.goes_on:
            said = prompt.tokens + answer + (5,) * draw.randrange(8, 400)
            waiting.append(RowPrompt(prompt.id, said, prompt.seed, goes_on=True))
    assert answers == 2 * ROWS
    assert chosen_by_torch == []


def test_attention_of_cudnn_is_off_on_a_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what transformers calls by itself, for states and targets of training, has no plans either."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        use_device("cuda:0")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
