"""Drafts that draftkit cannot convert yet are called by their name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico

from draftkit.convert.api import inspect_checkpoint
from draftkit.engines.known import known, speaking_of
from draftkit.errors import FormatError

BODY = ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "speculators Domino": ("Domino", BODY, {"speculators_model_type": "domino"}),
    "Laguna": ("DFlash with Laguna's layers", (*BODY, "aux_hidden_norms.0.weight"), {}),
    "DeepSeek-V4": ("DSpark within DeepSeek-V4", ("mtp.0.main_proj.weight", "mtp.2.markov_head.embed.weight"), {}),
    "DeepSpec, Gemma-4": ("DSpark with Gemma-4's layers", BODY, {"architectures": ["Gemma4DSparkModel"]}),
    "Kimi-K3": ("DSpark with K3's layers", BODY, {"architectures": ["K3DSparkModel"]}),
    "Muse Spark": ("DSpark with MuseSpark's layers", BODY, {"architectures": ["MuseSparkDSparkModel"]}),
    "Automodel, GLM": ("DSpark with Glm5_2's layers", BODY, {"architectures": ["Glm5_2DSparkModel"]}),
    "speculators of tomorrow": ("rnnt of the speculators library", BODY, {"speculators_model_type": "rnnt"}),
    "SpecForge of tomorrow": (
        "rnnt, a block drafter with a head of that name",
        BODY,
        {"dflash_config": {"projector_type": "rnnt"}},
    ),
    "EAGLE-3.1 of Kimi-K2.6": (
        "EAGLE-3 with latent attention",
        ("fc.weight", "midlayer.self_attn.kv_a_proj_with_mqa.weight"),
        {},
    ),
    "Qwen3-Next": ("MTP", ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"), {"model_type": "qwen3_next"}),
    "DeepSeek": ("MTP", ("model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"), {}),
    "MiMo": ("MTP", ("model.mtp_layers.0.input_proj.weight",), {"model_type": "mimo"}),
    "Ernie": ("MTP", ("model.mtp_linear_proj.0.weight",), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_called_by_their_name(case: str, tmp_path: Path) -> None:
    name, tensors, config = CASES[case]
    pico.write_checkpoint(tmp_path, config, {tensor: torch.ones(2, 2) for tensor in tensors})
    with pytest.raises(FormatError, match=f"this is a draft of the kind {name}; draftkit cannot convert it"):
        inspect_checkpoint(str(tmp_path))


# Formats that others serve: a tensor that tells it, what a config calls it, its name, and who serves it.
SERVED = {
    "Domino": ("embed_proj.0.weight", {"dflash_config": {"projector_type": "domino"}}, "Domino", "SGLang"),
    "Domino, early": ("logit_head.prefix_gru.weight_ih_l0", {}, "Domino", "SGLang"),
    "DFlare": ("layers.0.self_attn.k_proj_target.weight", {}, "DFlare", "AngelSlim"),
    "DFlare by name": ("norm.weight", {"architectures": ["QwenDFlareDraftModel"]}, "DFlare", "AngelSlim"),
    "XPress": ("xpress_head.w1.weight", {}, "XPress", r"vLLM ≥ 0\.33"),
    "XPress by name": ("norm.weight", {"architectures": ["Qwen3XPressModel"]}, "XPress", r"vLLM ≥ 0\.33"),
    "XPress of the library": (
        "refiner_head.mix_l", {"speculators_model_type": "xpress"}, "XPress of the speculators library",
        "the speculators library",
    ),
    "Medusa": ("0.0.linear.weight", {}, "Medusa", "text-generation-inference"),
    "Medusa in its target": ("medusa_head.0.0.linear.weight", {}, "Medusa", "text-generation-inference"),
    "Medusa of vLLM": ("blocks.0.layers.0.weight", {}, "Medusa in vLLM's layout", r"vLLM 0\.32"),
    "Medusa by name": ("norm.weight", {"architectures": ["MedusaModel"]}, "Medusa in vLLM's layout", r"vLLM 0\.32"),
    "EAGLE of V0": ("lm_head.weight", {"model_type": "eagle", "model": {}}, "EAGLE of vLLM's first engine", "vLLM"),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_what_others_serve_is_refused_with_who_does(case: str, tmp_path: Path, draftkit: Command) -> None:
    tensor, config, name, server = SERVED[case]
    pico.write_checkpoint(tmp_path / "source", config, {one: torch.ones(2, 2) for one in (*BODY, tensor)})
    refused = draftkit("convert", tmp_path / "source", tmp_path / "out")
    assert refused.code == 1
    assert re.search(
        f"this is a draft of the kind {name}; draftkit cannot convert it\n(.|\n)*next: {server} ", refused.err
    )
    assert not (tmp_path / "out").exists()


def test_an_assistant_of_gemma_4_in_gguf_is_refused_with_who_serves_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "assistant.gguf", "gemma4-assistant")
    writer.add_tensor("nextn.pre_projection.weight", np.ones((2, 2), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(FormatError, match=r"kind Gemma-4's assistant in GGUF(.|\n)*next: llama\.cpp serves it"):
        inspect_checkpoint(str(tmp_path / "assistant.gguf"))


def test_heads_of_medusa_beside_their_target_are_seen(tmp_path: Path) -> None:
    pico.save_llama(tmp_path)
    torch.save({"0.0.linear.weight": torch.ones(64, 64)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(FormatError, match="kind Medusa"):
        inspect_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("layers", "release"), [("K3", "0.32"), ("Qwen3Omni", "0.32"), ("MuseSpark", "0.33"), ("Glm5_2", None)]
)
def test_a_release_of_vllm_that_loads_them_is_named(layers: str, release: str | None, tmp_path: Path) -> None:
    config = {"architectures": [f"{layers}DSparkModel"]}
    pico.write_checkpoint(tmp_path, config, {tensor: torch.ones(2, 2) for tensor in BODY})
    with pytest.raises(FormatError) as refused:
        inspect_checkpoint(str(tmp_path))
    hint = f"\n  next: vLLM ≥ {release} loads such drafts as they are, with method dspark"
    assert str(refused.value).endswith(hint) is (release is not None)


STEP5 = {"architectures": ["Step5ForCausalLM"], "model_type": "step5"}


@pytest.mark.parametrize(
    ("tensor", "config"),
    [
        ("fc.weight", {"architectures": ["DFlash2BeamDraftModel"]}),
        ("decoder.extra_heads.0.weight", {"architectures": ["NemotronParseForConditionalGeneration"]}),
        ("model.layers.4.eh_proj.weight", STEP5),
        ("model.layers.4.eh_proj.weight", {"model_type": "rnnt", "num_mtp_layers": 1}),
    ],
)
def test_what_a_later_release_loads_is_named(tensor: str, config: dict[str, Any], tmp_path: Path) -> None:
    pico.write_checkpoint(tmp_path, config, {tensor: torch.ones(2, 2)})
    with pytest.raises(FormatError) as refused:
        inspect_checkpoint(str(tmp_path))
    newest, older = known()["vLLM"]
    assert f"vLLM ≥ {newest.number} loads such drafts as they are" in str(refused.value)
    with speaking_of(f"vllm=={older.number}"), pytest.raises(FormatError, match=f"{older} has no class for it"):
        inspect_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["DSpineDraftModel"], "dspine_config": {}}, "kind DSpine; .*: no layout of it is published"),
        ({"architectures": ["Eagle4DraftModel"]}, "kind EAGLE-4; .*: its license is not open"),
    ],
)
def test_what_is_not_open_is_not_read(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    pico.write_checkpoint(tmp_path, config, {tensor: torch.ones(2, 2) for tensor in BODY})
    with pytest.raises(FormatError, match=why):
        inspect_checkpoint(str(tmp_path))


def test_heads_of_an_unknown_target_are_refused_alike_whatever_is_asked(tmp_path: Path) -> None:
    pico.write_checkpoint(tmp_path, {"model_type": "rnnt"}, {"model.mtp_layers.0.input_proj.weight": torch.ones(2, 2)})
    for asked in (None, "mtp"):
        with pytest.raises(FormatError, match=r"kind MTP; (.|\n)*next: neither architectures nor model_type"):
            inspect_checkpoint(str(tmp_path), format=asked)


def test_an_unknown_layout_is_called_what_its_config_calls_it(tmp_path: Path) -> None:
    config = {"architectures": ["HSpecDraftModel"], "dflash_config": {"projector_type": "dflash"}}
    pico.write_checkpoint(tmp_path, config, {"hspec.fc.weight": torch.ones(2, 2)})
    message = (
        "config.json calls this HSpecDraftModel, dflash, and no known draft format has these 1 tensors: hspec.fc.w"
    )
    with pytest.raises(FormatError, match=message):
        inspect_checkpoint(str(tmp_path))
