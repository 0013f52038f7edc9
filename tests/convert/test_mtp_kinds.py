"""Every kind of head that vLLM 0.32 drafts with: counted, checked, taken out, put back; and run, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints.mtp_kinds import KINDS, Kind, save
from safetensors.torch import load_file, save_file

from draftkit.convert.api import convert_checkpoint, put_heads_back, target_with_heads
from draftkit.errors import LayoutError
from draftkit.layout.folder import read_draft
from draftkit.layout.mtp import COUNTS
from draftkit.report.terminal.conversion import findings_of_heads
from draftkit.runtime.drafters import check_runs

FILE = "model.safetensors"
# `MTPModelTypes` of vLLM 0.32's config/speculative.py, without the name that stands for any.
IN_VLLM = {
    *("deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp"),
    *("ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp"),
    *("qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp"),
    *("kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp", "inkling_mtp", "glm5_next_mtp"),
    "gemma4_mtp",
}
OWN_CHECKPOINT = "gemma4_mtp"  # which is not within the target's


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind.vllm} {kind.config['model_type']}")
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(params=[kind for kind in KINDS if kind.runs], ids=lambda kind: kind.config["model_type"])
def whole(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def folder(kind: Kind, tmp_path: Path) -> Path:
    return save(kind, tmp_path / "target")


def found_in(folder: Path) -> dict[str, str]:
    seen = target_with_heads(str(folder))
    assert seen is not None
    return {f.name: f.message for f in findings_of_heads(*seen, read=True) if f.severity != "ok"}


def test_all_kinds_of_vllm_are_here() -> None:
    assert {OWN_CHECKPOINT, *(kind.vllm for kind in KINDS)} == IN_VLLM


def test_a_sound_target(kind: Kind, folder: Path) -> None:
    assert found_in(folder) == {}
    seen = target_with_heads(str(folder))
    assert seen is not None
    heads = seen[1]
    assert (heads.promised, heads.count) == (kind.modules, kind.modules)
    assert set(kind.stored) == heads.tensors.keys()


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("mimo", "MiMoForCausalLM"), ("mimo_v2_flash", "MiMoV2FlashForCausalLM"), ("step3p5", "Step3p5ForCausalLM"),
        ("glm4_moe", "Glm4MoeForCausalLM"), ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
        ("glm_ocr", "GlmOcrForConditionalGeneration"), ("bailing_hybrid", "BailingMoeV2_5ForCausalLM"),
        ("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
    ],
)  # fmt: skip
def test_a_class_that_vllm_looks_at_tells_the_kind_whatever_the_type_is(
    model_type: str, name: str, tmp_path: Path
) -> None:
    kind = next(k for k in KINDS if k.config["model_type"] == model_type and k.vllm != "bailing_hybrid_v3_mtp")
    typed = replace(kind, config=kind.config | {"architectures": ["Other"]})
    classed = replace(kind, config=kind.config | {"model_type": "other", "architectures": [name]})
    by_type = target_with_heads(str(save(typed, tmp_path / "typed")))
    by_class = target_with_heads(str(save(classed, tmp_path / "classed")))
    assert by_type is not None
    assert by_class is not None
    assert (by_class[1].kind, by_class[1].promised) == (by_type[1].kind, by_type[1].promised)
    assert by_class[1].tensors.keys() == by_type[1].tensors.keys()


def test_a_norm_that_is_gone_is_named(kind: Kind, folder: Path) -> None:
    name = kind.stored[0]
    whole = load_file(folder / FILE)
    save_file({n: t for n, t in whole.items() if n != name}, folder / FILE, {"format": "pt"})
    assert name in found_in(folder)["head-tensors-missing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "finding"), [(torch.nan, "heads-not-finite"), (0.0, "heads-zero")], ids=["NaN", "zero"]
)
def test_a_tensor_that_was_never_filled_is_named(kind: Kind, folder: Path, value: float, finding: str) -> None:
    name = kind.stored[-1]
    whole = load_file(folder / FILE)
    save_file(whole | {name: torch.full_like(whole[name], value)}, folder / FILE, {"format": "pt"})
    assert name in found_in(folder)[finding]


def test_without_the_heads_the_promise_is_not_kept(kind: Kind, folder: Path) -> None:
    whole = load_file(folder / FILE)
    own = set(kind.stored)
    save_file({n: t for n, t in whole.items() if n not in own}, folder / FILE, {"format": "pt"})
    seen = target_with_heads(str(folder))
    stated = any(f'"{key}"' in json.dumps(kind.config | kind.further) for key in COUNTS)
    assert (seen is not None) == stated
    if stated:
        assert "the weights hold none" in found_in(folder)["heads-missing"]


@pytest.mark.slow
def test_taken_out_and_put_back(kind: Kind, folder: Path, tmp_path: Path) -> None:
    """Over its own, which changes nothing, and into a copy that has lost them and says so."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    head = convert_checkpoint(str(folder), tmp_path / "head", format="mtp")
    own = set(kind.stored)
    assert load_file(head / FILE).keys() == own
    put, _ = put_heads_back(str(head), str(folder), tmp_path / "whole")
    assert {path.name: path.read_bytes() for path in put.iterdir()} == before
    bare = shutil.copytree(folder, tmp_path / "bare")
    whole = load_file(folder / FILE)
    save_file({n: t for n, t in whole.items() if n not in own}, bare / FILE, {"format": "pt"})
    put_heads_back(str(head), str(bare))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load_file(bare / FILE).items())
    assert found_in(bare) == {}


@pytest.mark.slow
def test_heads_are_run_or_refused_by_name(kind: Kind, folder: Path, tmp_path: Path) -> None:
    draft = read_draft(convert_checkpoint(str(folder), tmp_path / "head", format="mtp"))
    if kind.runs:
        check_runs(draft)
        return
    with pytest.raises(LayoutError, match=f"heads of {kind.config['model_type']}; draftkit cannot run it yet"):
        check_runs(draft)


def test_a_matrix_of_another_shape_is_refused(whole: Kind, tmp_path: Path) -> None:
    """Whatever shape the target's own layers have: also where they are not beside the heads."""
    folder = save(whole, tmp_path / "target")
    tensors = load_file(folder / FILE)
    own = {name: tensors[name] for name in whole.stored}
    for name in (whole.stored[-1], next(n for n in own if n.endswith(("k_proj.weight", "kv_b_proj.weight")))):
        save_file(own | {name: own[name].T.contiguous()}, folder / FILE, {"format": "pt"})
        with pytest.raises(LayoutError, match=re.escape(name)):
            convert_checkpoint(str(folder), tmp_path / "head", format="mtp")
    assert not (tmp_path / "head").exists()
