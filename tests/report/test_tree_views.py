"""What is told of trees, in the terminal, on the page and on a card; and what serves them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.report_results import full_result
from rich.console import Console

from draftkit.convert.api import convert_checkpoint
from draftkit.engines import sglang
from draftkit.engines.serving import serve_trees
from draftkit.layout.folder import Draft, read_draft
from draftkit.report.page.page import page
from draftkit.report.page.series import join
from draftkit.report.terminal.tables import show_evaluation
from draftkit.report.trees import tree_advice
from draftkit.results.cell import ForecastTree, MeasuredTree, StaticTree, TreeSpeed
from draftkit.results.record import Result, result_from
from draftkit.runtime.tree_kinds import read_tree

CHOICES = ((0,), (1,), (0, 0))


def told(name: str, length: float, speeds: tuple[float, ...], up_to: int | None) -> ForecastTree:
    tree = MeasuredTree.of(read_tree(name))
    near = MeasuredTree.of(read_tree("sglang:steps=2,topk=2,tokens=4"))
    timed = tuple(TreeSpeed(4**i, 1.5 * speed, speed, 20.0 + i, 15.25) for i, speed in enumerate(speeds))
    assert tree is not None
    return ForecastTree(tree, length, timed, up_to, StaticTree(CHOICES, 2.5, 2.25, near, 2.4, 2.46))


def with_trees(*trees: ForecastTree) -> Result:
    result = result_from(full_result(), Path("r.json"))
    first = replace(result.cells[3], trees=trees)
    return result_from(replace(result, cells=(first,)).to_dict(), Path("r.json"))


SMALL, LARGE = "eagle:topk=4,depth=3,nodes=8", "eagle:topk=4,depth=3,nodes=16"
PAYING = told(SMALL, 3.1, (1.25, 0.8), 1), told(LARGE, 3.4, (1.1, 0.7), 1)


def test_it_is_said_up_to_which_batch_a_tree_pays() -> None:
    assert tree_advice(with_trees(*PAYING).cells[0]) == (
        f"The tree {SMALL} would decode 1.25 × as fast as the chain of K = 4 at batch 1, and would be the faster up to "
        "batch 1."
    )
    never = tree_advice(with_trees(told("best:nodes=8", 3.1, (0.9, 0.8), None)).cells[0])
    assert never.startswith(
        "No tree would be faster than the chain, at no batch that was timed: the best, best:nodes=8"
    )
    assert not tree_advice(result_from(full_result(), Path("r.json")).cells[0])


def test_the_terminal_has_forecasts_lists_and_the_nearest_of_sglang() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    show_evaluation(console, with_trees(*PAYING), details=True)
    text = console.export_text()
    assert "would decode 1.25 × as fast" in " ".join(text.split())
    assert "that of 3 nodes: [[0], [1], [0, 0]]" in text
    assert "no server takes a list" in text
    (row,) = {line for line in text.splitlines() if "2, 2, 4" in line}
    assert row.split() == ["3", "2.50", "2,", "2,", "4", "2.40", "-0.06"]
    assert "20.0, 15.2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_page_has_a_section_of_trees() -> None:
    result = with_trees(*PAYING)
    html = page([result], join([result]), {})
    assert '<section id="trees">' in html
    assert '<a href="#trees">' in html
    for words in (
        "would decode 1.25 × as fast",
        "[[0], [1], [0, 0]]",
        "--speculative-num-steps 2",
        "20.0, 15.2",
        "-0.06",
    ):
        assert words in html, words
    assert '<section id="trees">' not in page([r := result_from(full_result(), Path("r.json"))], join([r]), {})


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    return read_draft(convert_checkpoint("zoo:eagle3", tmp_path_factory.mktemp("draft") / "draft", target="zoo:target"))


def test_servers_are_told_of_a_tree_in_their_own_counting(eagle3: Draft) -> None:
    tree = read_tree("eagle:topk=10,depth=6,nodes=60").dynamic
    assert tree is not None
    found = serve_trees(eagle3, "FOLDER", tree, target="T")
    assert set(found) == {sglang.ENGINE}, "vLLM drafts no tree"
    flags = "--speculative-num-steps 6 --speculative-eagle-topk 10 --speculative-num-draft-tokens 61"
    assert flags in found[sglang.ENGINE]
    assert read_tree("best:nodes=8").dynamic is None


def test_a_draft_of_which_no_server_drafts_trees_has_no_commands(tmp_path: Path) -> None:
    block = read_draft(convert_checkpoint("zoo:dflash", tmp_path / "draft", target="zoo:target"))
    tree = read_tree("sglang:steps=5,topk=4,tokens=8").dynamic
    assert tree is not None
    assert not serve_trees(block, "FOLDER", tree)
