"""What is told of a tree without running it is what a run of it does, round by round."""

from __future__ import annotations

import pytest
import torch
from fixtures.checkpoints.zoo_models import zoo_drafter, zoo_target

from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.evaluate.runtime_lane import engine_of
from draftkit.evaluate.tree_forecast import usual_tree
from draftkit.evaluate.tree_walk import own_texts, simulate_trees
from draftkit.loading import open_target
from draftkit.requests import SamplingParameters
from draftkit.results.settings import Settings
from draftkit.targets.target import Target


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark", "draft-model", "p-eagle", "mlp-speculator"])
def test_a_forecast_is_the_run(name: str, temperature: float) -> None:
    """At each budget; with ends of sequences inside trees, and at T = 1 too: a tree leaves the text as it is."""
    drafter = zoo_drafter(name)
    target = Target(zoo_target(), drafter.aux_layers)
    settings = Settings(max_new_tokens=24, device="cpu", sampling=SamplingParameters(temperature), concurrency=3)
    asked = Conversations(load_prompt_set("zoo", 3).prompts, open_target("zoo:target").tokenizer, settings)
    trees = [usual_tree(drafter, nodes, 4) for nodes in (8, 16, 32, 60)]
    texts = own_texts(target, asked, max(tree.depth for tree in trees) + 1)
    forecast = simulate_trees(target, drafter, texts, trees)
    for tree in trees:
        again = Settings(max_new_tokens=24, device="cpu", tree=tree.name, sampling=settings.sampling)
        found = engine_of(target, drafter, again, num_slots=3).generate(asked.first_requests)
        assert [[r.accepted for r in g.rounds] for g in found] == forecast[tree], tree.name
    means = [sum(map(sum, forecast[tree])) / sum(map(len, forecast[tree])) for tree in trees]
    assert torch.tensor(means).diff().min() > -0.1
