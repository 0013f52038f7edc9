"""`draftkit gate` as a user runs it: exit codes, what CI reads, and what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Command
from fixtures.servers.vllm_server import VllmTestServer
from markdown_it import MarkdownIt


def write(path: Path, share: float = 1.0, prompts: int = 40, **changes: Any) -> Path:
    """A result whose draft accepts a share of what another does."""
    rows = [
        {"id": str(i), "rounds": 30, "accepted": round((20 + 7 * (i % 5)) * share + i % 2), "tokens": 60}
        for i in range(prompts)
    ]
    cell = {
        "target": "org/A-Model", "draft": "d", "num_speculative_tokens": 4, "temperature": 0.0, "concurrency": 1,
        "draft_sampling": "greedy", "max_new_tokens": 60, "prompts_sha256": "p", "template_sha256": "t",
        "target_sha256": "w", "acceptance_length": {"mean": 2.0, "low": 1.9, "high": 2.1}, "by_prompt": rows,
    }  # fmt: skip
    made = {"device": "cpu", "dtype": "float32", "dataset": {"name": "x", "thinking": False}}
    path.write_text(json.dumps({"schema": 1, "provenance": made, "cells": [cell | changes]}))
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old.json")


def test_exit_codes_are_those_of_the_verdicts(draftkit: Command, tmp_path: Path, old: Path) -> None:
    same, worse = write(tmp_path / "same.json"), write(tmp_path / "worse.json", 0.8)
    few = write(tmp_path / "few.json", prompts=5)
    assert draftkit("gate", same, "--against", old).code == 0
    told = draftkit("gate", worse, "--against", old)
    assert told.code == 3
    assert told.out.startswith("worse: d at K = 4, T = 0: acceptance length 1.92 against 2.15, 0.")
    undecided = draftkit("gate", few, "--against", few)
    assert (undecided.code, "5 more prompts would decide" in undecided.out) == (4, True)
    assert draftkit("gate", few, "--against", few, "--undecided", "pass").code == 0
    assert draftkit("gate", few, "--against", few, "--undecided", "fail").code == 3


def test_json_has_the_verdict_and_its_power(draftkit: Command, tmp_path: Path, old: Path) -> None:
    found = json.loads(draftkit("gate", write(tmp_path / "new.json", 0.99), "--against", old, "--json").out)
    assert (found["verdict"], found["tolerance"], found["against"]) == ("not worse", 0.02, "old.json")
    (cell,) = found["cells"]
    assert cell["judgement"]["power"].keys() == {"0.02", "0.05", "0.1"}
    assert 0.98 < cell["judgement"]["ratio"]["low"] <= cell["judgement"]["ratio"]["high"] < 1.02


@pytest.mark.parametrize(
    ("share", "undecided", "child"),
    [(0.8, "report", "failure"), (1.0, "report", None), (1.0, "fail", None), (0.8, "pass", "failure")],
)
def test_junit_is_what_ci_reads(
    share: float, undecided: str, child: str | None, draftkit: Command, tmp_path: Path, old: Path
) -> None:
    new, file = write(tmp_path / "new.json", share), tmp_path / "gate.xml"
    draftkit("gate", new, "--against", old, "--junit", file, "--undecided", undecided)
    root = ElementTree.parse(file).getroot()
    (case,) = root.findall("./testsuite/testcase")
    assert (root.tag, root.get("tests"), root.get("failures")) == ("testsuites", "1", str(int(child == "failure")))
    assert case.find("failure") is not None if child else case.find("failure") is None
    names = {one.get("name") for one in case.findall("./properties/property")}
    assert {"ratio", "low", "high", "prompts"} <= names


def test_an_undecided_case_is_skipped(draftkit: Command, tmp_path: Path) -> None:
    few, file = write(tmp_path / "few\x1b.json", prompts=5, draft="a<b>\x01|c"), tmp_path / "gate.xml"
    draftkit("gate", few, "--against", few, "--junit", file)
    (skipped,) = ElementTree.parse(file).getroot().findall("./testsuite/testcase/skipped")
    assert "cannot tell" in str(skipped.get("message"))


def test_the_summary_is_markdown_and_is_appended(draftkit: Command, tmp_path: Path) -> None:
    result, page = write(tmp_path / "r.json", draft="a|b<script>"), tmp_path / "summary.md"
    page.write_text("# Job\n")
    draftkit("gate", result, "--against", result, "--summary", page)
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    assert [t.tag for t in tokens if t.type == "heading_open"] == ["h1", "h2"]
    assert sum(t.type == "td_open" for t in tokens) == 6
    assert "<script>" not in page.read_text()


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1}', "[]"])
def test_a_truncated_result_is_refused(text: str, draftkit: Command, tmp_path: Path, old: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(text)
    for arguments in ((broken, "--against", old), (old, "--against", broken)):
        found = draftkit("gate", *arguments, "--junit", tmp_path / "gate.xml")
        assert (found.code, "broken.json" in found.err, found.out) == (1, True, "")
        assert not (tmp_path / "gate.xml").exists()


@pytest.mark.parametrize(
    "arguments",
    [("--tolerance", "1"), ("--tolerance", "nan"), ("--target", "zoo:target"), ("--undecided", "maybe")],
)  # fmt: skip
def test_wrong_use_is_a_usage_error(arguments: tuple[str, ...], draftkit: Command, old: Path) -> None:
    assert draftkit("gate", old, "--against", old, *arguments).code == 2


def test_outputs_are_no_inputs(draftkit: Command, old: Path) -> None:
    before = old.read_text()
    for option in ("--junit", "--summary"):
        assert draftkit("gate", old, "--against", old, option, old).code == 1
    assert old.read_text() == before


@pytest.mark.slow
def test_a_gate_starts_without_torch(old: Path) -> None:
    code = (
        "import sys; from draftkit.cli import app\n"
        f"try: app(['gate', {str(old)!r}, '--against', {str(old)!r}])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


SHORT = ("--target", "zoo:target", "--draft", "zoo:eagle3", "--limit", 12, "--max-new-tokens", 12, "--concurrency", 12)


@pytest.mark.long
def test_without_a_new_result_one_is_measured_in_the_same_way(draftkit: Command, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    drawn = ("--temperature", "1", "--set", "seed=7", "--set", "top_p=0.9", "--set", "repeats=0")
    assert draftkit("eval", *SHORT, *drawn, "--out", old).code == 0
    found = draftkit("gate", "--against", old, "--target", "zoo:target", "--draft", "zoo:eagle3", "--out", new)
    assert (found.code, "1.000 × [1.000, 1.000] on 12 prompts" in found.out) == (0, True)
    one, other = (json.loads(path.read_text())["cells"][0] for path in (old, new))
    for name in ("seed", "top_p", "temperature", "concurrency", "prompts_sha256", "target_sha256", "max_new_tokens"):
        assert one[name] == other[name]


def test_a_file_of_prompts_that_is_gone_is_named(draftkit: Command, tmp_path: Path) -> None:
    old = write(tmp_path / "old.json")
    data = json.loads(old.read_text())
    data["provenance"] |= {"prompts": "mine.jsonl", "settings": {"max_new_tokens": 8}}
    old.write_text(json.dumps(data))
    found = draftkit("gate", "--against", old, "--target", "zoo:target", "--draft", "zoo:eagle3")
    assert (found.code, "put the file beside the result" in found.err) == (1, True)


@pytest.mark.slow
def test_a_server_that_tells_totals_only_is_asked_one_request_at_a_time(draftkit: Command, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    asked = ("--target", "zoo:target", "--k", 4, "--limit", 12, "--max-new-tokens", 16, "--concurrency", 4)
    with VllmTestServer() as server:
        assert draftkit("eval", "--server", server.url, *asked, "--out", tmp_path / "totals.json").code == 0
        assert draftkit("gate", tmp_path / "totals.json", "--against", tmp_path / "totals.json").code == 1
        measured = draftkit("eval", "--server", server.url, *asked, "--set", "one_by_one=true", "--out", old)
        assert measured.code == 0
        found = draftkit("gate", "--against", old, "--server", server.url, "--target", "zoo:target", "--out", new)
        assert (found.code, "on 12 prompts" in found.out) == (0, True)
        assert server.most_at_once <= 4
    by_request = tmp_path / "by_request.json"
    with VllmTestServer(by_request=True) as server:
        assert draftkit("eval", "--server", server.url, *asked, "--out", by_request).code == 0
    counts = [
        {p["id"]: (p["accepted"], p["rounds"]) for p in json.loads(file.read_text())["cells"][0]["by_prompt"]}
        for file in (old, new, by_request)
    ]
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.slow
def test_a_server_with_others_traffic_is_refused(draftkit: Command, tmp_path: Path) -> None:
    asked = ("--target", "zoo:target", "--k", 4, "--limit", 4, "--max-new-tokens", 16, "--set", "one_by_one=true")
    with VllmTestServer(others=9) as server:
        found = draftkit("eval", "--server", server.url, *asked, "--out", tmp_path / "r.json")
    assert found.code == 1
    assert "worked for others meanwhile" in found.err
    assert not (tmp_path / "r.json").exists()
