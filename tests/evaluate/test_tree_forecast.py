"""What is told of a tree without running it is what a run of it does, round by round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints.zoo_models import zoo_drafter, zoo_target

from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.evaluate.runtime_lane import engine_of
from draftkit.evaluate.tree_forecast import usual_tree
from draftkit.evaluate.tree_walk import own_texts, rank_paths, simulate_trees
from draftkit.loading import open_target
from draftkit.report.trees import notation
from draftkit.requests import SamplingParameters
from draftkit.results.cell import StaticTree
from draftkit.results.settings import Settings
from draftkit.results.static_tree import best_choices, rank_rates
from draftkit.runtime.tree_kinds import MOST_NODES, Choices, read_tree
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_the_best_static_tree_is_run_as_it_is_told(name: str, tmp_path: Path) -> None:
    """And the ranks that it is made of are those that a chain's records have."""
    drafter = zoo_drafter(name)
    target = Target(zoo_target(), drafter.aux_layers)
    settings = Settings(max_new_tokens=12, device="cpu", num_speculative_tokens=4)
    asked = Conversations(load_prompt_set("zoo", 2).prompts, open_target("zoo:target").tokenizer, settings)
    texts = own_texts(target, asked, 5)
    paths = rank_paths(target, drafter, texts, 4)
    chain = engine_of(target, drafter, settings, num_slots=2, estimates=True).generate(asked.first_requests)
    recorded = [r.ranks for g in chain for r in g.rounds]
    assert [path[: len(ranks)] for path, ranks in zip(paths, recorded, strict=True)] == [
        tuple(None if rank is None or rank >= MOST_NODES else rank for rank in ranks) for ranks in recorded
    ]
    static = Choices(best_choices(rank_rates(paths, MOST_NODES), 8))
    (tmp_path / "list").write_text(notation(StaticTree(static.paths, 0.0, 0.0)))
    tree = read_tree(f"choices:{tmp_path / 'list'}")
    assert tree.shape == static
    found = engine_of(target, drafter, replace(settings, tree=tree.name), num_slots=2).generate(asked.first_requests)
    assert [[r.accepted for r in g.rounds] for g in found] == simulate_trees(target, drafter, texts, [tree])[tree]
