"""What serves a tree, in the servers' own counting."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftkit.convert.api import convert_checkpoint
from draftkit.engines import sglang
from draftkit.engines.serving import serve_trees
from draftkit.layout.folder import Draft, read_draft
from draftkit.runtime.tree_kinds import read_tree


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
    tree = read_tree("eagle:topk=4,depth=5,nodes=7").dynamic
    assert tree is not None
    assert not serve_trees(block, "FOLDER", tree)
