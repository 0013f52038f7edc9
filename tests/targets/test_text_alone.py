"""Targets that are given text alone are loaded without what reads images, and compute the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints.visual import VISUAL, prompt_with_images, visual_model
from peft import LoraConfig, get_peft_model
from transformers.utils import logging

from draftkit.loading import open_target
from draftkit.targets.pretrained import load_pretrained

torch.set_num_threads(1)
logging.disable_progress_bar()
WHOLE = sorted(VISUAL.keys() - {"qwen3_5"})  # transformers builds the language model of that alone


@pytest.fixture(scope="module", params=WHOLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    visual_model(request.param).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.few(1)
def test_of_text_the_logits_are_those_of_the_whole_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened, found = open_target(str(folder)), []
    text, _ = prompt_with_images(folder.name, images=0)
    for target in (opened.with_images(), opened):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = load_pretrained(
                target.folder, target.own_config(), device="cpu", dtype=torch.float32, attention=None
            )
        found.append(model(input_ids=torch.tensor([text])).logits)
        sizes = [sum(parameter.numel() for parameter in model.parameters()), target.supported.footprint.parameters]
        assert sizes[0] == sizes[1]  # what is planned is what is loaded
    assert torch.equal(*found)
    names = {name.split(".")[1] for name, _ in model.named_parameters()}
    assert names <= {"language_model", "text_model", "weight"}
    assert opened.supported.footprint.parameters < opened.with_images().supported.footprint.parameters
    assert "UNEXPECTED" not in "".join(capfd.readouterr())  # transformers' report of weights that it passes over


@pytest.mark.slow
def test_an_adapter_of_both_is_merged_into_what_is_there(tmp_path: Path) -> None:
    base = tmp_path / "base"
    visual_model("qwen3_vl").save_pretrained(base)
    adapted = get_peft_model(visual_model("qwen3_vl"), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    target = open_target(f"{base} + {tmp_path / 'adapter'}")
    merged = target.load(device="cpu", dtype=torch.float32).state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert len(merged) < len(expected)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
