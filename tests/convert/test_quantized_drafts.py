"""Drafts with quantized weights: one that is read is kept as it lies, one that is not is refused by its name, before
names and shapes are judged.

What each makes of a weight is what compressed-tensors 0.20 writes, and what vLLM 0.32 and transformers 5.23 read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints.published import all_published
from fixtures.checkpoints.published.checkpoint import Tensors, write_weights
from fixtures.checkpoints.published.eagle3 import MODELOPT, config, eagle3
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftkit import convert_checkpoint, inspect_checkpoint
from draftkit.errors import FormatError, LayoutError
from draftkit.layout.folder import read_draft
from draftkit.layout.quantization import name_of_format, refuse_unread
from draftkit.layout.stored_weights import scales_fit
from draftkit.models.weights import load_stored

FP8, NIBBLES = torch.float8_e4m3fn, torch.uint8  # of NIBBLES, two to a byte
PUBLISHED = all_published()
KEPT = ("lm_head", "embed")


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, form: str = "pack-quantized") -> object:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def integers(bits: int, group: int | None = 32) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "group_size": group, "strategy": "group" if group else "channel"}


def floats(bits: int, group: int | None, strategy: str = "group", **more: object) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "group_size": group, "strategy": strategy} | more


def packed(weight: Tensor, bits: int) -> Tensors:
    rows, columns = weight.shape
    return {
        "weight_packed": torch.zeros(rows, columns * bits // 32, dtype=torch.int32),
        "weight_scale": torch.ones(rows, columns // 32),
        "weight_shape": torch.tensor([rows, columns]),
    }


def halved(weight: Tensor, scale: torch.dtype, group: int, name: str = "weight_packed") -> Tensors:
    rows, columns = weight.shape
    scales = torch.ones(rows, columns // group).to(scale)
    return {name: torch.zeros(rows, columns // 2, dtype=NIBBLES), "weight_scale": scales}


def eighths(weight: Tensor, **beside: Tensor) -> Tensors:
    return {"weight": weight.to(FP8), **beside}


def grouped(weight: Tensor) -> Tensor:
    return torch.ones(len(weight), weight.shape[1] // 32, dtype=torch.uint8)


ONE = torch.ones(())
NVFP4 = floats(4, 16, "tensor_group", scale_dtype="torch.float8_e4m3fn")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
# What a program says of its format, what becomes of a weight, and what the format is called.
FORMATS: dict[str, tuple[object, Callable[[Tensor], Tensors], str]] = {
    "W4A16": (compressed(integers(4)), lambda w: packed(w, 4), "compressed-tensors W4A16"),
    "W8A16": (compressed(integers(8)), lambda w: packed(w, 8), "compressed-tensors W8A16"),
    "NVFP4A16": (
        compressed(NVFP4, form="nvfp4-pack-quantized"),
        lambda w: halved(w, FP8, 16) | {"weight_global_scale": torch.ones(1)}, "compressed-tensors NVFP4A16"),
    "NVFP4": (
        compressed(NVFP4, {"num_bits": 4, "type": "float", "dynamic": "local"}, "nvfp4-pack-quantized"),
        lambda w: halved(w, FP8, 16) | {"weight_global_scale": torch.ones(1), "input_global_scale": torch.ones(1)},
        "compressed-tensors NVFP4"),
    "MXFP4": (
        compressed(floats(4, 32), {"num_bits": 4}, "mxfp4-pack-quantized"), lambda w: halved(w, torch.uint8, 32),
        "compressed-tensors MXFP4"),
    "MXFP8": (
        compressed(floats(8, 32), {"num_bits": 8, "dynamic": True}, "mxfp8-quantized"),
        lambda w: eighths(w, weight_scale=grouped(w)), "compressed-tensors MXFP8"),
    "W8A8": (
        compressed(integers(8, None), {"num_bits": 8, "dynamic": True}, "int-quantized"),
        lambda w: {"weight": w.to(torch.int8), "weight_scale": torch.ones(len(w), 1)}, "compressed-tensors W8A8"),
    "ModelOpt NVFP4": (
        {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        lambda w: halved(w, FP8, 16, "weight") | {"weight_scale_2": ONE, "input_scale": ONE}, "ModelOpt NVFP4"),
    "ModelOpt MXFP8": (
        {"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8"},
        lambda w: eighths(w, weight_scale=grouped(w)), "ModelOpt MXFP8"),
    "ModelOpt FP8 in blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        lambda w: eighths(w, weight_scale=torch.ones(1, 1, 2, 1)), "ModelOpt FP8_PB_WO"),
    "ModelOpt, older": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}},
        lambda w: halved(w, FP8, 16, "weight") | {"pre_quant_scale": torch.ones(w.shape[1])}, "ModelOpt W4A8_AWQ"),
    "fp8 of a cache": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        lambda w: eighths(w, weight_scale=ONE, input_scale=ONE, k_scale=ONE), "ModelOpt FP8"),
    "GPTQ": (GPTQ, lambda w: {
        "qweight": torch.zeros(w.shape[1] // 8, len(w), dtype=torch.int32), "scales": torch.ones(1, len(w)),
        "qzeros": torch.zeros(1, len(w) // 8, dtype=torch.int32), "g_idx": torch.zeros(w.shape[1], dtype=torch.int32),
    }, "gptq 4-bit"),
    "AWQ": (AWQ, lambda w: {
        "qweight": torch.zeros(w.shape[1], len(w) // 8, dtype=torch.int32), "scales": torch.ones(1, len(w)),
        "qzeros": torch.zeros(1, len(w) // 8, dtype=torch.int32),
    }, "awq 4-bit"),
    "bitsandbytes, 4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda w: {
        "weight": torch.zeros(w.numel() // 2, 1, dtype=NIBBLES), "weight.absmax": torch.ones(w.numel() // 64),
        "weight.quant_map": torch.ones(16), "weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8),
    }, "bitsandbytes 4-bit"),
    "bitsandbytes, 8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        lambda w: {"weight": w.to(torch.int8), "SCB": torch.ones(len(w))}, "bitsandbytes 8-bit"),
    "nothing said, packed": (None, lambda w: packed(w, 4), "compressed-tensors"),
    "nothing said, GPTQ": (None, lambda w: {"qweight": torch.zeros(2, 2, dtype=torch.int32)}, "GPTQ or AWQ"),
}  # fmt: skip


def quantized(tensors: Tensors, make: Callable[[Tensor], Tensors], kept: tuple[str, ...] = KEPT) -> Tensors:
    """The matrices in another format, but for what quantizers leave alone."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        whole = end != "weight" or tensor.dim() != 2 or not tensor.is_floating_point() or any(k in name for k in kept)
        parts = {end: tensor} if whole else make(tensor.float())
        found |= {f"{module}.{part}".removeprefix("."): values.clone() for part, values in parts.items()}
    return found


def write(folder: Path, values: dict[str, Any], tensors: Tensors) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


UNREAD = ("ModelOpt, older", "fp8 of a cache", "GPTQ", "AWQ", "bitsandbytes, 4", "bitsandbytes, 8",
          "nothing said, packed", "nothing said, GPTQ")  # fmt: skip
READ = tuple(name for name in FORMATS if name not in UNREAD)


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("draft", ["modelopt", "dflash", "mistral"])
def test_a_format_that_is_not_read_is_refused_by_its_name(draft: str, name: str, tmp_path: Path) -> None:
    stated, make, called = FORMATS[name]
    published = PUBLISHED[draft]
    values = published.config | ({} if stated is None else {"quantization_config": stated})
    source = write(tmp_path / "source", values, quantized(published.tensors(torch.float16), make))
    with pytest.raises(FormatError) as refused:
        convert_checkpoint(source, tmp_path / "out")
    assert f"the weights are quantized ({called}), and draftkit does not read them: " in str(refused.value)
    assert "next: convert the draft that was quantized" in str(refused.value)
    assert ("reads weights of this format" in str(refused.value)) == (called == "ModelOpt FP8")
    with pytest.raises(FormatError, match="does not read them"):
        convert_checkpoint(source, tmp_path / "out", format=published.format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("draft", ["modelopt", "dflash", "mistral"])
def test_a_format_that_is_read_is_kept_as_it_lies(draft: str, name: str, tmp_path: Path) -> None:
    stated, make, _ = FORMATS[name]
    published = PUBLISHED[draft]
    plain = published.tensors(torch.float16)
    source = write(tmp_path / "source", published.config | {"quantization_config": stated}, quantized(plain, make))
    out = convert_checkpoint(source, tmp_path / "out")
    draft_ = read_draft(out)
    assert draft_.spec.quantization == stated == json.loads((out / "config.json").read_text())["quantization_config"]
    assert draft_.spec.dtype == "F16"
    lying, written = load_file(Path(source) / "model.safetensors"), load_file(out / "model.safetensors")
    assert {len(lying) - len(written)} <= {0, 1}, "every part is there; t2d, which d2t tells, may not be"
    ends = sorted(end for n, t in lying.items() if (end := n.rpartition(".")[2]) != "t2d" for _ in (t,))
    assert sorted(n.rpartition(".")[2] for n in written) == ends
    stored = load_stored(draft_, "cpu")
    assert stored.keys() == draft_.spec.tensors().keys() & stored.keys()
    assert {tensor.dtype for n, tensor in stored.items() if tensor.is_floating_point()} == {
        torch.float16,
        torch.float32,
    }


def test_heads_that_may_share_one_matrix_are_not_read(tmp_path: Path) -> None:
    published = PUBLISHED["mlp-speculator"]
    source = published.write(tmp_path / "source")
    values = json.loads((source / "config.json").read_text())
    fp8 = compressed(floats(8, None, "tensor"), None, "float-quantized")
    tensors = quantized(published.tensors(torch.float16), lambda w: eighths(w, weight_scale=ONE), kept=("emb", "head"))
    write_weights(source / published.weights, tensors)
    with pytest.raises(FormatError, match="no quantization_config says how it is scaled"):
        convert_checkpoint(str(source), tmp_path / "out")
    (source / "config.json").write_text(json.dumps(values | {"quantization_config": fp8}))
    with pytest.raises(FormatError, match=r"is quantized \(fp8\), and the layout has it otherwise"):
        convert_checkpoint(str(source), tmp_path / "out")


@pytest.mark.parametrize("name", ["W4A16", "NVFP4A16", "MXFP8", "W8A8", "ModelOpt NVFP4", "bitsandbytes, 4"])
def test_a_unified_draft_that_another_program_has_quantized(name: str, tmp_path: Path) -> None:
    """As llm-compressor does it: the folder with other weights, and a `quantization_config` in its config."""
    stated, make, called = FORMATS[name]
    source = write(tmp_path / "source", config(**MODELOPT), eagle3(torch.float16, first="layers.0.", t2d=False))
    unified = convert_checkpoint(source, tmp_path / "unified")
    values = json.loads((unified / "config.json").read_text())
    tensors = quantized(load_file(unified / "model.safetensors"), make)
    folder = write(tmp_path / "quantized", values | {"quantization_config": stated}, tensors)
    if name in READ:
        assert read_draft(Path(folder)).spec.quantization == stated
        assert convert_checkpoint(folder, tmp_path / "out", overrides={"logit_scale": "1.5"}).is_dir()
    else:
        with pytest.raises(FormatError, match=rf"\({called}\), and draftkit does not read them"):
            inspect_checkpoint(folder)
    silent = write(tmp_path / "silent", values, tensors)
    with pytest.raises(LayoutError, match=r"quantized this unified draft \(nothing says how\)") as refused:
        inspect_checkpoint(silent)
    assert f"or convert {Path(source).name} again" in str(refused.value)


@pytest.mark.parametrize(
    ("scale", "block", "fit"),
    [
        ((), None, True), ((1,), None, True), ((96,), None, True), ((96, 1), None, True), ((3, 2), None, True),
        ((2, 1), (64, 64), True), ((2, 2), (64, 64), False), ((96, 2), (1, 32), True), ((96, 4), (1, 32), False),
        ((64,), None, False), ((65, 2), None, False), ((3, 0), None, False), ((3, 1, 2, 1), None, False),
    ],
)  # fmt: skip
def test_scales_that_fit_a_weight(scale: tuple[int, ...], block: tuple[int, int] | None, fit: bool) -> None:
    """Of 96 × 64 numbers: one, one for each row, one for each block."""
    assert scales_fit((96, 64), scale, block) is fit


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"transform_config": {"config_groups": {"u": {}}}}, "they are rotated"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "they are sparse ('sparse-24-bitmask')"),
    ],
)
def test_what_else_changes_what_fp8_weights_compute(stated: dict[str, object], words: str) -> None:
    tensors = {"fc.weight": ("F8_E4M3", (4, 4)), "fc.weight_scale": ("F32", ())}
    refuse_unread(tensors, {"sparsity_config": {}}, "here", "")
    with pytest.raises(FormatError) as refused:
        refuse_unread(tensors, stated, "here", "")
    assert words in str(refused.value)
    refuse_unread({"fc.weight": ("F16", (4, 4))}, stated, "here", "")


@pytest.mark.parametrize(
    "odd", [None, [], 3, "x", {"config_groups": [1]}, {"config_groups": {"a": 3}}, {"quantization": 3}]
)
def test_odd_settings_have_no_name(odd: object) -> None:
    assert name_of_format(odd if isinstance(odd, dict) else {"quant_method": odd, "config_groups": odd}) in (None, "x")
