"""The Python interface: prompts as ids or requests; tokens and statistics."""

from __future__ import annotations

from fixtures.checkpoints.zoo_models import zoo_drafter, zoo_target

from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target


def engine() -> Engine:
    drafter = zoo_drafter("eagle3")
    return Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=2)


def test_prompts_of_every_kind() -> None:
    ids = [5, 6, 8]
    sampling = SamplingParameters(temperature=1.0, seed=3)
    own = Request("mine", tuple(ids), 8, SamplingParameters(temperature=1.0, seed=5))
    first, second, third = engine().generate([ids, tuple(ids), own], sampling, max_new_tokens=12)
    assert first.request == Request("0", tuple(ids), 12, sampling)
    assert second.request.sampling.seed == 4
    assert third.request is own
    assert third.tokens[:8] == engine().generate([own])[0].tokens
    assert first.acceptance_length == 1 + sum(r.accepted for r in first.rounds) / len(first.rounds)
