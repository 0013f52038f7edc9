"""`eval --tree`: what is measured, recorded and shown of trees, and what does not go with them."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from rich.console import Console

from draftkit.errors import DraftkitError, SettingError
from draftkit.evaluate.evaluate import _served, evaluate_draft
from draftkit.evaluate.job import Job
from draftkit.loading import open_target
from draftkit.report.card.markdown import acceptance_table
from draftkit.report.page.series import join
from draftkit.report.terminal.tables import show_evaluation
from draftkit.requests import DraftSampling
from draftkit.results.cell import MeasuredTree
from draftkit.results.record import Result, result_from
from draftkit.results.recorded import paths_of, read_rounds
from draftkit.results.settings import Settings, Sweep
from draftkit.results.verdict import ResultVerdict

EAGLE = "eagle:topk=4,depth=3,nodes=12"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    records = tmp_path_factory.mktemp("records") / "rounds.jsonl"
    asked = Settings(max_new_tokens=16, concurrency=2, limit=3, repeats=0, device="cpu", tree=EAGLE)
    return evaluate_draft("zoo:target", "zoo:eagle3", asked.sweep(temperature=(0.0, 1.0)), records=records), records


@pytest.mark.slow
def test_a_cell_says_what_tree_was_drafted(measured: tuple[Result, Path]) -> None:
    result, _ = measured
    for cell in result_from(result.to_dict(), Path("result.json")).cells:
        assert cell.tree == MeasuredTree("eagle", EAGLE, 12, 3)
        assert (cell.num_speculative_tokens, cell.draft_sampling, cell.verification) == (3, "greedy", "coupled")
        assert cell.num_matching_prompts == cell.num_prompts, "the output is that of plain decoding, at T = 1 too"
        assert cell.num_draft_tokens is not None
        assert cell.num_drafts is not None
        assert cell.num_draft_tokens == 12 * cell.num_drafts
        assert len(cell.accepted_at) == 3
        assert cell.acceptance_length is not None
        assert cell.acceptance_length.mean == pytest.approx(1 + sum(cell.accepted_at))
        for transcript in cell.samples or ():
            assert all(len(round.drafted) <= 3 for round in transcript.rounds)
    assert "with the tree eagle:topk=4" in result.verdicts[0].sentence
    shown = Console(width=80, record=True, file=io.StringIO())
    show_evaluation(shown, result, details=True)
    text = shown.export_text()
    assert "12 nodes" in text
    assert "EAGLE's top_k=4, depth=2, total_token=13" in " ".join(text.split())


@pytest.mark.slow
def test_rounds_are_recorded_as_paths(measured: tuple[Result, Path]) -> None:
    _, path = measured
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = read_rounds([path])
    assert len(rounds) == len(lines)
    for line, read in zip(lines, rounds, strict=True):
        assert "proposal" not in line
        assert (read.tree, read.drafted, line["drafted"]) == (EAGLE, 12, 12)
        nodes = {tuple(path[:end]) for path in line["paths"] for end in range(1, len(path) + 1)}
        assert len(nodes) == 12
        assert 0 <= read.accepted <= 3


def test_a_path_goes_from_the_root_to_a_leaf() -> None:
    assert paths_of([5, 6, 7, 8], [0, 0, 1, 3]) == [[6], [5, 7, 8]]
    assert paths_of([], []) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"verification": "block"},
        {"draft_sampling": DraftSampling(min_confidence=0.5)},
        {"draft_sampling": DraftSampling("probabilistic")},
        {"k_by_batch": {4: 2}},
        {"disable_above_batch": 4},
        {"tree": "oak"},
    ],
)
def test_what_belongs_to_chains_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="tree"):
        Settings(**({"tree": EAGLE} | keys))


def test_k_is_the_depth_of_a_tree(draftkit: Command) -> None:
    assert Settings(tree=EAGLE).num_speculative_tokens == 3
    with pytest.raises(SettingError, match="K beside the tree"):
        Settings(tree=EAGLE).sweep(k=(2, 4))
    with pytest.raises(SettingError, match="K beside the tree"):
        Settings().sweep(k=(2, 4), tree=(EAGLE,))
    asked = ("eval", "--target", "zoo:target", "--draft", "zoo:eagle3", "--tree", EAGLE)
    outcome = draftkit(*asked, "--k", "3")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--k beside --tree" in outcome.err


@pytest.mark.slow
def test_several_trees_are_measured_one_after_another(draftkit: Command) -> None:
    trees = ("eagle:topk=4,depth=4,nodes=16", "eagle:topk=2,depth=3,nodes=8", "best:nodes=8,depth=3")
    outcome = draftkit(
        "eval", "--target", "zoo:target", "--draft", "zoo:eagle3", *(f"--tree={tree}" for tree in trees),
        "--limit", "2", "--max-new-tokens", "16", "--set", "repeats=0", "--device", "cpu", "--json",
    )  # fmt: skip
    result = result_from(json.loads(outcome.out), Path("result.json"))
    assert [(cell.tree_name, cell.num_speculative_tokens) for cell in result.cells] == list(
        zip(trees, (4, 3, 3), strict=True)
    )
    (alone,) = evaluate_draft(
        "zoo:target", "zoo:eagle3", Settings(max_new_tokens=16, limit=2, repeats=0, device="cpu", tree=trees[1])
    ).cells
    assert result.cells[1].acceptance_length == alone.acceptance_length
    assert result.cells[1].acceptance_length != result.cells[2].acceptance_length
    shown = Console(width=80, record=True, file=io.StringIO())
    show_evaluation(shown, result)
    text = shown.export_text()
    assert max(map(len, text.splitlines()[1:])) <= 80
    rows = " ".join(text.partition("draft")[2].split())
    assert all(
        f"{kind}:{size}" in rows for kind, size in (("eagle", "topk=4,"), ("eagle", "topk=2,"), ("best", "nodes=8,"))
    )
    assert [one.main.tree_name for one in join([result])] == list(trees)
    card = acceptance_table([(1, cell) for cell in result.cells])
    assert all(tree.replace(",", ", ") in card for tree in trees)


def test_a_sweep_varies_trees() -> None:
    sweep = Settings(tree=EAGLE).sweep(tree=("eagle:topk=2,depth=4,nodes=8", EAGLE, "best:nodes=20,depth=2"))
    assert [(one.num_speculative_tokens, one.drafted_tree.nodes) for one in sweep.settings if one.drafted_tree] == [
        (4, 8), (3, 12), (2, 20),
    ]  # fmt: skip
    assert len(sweep.groups) == 1, "one run without a draft for all"
    assert sweep.largest.tree == "best:nodes=20,depth=2"


def test_a_tree_that_is_the_fastest_is_served_where_it_is_drafted() -> None:
    with ExitStack() as stack:
        job = Job(open_target("zoo:target"), ["zoo:eagle3", "zoo:dflash"], Sweep.of(Settings()), stack)
        won = ResultVerdict("use", "", draft="zoo:eagle3", tree="eagle:topk=4,depth=5,nodes=16", up_to=2)
        commands = _served(won, job).commands
        assert list(commands) == ["SGLang"]
        convert, serve = commands["SGLang"].splitlines()
        assert convert == "draftkit convert zoo:eagle3 eagle3-sglang --to sglang --target zoo:target"
        assert serve.endswith("--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 17")
        for other in (replace(won, tree="best:nodes=8"), replace(won, draft="zoo:dflash")):
            assert not _served(other, job).commands


@pytest.mark.slow
def test_a_head_with_fewer_levels_is_refused() -> None:
    with pytest.raises(DraftkitError, match="K = 8"):
        evaluate_draft("zoo:target", "zoo:mlp-speculator", Settings(tree="eagle", limit=1, device="cpu"))
