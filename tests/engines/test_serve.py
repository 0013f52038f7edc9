"""Serve lines work as they are printed: real paths, quoted, with no more draft tokens than a draft was trained for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from conftest import Command

from draftkit import zoo
from draftkit.convert.serve import local_name, serving_notes, stated_tokens
from draftkit.layout.folder import read_draft
from draftkit.train.checkpoint import load_tensors, save_draft


@pytest.mark.parametrize("name", ["eagle3", "p-eagle", "pard"])
def test_convert_prints_a_line_that_a_shell_can_run(name: str, tmp_path: Path, draftkit: Command) -> None:
    ran = draftkit("convert", f"zoo:{name}", tmp_path / "my draft", "--target", "zoo:target")
    line = next(line for line in ran.out.splitlines() if line.startswith("vLLM: "))
    words = shlex.split(line.removeprefix("vLLM: "))
    assert words[:3] == ["vllm", "serve", str(zoo.path("target"))]
    assert json.loads(words[4])["model"] == str(tmp_path / "my draft")
    assert "zoo:target" not in line
    assert ('cannot read "method"' in ran.out) == (name != "eagle3")


def test_no_more_tokens_than_were_trained(tmp_path: Path, draftkit: Command) -> None:
    draftkit("convert", "zoo:p-eagle", tmp_path / "draft", "--target", "zoo:target")
    spec, tensors = read_draft(tmp_path / "draft").spec, load_tensors(tmp_path / "draft")
    save_draft(tmp_path / "trained", spec, tensors, target="zoo:target", speculative_tokens=4)
    draft = read_draft(tmp_path / "trained")
    assert stated_tokens(draft) == 4
    line, note = serving_notes(draft, tmp_path / "trained")
    assert json.loads(shlex.split(line)[-1])["num_speculative_tokens"] == 4
    assert "parallel_drafting" in note
    ran = draftkit("convert", tmp_path / "trained", tmp_path / "out", "--to", "speculators", "--target", "zoo:target")
    assert ran.code == 0, ran.err
    said = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert said["proposal_methods"][0]["speculative_tokens"] == 4
    assert said["verifier"]["name_or_path"] == str(zoo.path("target"))


def test_names_of_the_hub_stay() -> None:
    assert local_name("org/model") == "org/model"
