"""What is special about MLP speculators, PARD and plain causal LMs; the rest is in test_formats.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from fixtures.checkpoints.published.checkpoint import Published, Tensors
from fixtures.checkpoints.published.mlp_speculator import mlp_config, repeats, tied
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.convert.operations import Move, carry_out
from draftkit.convert.unified import REFUSED_ARCHITECTURE, write_draft
from draftkit.errors import DraftkitError, FormatError, LayoutError, TargetError
from draftkit.io.handles import TensorHandle
from draftkit.layout.families.causal_lm import CausalLMSpec, TargetFeatures
from draftkit.layout.folder import read_draft

ALL = all_published()


def write(name: str, folder: Path, config: dict[str, Any] | None = None, tensors: Any = None) -> Path:
    """A published checkpoint, with another config or other weights where given."""
    published = ALL[name]
    changed = replace(published, config=config or published.config, tensors=tensors or published.tensors)
    return changed.write(folder / "source")


def written_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- MLP speculators


@pytest.mark.parametrize("name", ["speculator.emb.2.weight", "speculator.ln.3.bias", "speculator.proj.3.weight"])
@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_copy_that_differs_is_named_and_nothing_is_written(name: str, weights: str, tmp_path: Path) -> None:
    def changed(dtype: torch.dtype) -> Tensors:
        tensors = tied(dtype)
        tensors[name].view(-1)[-1] += 1
        return tensors

    source = replace(ALL["mlp-speculator"], tensors=changed, weights=weights).write(tmp_path / "source")
    with pytest.raises(FormatError, match=f"tensor {name} differs from speculator"):
        convert_checkpoint(str(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_copy_of_another_shape_is_named(tmp_path: Path) -> None:
    def changed(dtype: torch.dtype) -> Tensors:
        return tied(dtype) | {"speculator.ln.2.weight": torch.ones(47, dtype=dtype)}

    with pytest.raises(FormatError, match=r"speculator\.ln\.2\.weight is F16 \[47\]"):
        plan_conversion(str(write("mlp-speculator", tmp_path, tensors=changed)))


def in_memory(name: str, data: bytes) -> TensorHandle:
    def chunks(size: int) -> Iterator[bytes]:
        yield from (data[start : start + size] for start in range(0, len(data), size))

    return TensorHandle(name, "U8", (len(data),), Path("memory"), chunks)


@given(data=st.binary(min_size=1, max_size=40), count=st.integers(1, 4), size=st.integers(1, 50), draw=st.data())
def test_copies_are_compared_byte_by_byte(data: bytes, count: int, size: int, draw: st.DataObject) -> None:
    copies = {f"copy {i}": in_memory(f"copy {i}", data) for i in range(count)}
    move = Move("merge_copies", ("first", *copies), "first", "U8", (len(data),))
    sources = {"first": in_memory("first", data), **copies}
    assert b"".join(carry_out([move], sources)["first"].chunks(size)) == data
    odd, place = draw.draw(st.sampled_from(sorted(copies))), draw.draw(st.integers(0, len(data) - 1))
    changed = bytes(byte ^ (i == place) for i, byte in enumerate(data))
    with pytest.raises(FormatError, match=f"tensor {odd} differs from first"):
        list(carry_out([move], sources | {odd: in_memory(odd, changed)})["first"].chunks(size))


def test_a_tied_draft_of_another_origin_is_written_with_all_copies(tmp_path: Path) -> None:
    convert_checkpoint(str(write("mlp-speculator-deduplicated", tmp_path)), tmp_path / "unified")
    draft = read_draft(tmp_path / "unified")
    write_draft(tmp_path / "other", replace(draft, provenance=replace(draft.provenance, format="trained", facts=())))
    convert_checkpoint(str(tmp_path / "other"), tmp_path / "back", to="mlp-speculator")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tied(torch.float16).keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tied(torch.float16).items())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"top_k_tokens_per_head": [4, 3, 2]}, "top_k_tokens_per_head has 3 entries, n_predict is 4"),
        ({"top_k_tokens_per_head": None}, "top_k_tokens_per_head has 3 entries, n_predict is 4"),
        ({"n_predict": 1, "top_k_tokens_per_head": [4]}, "tie_weights is true, and there is one step only"),
        ({"tie_weights": False}, r"the tensors do not fit"),
        ({"inner_dim": 32}, r"wrong shape: speculator\.emb\.0\.weight is \[320, 48\], expected \[320, 32\]"),
        ({"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, "ArcticInference scores its heads in fp8"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "its steps are LSTM cells"),
        ({"architectures": ["MLPVariantSpeculatorPreTrainedModel"]}, "may be LSTM cells or several layers deep"),
        ({"method": "sum_rnn"}, "config keys that this format does not define"),
    ],
)
def test_configs_that_no_reference_loads_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    source = write("mlp-speculator-deduplicated", tmp_path, config=mlp_config(**changes))
    with pytest.raises(DraftkitError, match=match):
        plan_conversion(str(source))


@pytest.mark.parametrize("prefix", ["", "speculator."])
def test_an_lstm_of_arctic_inference_is_refused_by_name(prefix: str, tmp_path: Path) -> None:
    names = ("forget_emb.0.weight", "forget_proj.0.weight", "cell_ln.0.weight", "state_ln.0.bias", "head.0.weight")
    save_file({prefix + name: torch.ones(8, 8) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mlp_speculator", "method": "sum_lstm"}))
    with pytest.raises(FormatError, match="LSTM cells, which no other loader computes"):
        plan_conversion(str(tmp_path))


def test_vllm_cannot_run_an_mlp_speculator(tmp_path: Path) -> None:
    source = write("mlp-speculator", tmp_path)
    convert_checkpoint(str(source), tmp_path / "out")
    assert written_config(tmp_path / "out")["architectures"] == [REFUSED_ARCHITECTURE]
    with pytest.raises(LayoutError, match="vLLM has no proposer for mlp-speculator drafts"):
        plan_conversion(str(source), to="vllm")


# --- PARD and PARD-2


@pytest.mark.parametrize("name", ["pard-llama", "pard2"])
@pytest.mark.parametrize("shards", [1, 3])
def test_pard_comes_back_byte_for_byte(name: str, shards: int, tmp_path: Path) -> None:
    """Config, tokenizer and weights; the safetensors file is the same file where it was one."""
    source = ALL[name].write(pico.save_tokenizer(tmp_path / "source"), shards=shards)
    convert_checkpoint(str(source), tmp_path / "unified")
    convert_checkpoint(str(tmp_path / "unified"), tmp_path / "back", to="pard")
    before, after = files_of(source), files_of(tmp_path / "back")
    assert after.keys() - before.keys() <= {"draftkit-provenance.json", "model.safetensors"}
    assert written_config(source) == written_config(tmp_path / "back")
    for file in before.keys() & after.keys() - {"config.json", "warp_model.bin"}:
        assert before[file] == after[file], file
    assert {"tokenizer.json", "tokenizer_config.json"} <= after.keys()
    if name == "pard2":
        projections = [torch.load(f / "warp_model.bin", weights_only=True) for f in (source, tmp_path / "back")]
        assert projections[0].keys() == projections[1].keys() == {"target_proj.weight"}
        assert torch.equal(*(projection["target_proj.weight"] for projection in projections))


def pard_spec(folder: Path) -> CausalLMSpec:
    architecture = read_draft(folder).spec.architecture
    assert isinstance(architecture, CausalLMSpec)
    return architecture


@pytest.mark.parametrize("token", [-1, None])
def test_a_mask_token_must_be_known(token: int | None, tmp_path: Path) -> None:
    config = ALL["pard-llama"].config | {"pard_token": token}
    source = write("pard-llama", tmp_path, config={key: value for key, value in config.items() if value is not None})
    with pytest.raises(LayoutError, match="does not state mask_token_id") as raised:
        convert_checkpoint(str(source), tmp_path / "out")
    assert "--set mask_token_id=" in str(raised.value)
    convert_checkpoint(str(source), tmp_path / "out", overrides={"mask_token_id": "300"})
    assert written_config(tmp_path / "out")["pard_token"] == 300
    convert_checkpoint(str(tmp_path / "out"), tmp_path / "back", to="pard")
    assert written_config(tmp_path / "back")["pard_token"] == 300


@pytest.mark.parametrize("token", [320, -2])
def test_a_mask_token_lies_in_the_vocabulary(token: int, tmp_path: Path) -> None:
    source = write("pard-llama", tmp_path, config=ALL["pard-llama"].config | {"pard_token": token})
    with pytest.raises(FormatError, match=f"PARD's mask token is {token}, and the vocabulary has 320 tokens"):
        plan_conversion(str(source))


def test_pard2_needs_its_projection(tmp_path: Path) -> None:
    source = write("pard2", tmp_path)
    (source / "warp_model.bin").unlink()
    with pytest.raises(FormatError, match=r"tensor target_proj\.weight is missing"):
        plan_conversion(str(source))


def test_pard2_layers_must_be_known_and_fit(tmp_path: Path) -> None:
    config = {key: value for key, value in ALL["pard2"].config.items() if key != "pard2_target_layers"}
    source = write("pard2", tmp_path, config=config)
    with pytest.raises(LayoutError, match="does not state layer_ids"):
        convert_checkpoint(str(source), tmp_path / "out")
    convert_checkpoint(str(source), tmp_path / "out", overrides={"layer_ids": "-1,-8,-4,-2"})
    features = pard_spec(tmp_path / "out").target_features
    assert features == TargetFeatures(layer_ids=(-1, -8, -4, -2), size=256, scale=0.02, projection_bias=False)
    with pytest.raises(FormatError, match=r"reads 256 features, which are not those of the 3 layers \[-1, -8, -4\]"):
        plan_conversion(str(source), overrides={"layer_ids": "-1,-8,-4"})


@pytest.mark.parametrize(("layers", "hidden"), [([-1, -8, -4, -10], 64), ([-1, -8, -4, 9], 64), ([-1, -8], 64)])
def test_pard2_layers_are_states_of_the_target(layers: list[int], hidden: int, tmp_path: Path) -> None:
    """The pico target has hidden states -9 … 8 of 64 features."""
    source = write("pard2", tmp_path, config=ALL["pard2"].config | {"pard2_target_layers": layers})
    with pytest.raises(TargetError, match="has 9 hidden states of 64"):
        plan_conversion(str(source), target=str(pico.save_target_config(tmp_path / "target", hidden_size=hidden)))


def test_a_bias_that_the_reference_does_not_load_is_dropped(tmp_path: Path) -> None:
    config = ALL["pard2-older-keys"].config | {"proj_bias": False}
    convert_checkpoint(str(write("pard2-older-keys", tmp_path, config=config)), tmp_path / "out")
    assert "target_proj.bias" not in load_file(tmp_path / "out" / "model.safetensors")


def test_an_overridden_fact_is_written_under_the_key_it_had(tmp_path: Path) -> None:
    source = write("pard2-older-keys", tmp_path)
    convert_checkpoint(str(source), tmp_path / "out", overrides={"scale": "0.5"})
    convert_checkpoint(str(tmp_path / "out"), tmp_path / "back", to="pard")
    config = written_config(tmp_path / "back")
    assert (config["pard_scale"], "pard2_scale" in config) == (0.5, False)


def test_vllm_would_run_pard2_without_its_features(tmp_path: Path) -> None:
    source = write("pard2", tmp_path)
    convert_checkpoint(str(source), tmp_path / "out")
    assert written_config(tmp_path / "out")["architectures"] == [REFUSED_ARCHITECTURE]
    with pytest.raises(LayoutError, match="vLLM would ignore the target features of PARD-2"):
        plan_conversion(str(source), to="vllm")


# --- plain causal LMs


@pytest.mark.parametrize("name", ["llama-own-head", "qwen3-fp8", "qwen3-moe"])
def test_shards_become_one_file(name: str, tmp_path: Path) -> None:
    source = ALL[name].write(tmp_path / "source", shards=4)
    one = ALL[name].write(tmp_path / "one")
    convert_checkpoint(str(source), tmp_path / "unified")
    convert_checkpoint(str(tmp_path / "unified"), tmp_path / "back", to="hf")
    assert files_of(tmp_path / "back")["model.safetensors"] == files_of(one)["model.safetensors"]
    assert written_config(tmp_path / "back") == ALL[name].config


def test_fp8_keeps_its_scales_and_says_so(tmp_path: Path) -> None:
    published: Published = ALL["qwen3-fp8"]
    convert_checkpoint(str(published.write(tmp_path / "source", torch.bfloat16)), tmp_path / "out")
    draft = read_draft(tmp_path / "out")
    assert draft.spec.quantization == published.config["quantization_config"]
    assert written_config(tmp_path / "out")["quantization_config"] == published.config["quantization_config"]
    name = "model.layers.0.mlp.up_proj.weight"
    assert (draft.spec.dtype, draft.tensors[name].dtype) == ("BF16", "F8_E4M3")
    assert draft.tensors[f"{name}_scale_inv"].dtype == "F32"


def test_packed_weights_are_refused_by_the_name_of_their_quantizer(tmp_path: Path) -> None:
    config = ALL["llama-tied"].config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(FormatError, match=r"says that the weights are quantized \(gptq 4-bit\), and they are plain"):
        plan_conversion(str(write("llama-tied", tmp_path, config=config)))


def test_a_plain_model_has_no_pard_in_it(tmp_path: Path) -> None:
    convert_checkpoint(str(write("llama-tied", tmp_path)), tmp_path / "out")
    with pytest.raises(LayoutError, match="there is no draft-model in the layout of pard"):
        plan_conversion(str(tmp_path / "out"), to="pard")


def test_repeats_of_the_fixture_are_copies() -> None:
    """The fixture itself: what it calls copies are equal tensors."""
    tensors = tied(torch.float32)
    assert len(repeats(("",))) == 14
    assert torch.equal(tensors["speculator.proj.3.weight"], tensors["speculator.proj.1.weight"])
