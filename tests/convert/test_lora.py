"""LoRA adapters: merged as peft merges them, on every kind of base model, and refused by name where they are more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.servers.hub_server import HubServer
from fixtures.training.samples import samples
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from draftkit.checks.checkpoint import findings_of_draft
from draftkit.convert.api import convert_checkpoint, inspect_checkpoint, plan_conversion
from draftkit.convert.operations import Move, carry_out
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError, FormatError, LayoutError, SourceError, TargetError
from draftkit.io.dtypes import dtype_name
from draftkit.io.handles import TensorHandle, raw_memory
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import read_draft
from draftkit.loading import load_model

Tensors = dict[str, torch.Tensor]


def llama() -> PreTrainedModel:
    return pico.llama(3, num_hidden_layers=2)


def gpt2() -> PreTrainedModel:
    """Its linear layers are stored [in, out]."""
    torch.manual_seed(4)
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def save_adapter(base: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A trained adapter on a saved base: `folder/base` and `folder/adapter`."""
    base.to(dtype).save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    peft = get_peft_model(model, LoraConfig(**(settings | {"task_type": "CAUSAL_LM"} | options)))
    torch.manual_seed(8)
    for name, parameter in peft.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.2)
    peft.save_pretrained(str(folder / "adapter"))
    return folder / "adapter"


def merged_by_peft(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    return PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()


def converted(folder: Path) -> Tensors:
    convert_checkpoint(str(folder / "adapter"), folder / "out")
    return load_file(folder / "out" / "model.safetensors")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(llama(), tmp_path_factory.mktemp("adapter"))


ADAPTERS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "plain": (llama, {}),
    "rank-stabilised": (llama, {"use_rslora": True}),
    "patterns": (
        llama,
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {r"layers\.\d+\.mlp\.down_proj": 9}},
    ),
    "head trained whole": (llama, {"modules_to_save": ["lm_head"]}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "v_proj"]}),
    "embedding trained whole": (llama, {"modules_to_save": ["embed_tokens"]}),
    "every linear layer": (llama, {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
    "[in, out]": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "[in, out], not said": (gpt2, {"target_modules": ["c_fc"]}),
    "DoRA": (llama, {"use_dora": True}),
    "DoRA, rank-stabilised, embedding": (
        llama,
        {"use_dora": True, "use_rslora": True, "target_modules": ["embed_tokens", "o_proj"]},
    ),
    "DoRA, [in, out]": (gpt2, {"use_dora": True, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.filterwarnings("ignore")  # peft's about what it does with embeddings and Conv1D
def test_merged_as_peft_merges_in_fp32(name: str, tmp_path: Path) -> None:
    """The same bits: one product, one scaling and one sum for each number, in the same order."""
    base, options = ADAPTERS[name]
    save_adapter(base(), tmp_path, **options)
    expected = merged_by_peft(tmp_path)
    expected.save_pretrained(tmp_path / "expected")
    theirs, ours = load_file(tmp_path / "expected" / "model.safetensors"), converted(tmp_path)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert any(not torch.equal(before[name], ours[name]) for name in before)
    tokens = torch.arange(3, 40)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_lower_precisions_are_rounded_once(dtype: torch.dtype, dora: bool, tmp_path: Path) -> None:
    """peft keeps an adapter in fp32 on a base of 16 bits, and adds it to the weight in fp32."""
    save_adapter(llama(), tmp_path, dtype, use_dora=dora)
    theirs, ours = merged_by_peft(tmp_path, dtype).state_dict(), converted(tmp_path)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert {tensor.dtype for tensor in ours.values()} == {dtype}


def in_memory(name: str, tensor: torch.Tensor) -> TensorHandle:
    def chunks(size: int) -> Iterator[memoryview]:
        data = raw_memory(tensor.contiguous())
        yield from (data[start : start + size] for start in range(0, len(data), size))

    return TensorHandle(name, dtype_name(tensor.dtype), tuple(tensor.shape), Path("memory"), chunks)


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), rank=st.integers(1, 9), size=st.integers(1, 4000),
    scale=st.floats(-4, 4, width=32), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    transposed=st.booleans(), seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_blocks_of_rows_change_nothing(
    rows: int, columns: int, rank: int, size: int, scale: float, dtype: torch.dtype, transposed: bool, seed: int
) -> None:
    """Against the whole product in fp64: within one rounding of the sum, and a few of the update."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    outputs, inputs = (columns, rows) if transposed else (rows, columns)
    a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
    sources = {name: in_memory(name, tensor) for name, tensor in (("w", weight), ("a", a), ("b", b))}
    operation = "add_lora_transposed" if transposed else "add_lora"
    move = Move(operation, ("w", "a", "b"), "w", dtype_name(dtype), (rows, columns), number=scale)  # type: ignore[arg-type]
    handle = carry_out([move], sources)["w"]
    data = bytearray(b"".join(bytes(chunk) for chunk in handle.chunks(size)))
    merged = torch.frombuffer(data, dtype=dtype).view(rows, columns)
    update = (b.double() @ a.double()) * scale
    expected = weight.double() + (update.T if transposed else update)
    size_of_terms = abs(scale) * (b.double().abs() @ a.double().abs())
    bound = torch.finfo(dtype).eps * expected.abs() + 2 * torch.finfo(torch.float32).eps * (
        (size_of_terms.T if transposed else size_of_terms) + weight.double().abs()
    )
    assert ((merged.double() - expected).abs() <= bound).all()


def test_adapter_files_of_torch(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path)
    theirs = converted(tmp_path)
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    convert_checkpoint(str(adapter), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)


def test_a_dora_magnitude_of_another_size_is_named(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path, use_dora=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    short = {name: t[:5].clone() if "magnitude" in name else t for name, t in tensors.items()}
    save_file(short, adapter / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=r"lora_magnitude_vector.* is \[5\]"):
        plan_conversion(str(adapter))


def test_the_report_names_base_adapter_and_files(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path)
    convert_checkpoint(str(adapter), tmp_path / "out")
    draft = read_draft(tmp_path / "out")
    assert isinstance(draft.spec.architecture, CausalLMSpec)
    assert draft.spec.architecture.config == json.loads((tmp_path / "base" / "config.json").read_text())
    facts = {fact.name: (fact.value, fact.note) for fact in draft.provenance.facts}
    assert facts["base_model"] == ("base", "")
    assert facts["adapter"] == ("LoRA in 4 matrices", "lora_alpha 6")
    assert (draft.provenance.format, draft.provenance.source) == ("lora", adapter.name)
    names = [file.name for file in draft.provenance.files]
    assert names == ["adapter_config.json", "adapter_model.safetensors", "model.safetensors"]
    convert_checkpoint(str(tmp_path / "out"), tmp_path / "back", to="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == draft.spec.architecture.config


def test_the_adapters_tokenizer_comes_before_the_base_models(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path)
    pico.save_tokenizer(tmp_path / "base")
    (adapter / "chat_template.jinja").write_text("of the adapter")
    (adapter / "tokenizer_config.json").write_text("{}")
    convert_checkpoint(str(adapter), tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert (out / "chat_template.jinja").read_text() == "of the adapter"


def rebase(adapter: Path, name: str, **changes: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": name} | changes))
    return adapter


def test_a_pard_base_stays_pard(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path)
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": 300, "spd_type": "pard"}))
    convert_checkpoint(str(adapter), tmp_path / "out")
    spec = read_draft(tmp_path / "out").spec
    assert spec.method == "pard"
    assert isinstance(spec.architecture, CausalLMSpec)
    assert spec.architecture.parallel == ParallelDrafting(mask_token_id=300, mask_state=False)


def test_an_adapter_of_the_target_is_no_draft(tmp_path: Path) -> None:
    """Merged it is a target, whatever its base is called; one of a smaller model is a draft, as a PARD of any size."""
    adapter = str(save_adapter(llama(), tmp_path))
    pico.llama(5, num_hidden_layers=2).save_pretrained(tmp_path / "another")
    for target in (tmp_path / "base", tmp_path / "another"):
        with pytest.raises(LayoutError, match="merged, it is a target and no draft") as refused:
            convert_checkpoint(adapter, tmp_path / "out", target=str(target))
        assert f"next: draftkit convert {adapter} MERGED, without --target" in str(refused.value)
    pico.llama(5, num_hidden_layers=3).save_pretrained(tmp_path / "larger")
    convert_checkpoint(adapter, tmp_path / "draft", target=str(tmp_path / "larger"))
    (note,) = findings_of_draft(read_draft(tmp_path / "draft"))
    assert (note.name, note.severity) == ("merged-adapter", "note")
    assert "if that is the target, the merged model is a target too" in note.message
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": 7}))
    convert_checkpoint(adapter, tmp_path / "pard", target=str(tmp_path / "another"))


def test_one_of_uno_is_called_by_its_name(adapter: Path, tmp_path: Path) -> None:
    """By its folder's name and by its card: a target drafts with it for itself."""
    named, carded = tmp_path / "Llama-3-UNO", tmp_path / "carded"
    for folder in (named, carded):
        shutil.copytree(adapter, folder)
    (carded / "README.md").write_text("# A UNO adapter")
    for source in (named, carded):
        with pytest.raises(FormatError, match=r"a draft of the kind UNO(.|\n)*SGLang serves it, with --uno-lora-path"):
            inspect_checkpoint(str(source))
    assert plan_conversion(str(named), format="lora").require_draft().spec.method == "draft-model"
    (tmp_path / "unoriginal").symlink_to(adapter)
    assert inspect_checkpoint(str(tmp_path / "unoriginal"))


def test_what_convert_merges_is_a_target(tmp_path: Path) -> None:
    """Its hidden states and logits are those of the model that peft merges."""
    save_adapter(llama(), tmp_path)
    pico.save_tokenizer(tmp_path / "adapter")
    converted(tmp_path)
    model, _ = load_model(str(tmp_path / "out"), device="cpu", dtype=torch.float32)
    model.set_attn_implementation("eager")
    tokens = torch.arange(3, 40)[None]
    expected = merged_by_peft(tmp_path)(tokens)
    torch.testing.assert_close(model(tokens).logits, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["eval", "--draft", "zoo:eagle3", "--dataset", "zoo"],
        ["doctor", "--draft", "zoo:eagle3"],
        ["inspect", "zoo:eagle3"],
        ["convert", "zoo:eagle3", "OUT"],
        ["data", "check", "samples.jsonl"],
        ["data", "states", "samples.jsonl", "OUT", "--layers", "1"],
        ["train", "--recipe", "eagle3", "--data", "samples.jsonl", "--out", "OUT"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
@pytest.mark.parametrize("tokenizer", [False, True], ids=["weights alone", "with a tokenizer"])
def test_an_adapter_as_target_is_named_with_what_takes_it(
    tokenizer: bool,
    command: list[str],
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draftkit: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(adapter, "adapter")
    if tokenizer:
        pico.save_tokenizer(Path("adapter"))
    write_samples(Path("samples.jsonl"), samples(12), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    refused = draftkit(*command, "--target", "adapter")
    assert refused.code == 1
    assert "error: this is an adapter (peft) of a model, and no target by itself" in refused.err
    assert "--target-adapter adapter; draftkit convert adapter MERGED writes both as one model" in refused.err
    assert not Path("OUT").exists()


def test_the_tokenizer_beside_an_adapter_serves(adapter: Path, tmp_path: Path) -> None:
    """Text is the same to both; a server may run the adapter."""
    with pytest.raises(TargetError, match="this is an adapter"):
        load_tokenizer(str(adapter))
    shutil.copytree(adapter, tmp_path / "adapter")
    pico.save_tokenizer(tmp_path / "adapter")
    assert load_tokenizer(str(tmp_path / "adapter")).end_ids


def test_a_unified_draft_as_base(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path)
    expected = converted(tmp_path)
    convert_checkpoint(str(tmp_path / "base"), tmp_path / "unified")
    convert_checkpoint(str(rebase(adapter, str(tmp_path / "unified"))), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert read_draft(tmp_path / "again").provenance.format == "lora"


@pytest.mark.filterwarnings("ignore")  # peft's about Conv1D
@pytest.mark.parametrize("whole", [None, ["wpe"]], ids=["adapter alone", "positions trained whole"])
def test_a_base_whose_file_has_the_names_of_a_model_without_a_head(whole: list[str] | None, tmp_path: Path) -> None:
    """As `gpt2` on the Hub: `h.0.…` instead of `transformer.h.0.…`."""
    save_adapter(gpt2(), tmp_path, target_modules=["c_attn"], modules_to_save=whole)
    expected = converted(tmp_path)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(str(tmp_path / "adapter"), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_unknown_keys_of_the_adapters_config_can_be_ignored(tmp_path: Path) -> None:
    adapter = rebase(save_adapter(llama(), tmp_path), str(tmp_path / "base"), future_option={"depth": 3})
    with pytest.raises(FormatError, match="--ignore-key"):
        convert_checkpoint(str(adapter), tmp_path / "out")
    convert_checkpoint(str(adapter), tmp_path / "out", ignored_keys=["future_option"])
    losses = read_draft(tmp_path / "out").provenance.losses
    assert ["future_option" in loss for loss in losses] == [True]
    with pytest.raises(FormatError, match="nothing to ignore in lora_alpha"):
        convert_checkpoint(str(adapter), tmp_path / "again", ignored_keys=["future_option", "lora_alpha"])


def test_an_embedded_model_as_base(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path)
    shapes = {"q_proj.lora_A": (4, 128), "q_proj.lora_B": (128, 4)}
    names = {f"base_model.model.model.layers.1.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    save_file({name: torch.ones(shape) for name, shape in names.items()}, adapter / "adapter_model.safetensors")
    conversion = plan_conversion(str(rebase(adapter, "zoo:draft-model")))
    draft = conversion.require_draft()
    assert (draft.spec.method, draft.spec.dtype) == ("draft-model", "BF16")
    changed = [m for m in conversion.reading.plan.moves if m.operation == "add_lora"] if conversion.reading else []
    assert [(move.destination, move.number) for move in changed] == [("model.layers.1.self_attn.q_proj.weight", 1.5)]


PLAN = """
import sys
from draftkit.convert.api import plan_conversion
draft = plan_conversion(sys.argv[1]).require_draft()
print({fact.name: [fact.value, fact.note] for fact in draft.provenance.facts}["base_model"])
"""


def test_a_base_on_the_hub(tmp_path: Path) -> None:
    adapter = rebase(save_adapter(llama(), tmp_path), "org/base", revision="v1")
    with HubServer({"org/base": tmp_path / "adapter", "org/base@v1": tmp_path / "base"}) as server:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("HF_", "http", "HTTP"))
        }
        own = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", PLAN, str(adapter)]
        ran = subprocess.run(command, env=environment | own, capture_output=True, text=True, timeout=300, check=False)
        assert ran.stdout == f"{['org/base', server.sha('org/base', 'v1')]}\n", ran.stderr


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "this is a IA3 adapter: only LORA is merged"),
        ({"peft_type": "PROMPT_TUNING"}, "this is a PROMPT_TUNING adapter"),
        ({"peft_type": None}, "this is a None adapter"),
        ({"use_dora": True}, "lora_magnitude_vector is missing"),
        ({"lora_bias": True}, "its B matrices have a bias"),
        ({"bias": "all"}, "bias is 'all': the adapter trains biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': it changed the base model's weights"),
        ({"layer_replication": [[0, 2]]}, "it repeats layers of the base model"),
        ({"alora_invocation_tokens": [1]}, "acts only after its invocation tokens"),
        ({"target_parameters": ["mlp.experts"]}, "parameters that are not the weight of a module"),
        ({"trainable_token_indices": [5]}, "it replaces rows of the embedding"),
        ({"use_qalora": True}, "config keys that this format does not define"),
        ({"of_the_future": {"a": 1}}, "of_the_future"),
        ({"lora_alpha": None}, "config key lora_alpha is missing"),
        ({"lora_alpha": "8"}, "config key lora_alpha is '8'"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern has '8' for q_proj"),
        ({"alpha_pattern": {"(": 8}}, r"alpha_pattern has '\('"),
    ],
)
def test_adapters_that_are_more_than_a_product_are_refused(
    changes: dict[str, Any], match: str, refused: Path, tmp_path: Path
) -> None:
    config = json.loads((refused / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").symlink_to(refused / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=match):
        plan_conversion(str(tmp_path))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good adapter, to be spoilt."""
    return save_adapter(llama(), tmp_path_factory.mktemp("refused"))


def without(name: str, tensors: Tensors) -> Tensors:
    return {key: value for key, value in tensors.items() if not key.endswith(name)}


def added(name: str, tensors: Tensors) -> Tensors:
    return tensors | {name: torch.ones(64, 64)}


def reshaped(name: str, tensors: Tensors) -> Tensors:
    return {key: torch.ones(4, 65) if key.endswith(name) else value for key, value in tensors.items()}


MODEL = "base_model.model."


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (partial(without, "layers.0.self_attn.q_proj.lora_B.weight"), r"layers\.0.*q_proj\.weight: lora_B is missing"),
        (partial(added, f"{MODEL}model.layers.9.self_attn.q_proj.weight"), "layers.9.*: not in the base model"),
        (partial(added, f"{MODEL}model.layers.9.self_attn.q_proj.lora_A.weight"), "layers.9.*: not in the base model"),
        (
            partial(added, f"{MODEL}model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
            "lora_magnitude_vector is there, and use_dora is not true",
        ),
        (partial(added, f"{MODEL}score.weight"), r"score\.weight: not in the base model"),
        (partial(added, "score.weight"), r"the adapter holds score\.weight"),
        (partial(added, f"{MODEL}model.norm.weight"), r"wrong shape: model\.norm\.weight is \[64, 64\]"),
        (partial(reshaped, "layers.0.self_attn.q_proj.lora_A.weight"), r"\[4, 65\].*which do not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[Tensors], Tensors], match: str, refused: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_bytes((refused / "adapter_config.json").read_bytes())
    save_file(change(load_file(refused / "adapter_model.safetensors")), tmp_path / "adapter_model.safetensors")
    with pytest.raises(DraftkitError, match=match):
        plan_conversion(str(tmp_path))


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}])
@pytest.mark.filterwarnings("ignore")
def test_one_of_two_tied_matrices_cannot_change_alone(options: dict[str, Any], tmp_path: Path) -> None:
    save_adapter(pico.llama(3, num_hidden_layers=1, tie_word_embeddings=True), tmp_path, **options)
    with pytest.raises(FormatError, match="the base model ties embedding and head"):
        plan_conversion(str(tmp_path / "adapter"))


def test_quantized_weights_take_no_adapter(tmp_path: Path) -> None:
    adapter = save_adapter(llama(), tmp_path)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    quantized = {n: t.to(torch.float8_e4m3fn) if "q_proj" in n else t.bfloat16() for n, t in weights.items()}
    save_file(quantized, tmp_path / "base" / "model.safetensors")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(FormatError, match=r"q_proj\.weight: F8_E4M3, quantized; name the model that was quantized"):
        plan_conversion(str(adapter))


def test_a_base_that_is_gone_is_named_with_the_key_to_correct(refused: Path, tmp_path: Path) -> None:
    config = json.loads((refused / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone/model"}))
    (tmp_path / "adapter_model.safetensors").symlink_to(refused / "adapter_model.safetensors")
    with pytest.raises(SourceError, match="there is no folder /gone/model") as raised:
        inspect_checkpoint(str(tmp_path))
    assert "adapter_config.json: base_model_name_or_path" in str(raised.value)


def test_an_adapter_without_a_base_is_refused(refused: Path, tmp_path: Path) -> None:
    config = json.loads((refused / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(FormatError, match="base_model_name_or_path is None"):
        inspect_checkpoint(str(tmp_path))


@pytest.mark.parametrize(("change", "message"), [
    ({"r": 8}, "has rank 4, and adapter_config.json says 8"),
    ({"r": "4"}, "config key r is '4'"),
    ({"rank_pattern": {"q_proj": 2}}, "has rank 4, and adapter_config.json says 2"),
    ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern has True for q_proj"),
])  # fmt: skip
def test_a_rank_that_the_weights_do_not_have(change: dict[str, object], message: str, tmp_path: Path) -> None:
    """The scale depends on the rank, so one of the two files is another adapter's."""
    adapter = save_adapter(llama(), tmp_path)
    file = adapter / "adapter_config.json"
    sound = json.loads(file.read_text())
    file.write_text(json.dumps(sound | change))
    with pytest.raises(FormatError, match=message):
        plan_conversion(str(adapter))
