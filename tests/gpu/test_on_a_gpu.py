"""What only a GPU can show: rounds replayed from CUDA graphs give the tokens of launched ones, with every drafter and
in every mode, and a capture that fails leaves a GPU that works."""

from __future__ import annotations

import copy
from typing import TypeVar

import pytest
import torch
from fixtures.drafter_cases import Case, requests, sampled, target
from torch import Tensor, nn

from draftkit.models.target import Target
from draftkit.requests import DraftSampling, Verification
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.rounds import Rounds

pytestmark = pytest.mark.gpu

Thing = TypeVar("Thing")


def placed(thing: Thing) -> Thing:
    """A copy on the GPU, with what its tensors share."""

    def there(tensor: Tensor, memo: dict[int, object]) -> object:
        if id(tensor) not in memo:
            new = tensor.detach().to("cuda")
            memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return memo[id(tensor)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__deepcopy__", there)
        patch.setattr(nn.Parameter, "__deepcopy__", there)
        return copy.deepcopy(thing)


def decoded(drafter: Drafter, target: Target, mode: Verification, *, greedy: bool, eager: bool) -> list[list[int]]:
    engine = Engine(
        target, drafter, num_speculative_tokens=3, num_slots=4, verification=mode, eager=eager,
        draft_sampling=DraftSampling("probabilistic"),
    )  # fmt: skip
    return [generation.tokens for generation in engine.generate(requests() if greedy else sampled())]


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["rejection", "coupled", "block"])
def test_replayed_rounds_equal_launched_ones(case: Case, mode: Verification, greedy: bool) -> None:
    model, drafter = placed((target(), case.drafter))
    there = Target(model, drafter.aux_layers)
    launched, replayed = (decoded(drafter, there, mode, greedy=greedy, eager=eager) for eager in (True, False))
    assert replayed == launched


def test_a_capture_that_fails_leaves_a_gpu_that_works(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = placed((target(), case.drafter))
    there = Target(model, drafter.aux_layers)
    expected = decoded(drafter, there, "rejection", greedy=True, eager=True)
    run = Rounds.run

    def looking(*arguments: object, **named: object) -> Tensor:
        packed = run(*arguments, **named)  # type: ignore[arg-type]
        packed.sum().item()
        return packed

    stream = torch.cuda.current_stream()
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "run", looking)
        with pytest.warns(UserWarning, match="without CUDA graphs, and slower"):
            found = decoded(drafter, there, "rejection", greedy=True, eager=False)
    assert found == expected
    assert torch.cuda.current_stream() == stream
    assert decoded(drafter, there, "rejection", greedy=True, eager=False) == expected
