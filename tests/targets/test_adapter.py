"""Adapters on targets: merged in memory they are the merged model; others are refused by file and key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.visual import VISUAL, visual_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from draftkit import convert_checkpoint
from draftkit.errors import DraftkitError, TargetError
from draftkit.evaluate.adapters import evaluate_adapters
from draftkit.layout.target import adapted_name
from draftkit.loading import open_target
from draftkit.results.settings import Settings
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return pico.save_llama(tmp_path / "base")


def adapter(folder: Path, base: Path, strength: float = 0.3, **settings: object) -> Path:
    """An adapter with random matrices, as peft writes it."""
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    save(get_peft_model(pico.llama(), LoraConfig(**chosen)), folder, base, strength)  # type: ignore[arg-type]
    return folder


def save(model: PeftModel, folder: Path, base: Path, strength: float) -> None:
    """Write an adapter as one of `base`, its matrices at random."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * strength)
    model.peft_config["default"].base_model_name_or_path = str(base)  # type: ignore[index]
    model.save_pretrained(str(folder))


def generated(name: str) -> list[list[int]]:
    model = open_target(name).load(device="cpu", dtype=torch.float32)
    engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=2)
    return [one.tokens for one in engine.generate(([5, 6, 7], [9, 8, 7, 6, 5]), max_new_tokens=24)]


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_an_adapter_is_the_merged_model(settings: dict[str, object], base: Path, tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", base, **settings)
    merged = convert_checkpoint(str(one), tmp_path / "merged", format="lora")
    name = adapted_name(str(base), str(one))
    mine = open_target(name).load(device="cpu", dtype=torch.float32).state_dict()
    theirs = open_target(str(merged)).load(device="cpu", dtype=torch.float32).state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert generated(name) == generated(str(merged)) != generated(str(base))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", VISUAL)
def test_targets_that_read_images_are_merged_with_what_reads_them_and_without(kind: str, tmp_path: Path) -> None:
    """However peft's base spelled the names of layers: as transformers does now, as it did, or as the text alone."""
    base, one = tmp_path / "base", tmp_path / "one"
    visual_model(kind).save_pretrained(base)
    adapted = get_peft_model(visual_model(kind), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    save(adapted, one, base, 0.3)
    expected = adapted.merge_and_unload()
    opened = open_target(adapted_name(str(base), str(one)))
    tensors = load_file(one / "adapter_model.safetensors")
    for layers in ("model.language_model.", "language_model.model.", "model."):
        spelled = {name.replace("model.language_model.", layers): tensor for name, tensor in tensors.items()}
        save_file(spelled, one / "adapter_model.safetensors")
        whole = opened.with_images().load(device="cpu", dtype=torch.float32).state_dict()
        assert whole.keys() == expected.state_dict().keys()
        for name, weight in expected.state_dict().items():
            torch.testing.assert_close(whole[name], weight, atol=1e-5, rtol=1e-5)
    prompt, size = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 24, "do_sample": False}
    assert [5, 6, 7, *generated(opened.name)[0]] == expected.generate(prompt, **size)[0].tolist()
    assert generated(opened.name) != generated(str(base))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_cannot_be_merged_is_refused_by_file_and_key(base: Path, tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", base)
    edited = {
        "base_model_name_or_path": ("org/another-7B", "is an adapter of org/another-7B, and the target is"),
        "modules_to_save": (["lm_head"], "modules_to_save is ['lm_head']"),
        "trainable_token_indices": ([1], "trainable_token_indices is [1]"),
    }
    for key, (value, words) in edited.items():
        other = shutil.copytree(one, tmp_path / key)
        edit(other, **{key: value})
        with pytest.raises(TargetError) as refused:
            open_target(adapted_name(str(base), str(other)))
        assert words in str(refused.value)
        assert f"{other / 'adapter_config.json'}: {key}" in str(refused.value)
    tables = adapter(tmp_path / "tables", base, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(TargetError, match="changes the target's embedding or output layer"):
        open_target(adapted_name(str(base), str(tables)))
    with pytest.raises(TargetError, match="is no adapter: it has no adapter_config"):
        open_target(adapted_name(str(base), str(base)))
    narrow = pico.save_llama(tmp_path / "narrow/base", intermediate_size=64)
    with pytest.raises(DraftkitError, match="do not fit"):
        open_target(adapted_name(str(narrow), str(one))).load(device="cpu", dtype=torch.float32)
    cut = shutil.copytree(one, tmp_path / "cut")
    (cut / "adapter_model.safetensors").write_bytes((one / "adapter_model.safetensors").read_bytes()[:900])
    with pytest.raises(DraftkitError, match="truncated or damaged"):
        open_target(adapted_name(str(base), str(cut)))


def test_an_adapter_as_target_says_how_to_pass_it(base: Path, tmp_path: Path, draftkit: Command) -> None:
    one = adapter(tmp_path / "one", base)
    out = draftkit("eval", "--target", one, "--draft", "ngram")
    assert out.code == 1
    assert f"next: pass --target {base} --target-adapter {one}" in out.err


@pytest.mark.long
def test_a_draft_beside_itself_under_adapters(base: Path, tmp_path: Path) -> None:
    pico.save_tokenizer(base)
    names = [str(adapter(tmp_path / name, base, strength)) for name, strength in (("weak", 0.01), ("strong", 1.0))]
    settings = Settings(num_speculative_tokens=2, max_new_tokens=16, limit=4, repeats=0, ignore_eos=True)
    result = evaluate_adapters(str(base), "ngram", names, settings)
    assert [cell.target for cell in result.cells] == [str(base), *(adapted_name(str(base), name) for name in names)]
    plain, *adapted = result.cells
    assert plain.compared_with is None
    for cell in adapted:
        assert cell.compared_with == str(base)
        assert cell.longer_by is not None
        assert cell.repetition is not None
        assert cell.matches_greedy
    assert len(result.judged) == 3
    with pytest.raises(DraftkitError, match="given twice"):
        evaluate_adapters(str(base), "ngram", [names[0], names[0]], settings)


def test_the_adapter_of_a_checkpoint_is_taken_out(base: Path, tmp_path: Path, draftkit: Command) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(base, checkpoint)
    out = draftkit("convert", checkpoint, tmp_path / "none", "--part", "adapter")
    assert out.code == 1
    assert "has no adapter beside its weights" in out.err
    one = adapter(checkpoint / "adapter", base)
    assert draftkit("convert", checkpoint, tmp_path / "out", "--part", "adapter").code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in one.iterdir()}
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "out", one))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
