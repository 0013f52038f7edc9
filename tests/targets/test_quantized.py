"""Quantized targets run with plain weights, or as transformers runs them, or are refused by the name of their kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.int8 import STATED, in_int8, save_int8
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from draftkit.data.states.online import load_final_norm
from draftkit.errors import UnsupportedTarget
from draftkit.evaluate.planning import plan_memory
from draftkit.loading import open_draft, open_target
from draftkit.runtime.attention import NAME
from draftkit.runtime.engine import Engine
from draftkit.targets.pretrained import load_pretrained
from draftkit.targets.target import Target, load_target, read_supported
from draftkit.targets.tokens import load_embeddings

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5], [40, 41, 42, 43])
BLOCK = 32


def load(folder: Path) -> PreTrainedModel:
    return load_target(folder, device="cpu", dtype=torch.float32, attention=NAME)


def generated(model: PreTrainedModel) -> list[list[int]]:
    engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=2)
    return [generation.tokens for generation in engine.generate(PROMPTS, max_new_tokens=16)]


def by_transformers(model: PreTrainedModel) -> list[list[int]]:
    output = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=16)
        output.append(out[0, len(prompt) :].tolist())
    return output


def save_quantized(folder: Path, quantize: Callable[[str, Tensor], dict[str, Tensor]], **stated: object) -> Path:
    """A pico Llama whose linear layers hold what `quantize` makes of their weights."""
    pico.save_llama(folder, intermediate_size=128)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= quantize(name, tensor) if name.endswith("_proj.weight") else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if stated:
        state(folder, **stated)
    return folder


def state(folder: Path, **quantization: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / 448
    small = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return {name: small.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "compressed-tensors"])
def test_weights_become_plain(kind: str, tmp_path: Path) -> None:
    quantize, stated = {"fp8": (fp8, FP8), "compressed-tensors": (in_int8, STATED)}[kind]
    if kind == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model = load(save_quantized(tmp_path, quantize, **stated))
    stored = load_file(tmp_path / "model.safetensors")
    expected = pico.llama(intermediate_size=128)
    for name, parameter in expected.named_parameters():
        if kind == "fp8" and f"{name}_scale_inv" in stored:
            factors = stored[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            parameter.copy_(stored[name].float() * factors)
        elif f"{name}_scale" in stored:
            parameter.copy_(stored[name].float() * stored[f"{name}_scale"])
        torch.testing.assert_close(model.get_parameter(name), parameter)
    assert generated(model) == by_transformers(expected)


@pytest.mark.slow
def test_experts_of_integers_are_refused_from_the_configuration(tmp_path: Path) -> None:
    """And transformers still fails on them, or the refusal is to go."""
    pytest.importorskip("compressed_tensors")
    config = Qwen3MoeConfig(
        vocab_size=pico.VOCABULARY, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "plain")
    folder = save_int8(tmp_path / "plain", tmp_path / "int8")
    with pytest.raises(UnsupportedTarget, match="its experts are stored as integers that are not packed") as refusal:
        read_supported(folder)
    assert "--engine vllm" in str(refusal.value)
    config.quantization_config = STATED | {"dequantize": True}
    with pytest.raises(UnsupportedTarget, match="transformers cannot load the target: We encountered some issues"):
        load_pretrained(folder, config, device="cpu", dtype=torch.float32, attention=None)
    state(folder, **STATED | {"ignore": ["lm_head", "re:.*mlp.experts.*"]})
    read_supported(folder)


def test_the_ends_of_weights_that_only_engines_run(tmp_path: Path) -> None:
    """A draft is trained with them, on states that an engine has computed."""
    save_quantized(tmp_path, in_int8, quant_method="of tomorrow")
    with pytest.raises(UnsupportedTarget, match="of tomorrow"):
        load(tmp_path)
    expected = pico.llama(intermediate_size=128)
    embeddings = load_embeddings(tmp_path, device="cpu", dtype=torch.float32)
    assert torch.equal(embeddings.get_input_embeddings().weight, expected.get_input_embeddings().weight)
    assert torch.equal(embeddings.get_output_embeddings().weight, expected.get_output_embeddings().weight)
    norm = load_final_norm(tmp_path, torch.float32)
    assert torch.equal(norm.weight, expected.model.norm.weight)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | in_int8("lm_head.weight", tensors["lm_head.weight"]), tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedTarget, match=r"is quantized \(lm_head.weight_scale\)"):
        load_embeddings(tmp_path, device="cpu", dtype=torch.float32)


def test_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published: each byte two numbers of four bits, each 32 of them a power of two."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, out, width // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 125, (experts, out, width // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    state(tmp_path, quant_method="mxfp4")
    model = load(tmp_path)
    blocks = tensors["model.layers.0.mlp.experts.down_proj_blocks"]
    scales = tensors["model.layers.0.mlp.experts.down_proj_scales"]
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((numbers, -numbers))
    digits = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(3).long()
    plain = (table[digits] * 2.0 ** (scales.float() - 127)[..., None]).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.model.layers[0].mlp.experts.down_proj.float(), plain)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert generated(model) == by_transformers(reference)


def test_bitsandbytes_stays_quantized(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    plain = pico.save_llama(tmp_path / "plain", intermediate_size=128)
    small = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=small, device_map={"": "cpu"}).save_pretrained(
        tmp_path / "small"
    )
    model = load(tmp_path / "small")
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "small", attn_implementation="eager")
    assert generated(model) == by_transformers(reference)


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"quant_method": "awq", "bits": 4}, r"quantized \(awq\): .*requires gptqmodel"),
        ({"quant_method": "gptq", "bits": 4}, r"quantized \(gptq\): .*requires optimum"),
        ({"quant_method": "nvfp4"}, r"quantized \(nvfp4\): Loading pre-quantized NVFP4 checkpoints is not supported"),
        ({"quant_method": "modelopt"}, r"quantized \(modelopt\) as transformers does not know"),
        ({"bits": 4}, r"quantized \(None\) as transformers does not know"),
    ],
)
def test_what_cannot_be_loaded_is_refused_from_the_configuration(
    stated: dict[str, object], problem: str, tmp_path: Path
) -> None:
    pico.llama_config().save_pretrained(tmp_path)
    state(tmp_path, **stated)
    with pytest.raises(UnsupportedTarget, match=problem) as refusal:
        read_supported(tmp_path)
    assert "--engine vllm" in str(refusal.value)


def test_a_kind_that_is_stated_beside_the_configuration_is_refused(tmp_path: Path) -> None:
    pico.llama_config().save_pretrained(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UnsupportedTarget, match=r"quantized \(modelopt NVFP4\)"):
        read_supported(tmp_path)


def test_scales_that_nothing_tells_of_are_refused(tmp_path: Path) -> None:
    """Loaded without them, the weights would be wrong and nothing would say so."""
    with pytest.raises(UnsupportedTarget, match=r"quantized \(model.layers.0.mlp.down_proj.weight_scale_inv\)"):
        load(save_quantized(tmp_path, fp8))


def test_memory_of_plain_weights_is_planned(tmp_path: Path) -> None:
    save_quantized(tmp_path, fp8, **FP8)
    sizes: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "num_slots": 1,
        "longest": 9,
        "k": 1,
    }
    with open_draft("ngram:2-4", str(tmp_path)) as draft:
        plan = plan_memory(open_target(str(tmp_path)), {"ngram": draft}, **sizes)["ngram"]
    assert plan.fixed["target weights"] == 2 * pico.llama(intermediate_size=128).num_parameters()
