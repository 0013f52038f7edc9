"""Domino, DFlare, LiLiCorr and XPress: called by their names, held and written back, and run by nobody wrongly."""

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
from fixtures.checkpoints.published import dflash_successors as fakes
from fixtures.training.samples import samples
from safetensors.torch import load_file

from draftkit.convert.api import convert_checkpoint, describe_checkpoint, plan_conversion
from draftkit.convert.unified import REFUSED_ARCHITECTURE
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, FormatError, LayoutError
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import read_draft

ALL = all_published()
CALLED = {
    "domino": "A Domino draft",
    "dflare": "A DFlare draft",
    "lilicorr": "A LiLiCorr draft",
    "xpress": "An XPress draft",
    "speculators-xpress": "An XPress draft",
}


@pytest.mark.parametrize("name", [name for name, p in ALL.items() if p.method in ("domino", "dflare", "xpress")])
def test_vllm_refuses_what_it_has_no_class_for(name: str, target: Path, tmp_path: Path) -> None:
    source = ALL[name].write(tmp_path / "source")
    out = convert_checkpoint(str(source), tmp_path / "out", target=str(target))
    assert json.loads((out / "config.json").read_text())["architectures"] == [REFUSED_ARCHITECTURE]
    with pytest.raises(LayoutError, match=r"vLLM cannot run this draft: vLLM.* has no class for"):
        plan_conversion(str(out), to="vllm")


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
@pytest.mark.parametrize("name", CALLED)
def test_every_command_says_what_it_is(name: str, running_target: Path, tmp_path: Path, draftkit: Command) -> None:
    source = ALL[name].write(tmp_path / "source")
    unified = convert_checkpoint(str(source), tmp_path / "unified", target=str(running_target))
    for draft in (source, unified):
        looked = draftkit("inspect", draft, "--target", running_target, "--json")
        assert said(json.loads(looked.out)["findings"], "not-run", CALLED[name])
        measured = draftkit("eval", "--target", running_target, "--draft", draft, "--dataset", "zoo", "--limit", 1)
        assert measured.code == 1
        assert f"{CALLED[name]}: " in measured.err
        assert "draftkit cannot run it yet" in measured.err
        assert ("draftkit eval --engine vllm measures it" in measured.err) == (name == "lilicorr")
    examined = draftkit(
        "doctor", "--target", running_target, "--draft", unified, "--dataset", "zoo", "--limit", 1, "--json"
    )
    diagnosis = json.loads(examined.out)
    assert diagnosis["length"] is None
    assert said(diagnosis["findings"], "not-measured", CALLED[name])
    assert {tensor["name"] for tensor in diagnosis["tensors"]} >= read_draft(unified).tensors.keys()


def said(findings: list[dict[str, str]], name: str, what: str) -> bool:
    return any(f["name"] == name and what in f["message"] and "cannot run it yet" in f["message"] for f in findings)


def test_training_does_not_go_on_with_them(running_target: Path, tmp_path: Path, draftkit: Command) -> None:
    source = ALL["domino"].write(tmp_path / "source")
    data, out = tmp_path / "samples.jsonl", tmp_path / "out"
    write_samples(data, samples(8), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    flags = ("--target", running_target, "--data", data, "--out", out, "--draft", source)
    refused = draftkit("train", "--recipe", "dflash", *flags)
    assert refused.code == 1
    assert "A Domino draft: " in refused.err
    assert "draftkit cannot run it yet" in refused.err
    assert not out.exists()


NAMED = {
    "domino": {"dflash_config": {"projector_type": "domino", "mask_token_id": 319, "target_layer_ids": [1, 4, 6]}},
    "lilicorr": {"architectures": ["LiLiCorrDraftModel"]},
    "dflare": {"architectures": ["QwenDFlareDraftModel"]},
    "xpress": {"architectures": ["XPressDraftModel"]},
}


@pytest.mark.parametrize("name", NAMED)
def test_a_file_that_has_only_the_name_of_its_head_is_no_dflash(name: str, target: Path, tmp_path: Path) -> None:
    """Engines that take it for DFlash leave out the head without a word."""
    values = dflash_fakes.dflash_config() | NAMED[name]
    source = pico.write_checkpoint(tmp_path, values, dflash_fakes.dflash_tensors(torch.float16), safetensors=True)
    assert describe_checkpoint(str(source), target=str(target)).plan.format == name
    with pytest.raises(DraftkitError, match="missing"):
        plan_conversion(str(source), target=str(target)).require_draft()


def test_a_head_that_is_switched_off(target: Path, tmp_path: Path) -> None:
    fake = replace(ALL["lilicorr"], config=fakes.lilicorr_config({"lilicorr_enabled": False}))
    with pytest.raises(FormatError, match="lilicorr_enabled is false"):
        plan_conversion(str(fake.write(tmp_path)), target=str(target))


def test_the_library_has_mlps_of_whole_ratios_only(target: Path, tmp_path: Path) -> None:
    tensors = fakes.xpress_tensors(torch.float16, published=True)
    for name, shape in {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}.items():
        tensors[f"xpress_head.mlp.{name}.weight"] = torch.ones(shape, dtype=torch.float16)
    source = pico.write_checkpoint(tmp_path, fakes.xpress_config(), tensors, safetensors=True)
    with pytest.raises(LayoutError, match="no multiple of its rank"):
        plan_conversion(str(source), to="speculators", target=str(target))


def test_xpress_goes_from_one_layout_to_the_other(target: Path, tmp_path: Path) -> None:
    """The same tensors under other names; the library's windows that are causal are lost in neither."""
    source = ALL["xpress"].write(tmp_path / "source")
    there = convert_checkpoint(str(source), tmp_path / "there", to="speculators", target=str(target))
    back = convert_checkpoint(str(there), tmp_path / "back", to="xpress", target=str(target))
    before, after = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
