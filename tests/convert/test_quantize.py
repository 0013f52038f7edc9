"""Weights quantized part by part, and read back: in float32 they are what compressed-tensors' own fake quantization
makes of the plain ones, bit for bit."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
from conftest import Command
from safetensors.torch import load_file
from torch import nn

from draftkit.convert.quantization import dequantized
from draftkit.convert.quantize import FORMATS, PARTS, parts_of, quantized, read_formats
from draftkit.errors import LayoutError, SettingError
from draftkit.io.handles import memory_handle
from draftkit.layout.folder import Draft
from draftkit.layout.stored_weights import InputFormat, input_format, stored_weights
from draftkit.loading import open_draft
from draftkit.models.rounded_inputs import rounded_inputs

NAMES = tuple(FORMATS)


@pytest.fixture(scope="module", params=["eagle3", "dspark"])
def draft(request: pytest.FixtureRequest) -> Draft:
    with open_draft(f"zoo:{request.param}", "zoo:target") as found:
        loaded = {name: handle.load() for name, handle in found.tensors.items()}
        return replaced(found, loaded)


def replaced(draft: Draft, tensors: dict[str, torch.Tensor]) -> Draft:
    return replace(draft, tensors={n: memory_handle(n, t, draft.path) for n, t in tensors.items()})


def stored(draft: Draft) -> dict[str, torch.Tensor]:
    return {name: handle.load() for name, handle in draft.tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_fake_quantization_makes(draft: Draft, name: str) -> None:
    """Of the same scales, by the library's own function, in float32."""
    plain, made = stored(draft), quantized(draft, read_formats(f"all:{name}"))
    found = {n: (h.dtype, h.shape) for n, h in made.tensors.items()}
    weights = stored_weights(found, made.spec.quantization)
    assert weights
    assert not {"embed_tokens", "markov_head.markov_w2", "confidence_head.proj"} & weights.keys()
    tensors, args = stored(made), preset_name_to_scheme(FORMATS[name].preset, ["Linear"]).weights
    read = dequantized(tensors, made.spec.quantization)
    assert read.keys() == plain.keys()
    for weight in weights.values():
        parts = {part: tensors[n] for part, n in weight.parts.items()}
        if "weight_scale_2" in parts:  # a factor, where compressed-tensors has the inverse of one
            continue
        scale, whole = parts["weight_scale"].float(), parts.get("weight_global_scale")
        with torch.compiler.set_stance("force_eager"):
            expected = fake_quantize(plain[weight.name].float(), scale, None, args, global_scale=whole)
        assert torch.equal(read[weight.name], expected)
    for n in plain.keys() - {weight.name for weight in weights.values()}:
        assert torch.equal(read[n], plain[n])


def test_both_ways_to_write_nvfp4_are_the_same_numbers(draft: Draft) -> None:
    """But for the last bit of the scale of a whole weight, of which one has the inverse."""
    made = [quantized(draft, read_formats(f"all:{name}")) for name in ("nvfp4a16", "modelopt-w4a16-nvfp4")]
    one, other = (dequantized(stored(draft), draft.spec.quantization) for draft in made)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=3e-7, atol=0)


INPUTS = {"fp8-dynamic": "FP8_DYNAMIC", "fp8": "FP8", "nvfp4": "NVFP4", "mxfp8": "MXFP8", "mxfp4": "MXFP4"}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(name: str) -> None:
    scheme = preset_name_to_scheme(INPUTS[name], ["Linear"])
    stated = {"quant_method": "compressed-tensors", "config_groups": {"a": json.loads(scheme.model_dump_json())}}
    format = input_format(stated, "layers.0.mlp.up_proj")
    assert format is not None
    x = torch.randn(2, 5, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 192)
    x[0, 0] = 0
    layer = nn.Linear(192, 8)
    scale = torch.tensor(0.25) if name == "fp8" else torch.tensor(448 * 6 / 900.0)
    vars(layer)["input_scale"], vars(layer)["input_global_scale"] = scale, scale if name == "nvfp4" else None
    layer.quantization_status = QuantizationStatus.FROZEN
    with torch.compiler.set_stance("force_eager"):  # compressed-tensors 0.17 compiles, which takes a compiler
        expected = forward_quantize(layer, x, "input", scheme.input_activations)
    assert torch.equal(rounded_inputs(x, format, None if format.dynamic else scale), expected)


def test_a_group_that_a_row_does_not_fill() -> None:
    x = torch.randn(3, 40)
    found = rounded_inputs(x, InputFormat(8, group=32))
    assert torch.equal(found[:, :32], rounded_inputs(x[:, :32], InputFormat(8)))
    assert torch.equal(found[:, 32:], rounded_inputs(x[:, 32:], InputFormat(8)))


def test_formats_are_named_by_part(draft: Draft) -> None:
    assert read_formats("head:fp8-dynamic, mlp:w4a16-g128,qkv:bf16") == {
        "head": "fp8-dynamic", "mlp": "w4a16-g128", "qkv": "bf16",
    }  # fmt: skip
    assert set(read_formats("fp8-dynamic")) == {"fc", "qkv", "o", "mlp"}
    with pytest.raises(SettingError, match=r"fp8-dynamc is no format of weights, did you mean fp8-dynamic\?"):
        read_formats("head:fp8-dynamc")
    assert parts_of(draft).keys() <= PARTS.keys()
    with pytest.raises(LayoutError, match="has no part gate") as refused:
        quantized(draft, {"gate": "fp8-dynamic"})
    assert f"expected: of this draft: {', '.join([*parts_of(draft), 'all'])}" in str(refused.value)
    with pytest.raises(LayoutError, match="no matrix of the draft would be quantized"):
        quantized(draft, {"o": "w4a16-g128"})
    with pytest.raises(LayoutError, match="quantized already"):
        quantized(quantized(draft, {"mlp": "fp8-dynamic"}), {"qkv": "fp8-dynamic"})


def test_joined_matrices_share_the_scale_of_the_whole(draft: Draft) -> None:
    made = quantized(draft, {"qkv": "nvfp4a16", "mlp": "fp8"})
    layer = "layers.0."
    for modules, part in (
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "weight_global_scale"),
        (("mlp.gate_proj", "mlp.up_proj"), "weight_scale"),
    ):
        assert len({made.tensors[f"{layer}{module}.{part}"].load().item() for module in modules}) == 1


def test_the_settings_are_those_of_the_library(draft: Draft) -> None:
    stated = quantized(draft, {"qkv": "nvfp4a16", "mlp": "fp8-dynamic"}).spec.quantization
    assert stated is not None
    read = QuantizationConfig.model_validate({k: v for k, v in stated.items() if k != "quant_method"})
    assert read.format == "mixed-precision"
    assert [group.format for group in read.config_groups.values()] == ["nvfp4-pack-quantized", "float-quantized"]


MODELOPT = Path(__file__).parents[1] / "fixtures/quantized/modelopt.safetensors"


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PB_WO", "W4A16_NVFP4", "NVFP4", "MXFP8"])
def test_what_modelopt_packs_is_read_as_modelopt_reads_it(algorithm: str) -> None:
    """Packed and dequantized by its own functions, in `scripts/check/parts/modelopt_pack.py`; bit for bit."""
    tensors = load_file(MODELOPT)
    parts = {name.removeprefix(f"{algorithm}."): t for name, t in tensors.items() if name.startswith(f"{algorithm}.")}
    expected = parts.pop("expected")
    stated = {"quant_method": "modelopt", "quant_algo": algorithm}
    read = dequantized({f"fc.{part}": tensor for part, tensor in parts.items()}, stated)
    assert read.keys() == {"fc.weight"}
    assert torch.equal(read["fc.weight"], expected)
    format = input_format(stated, "fc")
    assert (format is None) == (algorithm in ("FP8_PB_WO", "W4A16_NVFP4"))


# What the script of ModelOpt's pull request 2027 leaves out of a DSpark draft, always or unless it is asked for.
LEFT_OUT = {"markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj", "embed_tokens"}


@pytest.mark.parametrize("name", ["modelopt-fp8", "modelopt-w4a16-nvfp4"])
def test_what_modelopt_leaves_out_is_left_out_and_listed(name: str) -> None:
    """By its name, by its end, and by what engines call joined matrices where all of these are left out."""
    with open_draft("zoo:dspark", "zoo:target") as draft:
        for text in (name, f"all:{name}", f"fc:{name},mlp:{name}"):
            made = quantized(draft, read_formats(text))
            stated = made.spec.quantization
            assert stated is not None
            weights = stored_weights({n: (h.dtype, h.shape) for n, h in made.tensors.items()}, stated)
            assert not LEFT_OUT & weights.keys()
            assert "fc" in weights
            ignored = stated["ignore"]
            plain = {m for found in parts_of(draft).values() for m in found} - weights.keys()
            assert plain | {"lm_head"} <= set(ignored)
            assert {"*markov_head.markov_w1", "*markov_head.markov_w2", "*confidence_head.proj"} <= set(ignored)
            assert ("*qkv_proj" in ignored) == text.startswith("fc:")
            assert "*gate_up_proj" not in ignored
            assert not any(fnmatch.fnmatch(module, pattern) for module in weights for pattern in ignored)


@pytest.mark.parametrize(
    ("text", "words"),
    [("lm_head:fp8-dynamic", "of this draft: fc, qkv, o, mlp, all"), ("qkv:int4", "one of fp8-dynamic, fp8, nvfp4")],
)
def test_parts_and_formats_that_there_are_not(text: str, words: str, tmp_path: Path, draftkit: Command) -> None:
    """DFlash has the target's head."""
    refused = draftkit("convert", "zoo:dflash", tmp_path / "out", "--target", "zoo:target", "--quantize", text)
    assert refused.code in (1, 2)
    assert words in " ".join(refused.err.split())


def test_an_engine_has_its_exclusions(tmp_path: Path, draftkit: Command) -> None:
    """Those that a user does not name are kept plain; one that is named is refused."""
    out = draftkit("convert", "zoo:eagle3", tmp_path / "out", "--to", "sglang", "--target", "zoo:target",
                   "--quantize", "fp8-dynamic")  # fmt: skip
    assert out.code == 0
    config = (tmp_path / "out/config.json").read_text()
    assert "re:.*\\\\bfc$" in config
    refused = draftkit("convert", "zoo:eagle3", tmp_path / "no", "--to", "sglang", "--target", "zoo:target",
                       "--quantize", "fc:fp8-dynamic")  # fmt: skip
    assert refused.code == 1
    assert "reads no quantized fc" in refused.err
    assert not (tmp_path / "no").exists()
