"""LiLiCorr: held and written back, run by vLLM, and by nobody wrongly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from fixtures.checkpoints.published import dflash as dflash_fakes
from fixtures.checkpoints.published import lilicorr as fakes
from fixtures.training.samples import samples

from draftkit.convert.api import convert_checkpoint, describe_checkpoint, plan_conversion
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, FormatError
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import read_draft

ALL = all_published()
CALLED = "A LiLiCorr draft"


def test_vllm_loads_lilicorr_from_the_unified_folder(target: Path, tmp_path: Path, draftkit: Command) -> None:
    source = ALL["lilicorr"].write(tmp_path / "source")
    ran = draftkit("convert", source, tmp_path / "out", "--target", target)
    settings = {"model": str(tmp_path / "out"), "method": "dflash", "num_speculative_tokens": 4}
    assert f"--speculative-config '{json.dumps(settings)}'" in ran.out
    assert "second model runner" in ran.out
    assert "draftkit eval" not in ran.err  # which could not run it
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["architectures"], said["has_own_lm_head"]) == (["LiLiCorrDraftModel"], False)
    assert said["dflash_config"].items() >= fakes.LILICORR.items()


def test_what_vllms_lilicorr_computes_otherwise(target: Path, tmp_path: Path) -> None:
    source = str(ALL["lilicorr"].write(tmp_path))
    spec = plan_conversion(source, target=str(target)).require_draft().spec
    assert refusal_by_vllm(spec) is None
    for fact, value, reason in [
        ("lilicorr_candidate_topk", 6, "takes 1, 2, 4, 8, 16 candidates"),
        ("slots", "anchor-first", "from masks alone"),
        ("embed_tokens", "draft", "with the target's table"),
        ("window_rule", "anchor", None),  # no layer has a window
        ("last_state", "after_norm", "before the final norm"),
    ]:
        other = replace(spec, architecture=with_facts(spec.architecture, **{fact: value}))
        found = refusal_by_vllm(other)
        assert (reason is None and found is None) or (reason or "") in (found or ""), fact


@pytest.mark.slow
def test_every_command_says_what_it_is(running_target: Path, tmp_path: Path, draftkit: Command) -> None:
    source = ALL["lilicorr"].write(tmp_path / "source")
    unified = convert_checkpoint(str(source), tmp_path / "unified", target=str(running_target))
    for draft in (source, unified):
        looked = draftkit("inspect", draft, "--target", running_target, "--json")
        assert said(json.loads(looked.out)["findings"], "not-run", CALLED)
        measured = draftkit("eval", "--target", running_target, "--draft", draft, "--dataset", "zoo", "--limit", 1)
        assert measured.code == 1
        assert f"{CALLED}: " in measured.err
        assert "draftkit cannot run it yet" in measured.err
        assert "draftkit eval --engine vllm measures it" in measured.err
    examined = draftkit(
        "doctor", "--target", running_target, "--draft", unified, "--dataset", "zoo", "--limit", 1, "--json"
    )
    diagnosis = json.loads(examined.out)
    assert diagnosis["length"] is None
    assert said(diagnosis["findings"], "not-measured", CALLED)
    assert {tensor["name"] for tensor in diagnosis["tensors"]} >= read_draft(unified).tensors.keys()


def said(findings: list[dict[str, str]], name: str, what: str) -> bool:
    return any(f["name"] == name and what in f["message"] and "cannot run it yet" in f["message"] for f in findings)


def test_training_does_not_go_on_with_it(running_target: Path, tmp_path: Path, draftkit: Command) -> None:
    source = ALL["lilicorr"].write(tmp_path / "source")
    data, out = tmp_path / "samples.jsonl", tmp_path / "out"
    write_samples(data, samples(8), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    flags = ("--target", running_target, "--data", data, "--out", out, "--draft", source)
    refused = draftkit("train", "--recipe", "dflash", *flags)
    assert refused.code == 1
    assert f"{CALLED}: " in refused.err
    assert "draftkit cannot run it yet" in refused.err
    assert not out.exists()


def test_a_file_that_has_only_the_name_of_its_head_is_no_dflash(target: Path, tmp_path: Path) -> None:
    """Engines that take it for DFlash leave out the head without a word."""
    values = dflash_fakes.dflash_config() | {"architectures": ["LiLiCorrDraftModel"]}
    source = pico.write_checkpoint(tmp_path, values, dflash_fakes.dflash_tensors(torch.float16), safetensors=True)
    assert describe_checkpoint(str(source), target=str(target)).plan.format == "lilicorr"
    with pytest.raises(DraftkitError, match="missing"):
        plan_conversion(str(source), target=str(target)).require_draft()


def test_a_head_that_is_switched_off(target: Path, tmp_path: Path) -> None:
    fake = replace(ALL["lilicorr"], config=fakes.lilicorr_config({"lilicorr_enabled": False}))
    with pytest.raises(FormatError, match="lilicorr_enabled is false"):
        plan_conversion(str(fake.write(tmp_path)), target=str(target))
