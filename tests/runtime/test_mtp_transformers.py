"""`generate(use_mtp=True)` of transformers as a second oracle, and where it drafts otherwise than vLLM.

It knows the heads of DeepSeek-V3 and GLM-4.5. It refuses targets with recurrent layers (Qwen3-Next, Qwen3.5), and has
no MiMo. Of every kind it feeds the state after the head's last norm, and zeroes no embedding; vLLM feeds GLM-4.5's
before that norm, and zeroes the first embedding of both. Its positions are one later, which rotations do not show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints.mtp_targets import LAYERS, Saved, save_with_head
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation import candidate_generator

from draftkit.doctor.patient import changed
from draftkit.layout.facts import with_facts
from draftkit.loading import load_drafter, open_draft
from draftkit.requests import Request
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target, load_target

PROMPT, LENGTH = (1, 5, 6, 7, 9), 14
THEIRS = {"feedback": "post_norm", "zero_first_embedding": False}
Proposals = dict[int, list[int]]  # by how many tokens there were


@pytest.fixture(scope="module", params=["deepseek_v3 1", "deepseek_v3 2", "glm4_moe 1", "glm4_moe 2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    kind, _, modules = request.param.partition(" ")
    return save_with_head(kind, tmp_path_factory.mktemp(kind), int(modules))


@pytest.fixture(scope="module")
def theirs(saved: Saved) -> Proposals:
    model = AutoModelForCausalLM.from_pretrained(saved.folder)
    # By these it tells a head's tensors, and it has those of the published models alone: layers 61, 46 and 92.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS + i}\." for i in range(len(saved.layers))]
    found: Proposals = {}
    generator = candidate_generator.MTPCandidateGenerator
    own = generator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        candidates, scores = own(self, input_ids, *args, **kwargs)
        known = input_ids.shape[1]
        if candidates.shape[1] > known:
            found[known] = candidates[0, known:].tolist()
        return candidates, scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "get_candidates", noted)
        model.generate(torch.tensor([PROMPT]), use_mtp=True, max_new_tokens=LENGTH, do_sample=False)
    return found


def ours(saved: Saved, **facts: Any) -> Proposals:
    """As far as both generators go."""
    model = load_target(saved.folder, device="cpu", dtype=torch.float32, attention=ATTENTION)
    with open_draft("mtp", str(saved.folder)) as draft:
        drafter = load_drafter(changed(draft, with_facts(draft.spec.architecture, **facts)), model)
    target = Target(model, drafter.aux_layers)
    engine = Engine(target, drafter, num_speculative_tokens=len(saved.layers), num_slots=1)
    (generation,) = engine.generate([Request("0", PROMPT, LENGTH)])
    return {round.position: list(round.proposal) for round in generation.rounds}


@pytest.mark.slow
def test_with_its_facts_every_proposal_is_the_same(saved: Saved, theirs: Proposals) -> None:
    found = ours(saved, **THEIRS)
    assert len(found.keys() & theirs.keys()) >= LENGTH - 3
    assert {n: found[n] for n in theirs if n in found} == {n: theirs[n] for n in theirs if n in found}


@pytest.mark.slow
def test_of_glm_it_feeds_the_second_module_another_state_than_vllm(saved: Saved, theirs: Proposals) -> None:
    found = ours(saved, zero_first_embedding=False)
    first, second = ([n for n in theirs if n in found and found[n][i : i + 1] != theirs[n][i : i + 1]] for i in (0, 1))
    assert first == []
    assert bool(second) == (len(saved.layers) > 1 and not saved.head.feeds_normed)


def test_targets_with_recurrent_layers_are_not_its(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_with_head("qwen3_next", tmp_path).folder)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(torch.tensor([PROMPT]), use_mtp=True, max_new_tokens=2)
