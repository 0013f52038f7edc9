"""The speculators library's layouts: what test_formats.py does not cover."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from fixtures.checkpoints.published import speculators as published
from fixtures.checkpoints.published.checkpoint import Tensors, randoms
from fixtures.checkpoints.published.layers import VD, H, V, vocabulary_map
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.convert.unified import config_of
from draftkit.errors import DraftkitError, FormatError, LayoutError
from draftkit.io.jsonfile import dump
from draftkit.layout.architecture import ParallelDrafting, Rope
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import read_draft
from draftkit.layout.provenance import Provenance
from draftkit.layout.spec import DraftSpec

ALL = all_published()

# As speculators 0.9.0 and transformers 5.19.0 wrote them for scripts/check/speculators.py, at the sizes of pico; the
# last one is Eagle3Converter's.
RECORDED = {
    "speculators-eagle3-trained": """
        {"architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "draft_vocab_size":
        128, "dtype": "float32", "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "embed_requires_grad": false,
        "fc_norm": false, "norm_before_fc": true, "norm_before_residual": true, "norm_output": true,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods":
        [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}}, "speculators_model_type":
        "eagle3", "speculators_version": "0.9.0", "target_hidden_size": null, "tie_word_embeddings": false,
        "transformer_layer_config": {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 96, "layer_types": ["sliding_attention"], "max_position_embeddings": 512, "mlp_bias":
        false, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2,
        "pad_token_id": null, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 500000.0,
        "rope_type": "default"}, "sliding_window": 64, "tie_word_embeddings": false, "use_cache": true,
        "use_sliding_window": true, "vocab_size": 320}, "transformers_version": "5.19.0"}
    """,
    "speculators-eagle3-qwen3": """
        {"architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "draft_vocab_size":
        128, "dtype": "float32", "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "embed_requires_grad": false,
        "fc_norm": false, "norm_before_fc": false, "norm_before_residual": true, "norm_output": false,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods":
        [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}}, "speculators_model_type":
        "eagle3", "speculators_version": "0.9.0", "target_hidden_size": null, "tie_word_embeddings": false,
        "transformer_layer_config": {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": null,
        "eos_token_id": null, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 96, "layer_types": ["full_attention"], "max_position_embeddings": 512,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 1,
        "num_key_value_heads": 2, "pad_token_id": null, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta":
        500000.0, "rope_type": "default"}, "sliding_window": null, "tie_word_embeddings": false, "use_cache": true,
        "use_sliding_window": false, "vocab_size": 320}, "transformers_version": "5.19.0"}
    """,
    "speculators-peagle": """
        {"architectures": ["PEagleDraftModel"], "auto_map": {"": "config.PEagleSpeculatorConfig"}, "draft_vocab_size":
        128, "dtype": "float32", "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "embed_requires_grad": true,
        "fc_norm": false, "mask_token_id": 319, "norm_before_fc": false, "norm_before_residual": false, "norm_output":
        false, "speculators_config": {"algorithm": "peagle", "default_proposal_method": "greedy", "proposal_methods":
        [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}}, "speculators_model_type":
        "peagle", "speculators_version": "0.9.0", "target_hidden_size": null, "tie_word_embeddings": false,
        "transformer_layer_config": {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 96, "max_position_embeddings": 512, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": null,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 500000.0, "rope_type":
        "default"}, "tie_word_embeddings": false, "use_cache": true, "vocab_size": 320}, "transformers_version":
        "5.19.0"}
    """,
    "speculators-eagle3-converted": """
        {"architectures": ["Eagle3Speculator"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "draft_vocab_size":
        128, "dtype": "float16", "eagle_aux_hidden_state_layer_ids": null, "embed_requires_grad": false, "fc_norm":
        false, "norm_before_fc": false, "norm_before_residual": false, "norm_output": false, "speculators_config":
        {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [{"accept_tolerance": 0.0,
        "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}], "verifier": {"architectures":
        ["LlamaForCausalLM"], "name_or_path": "target"}}, "speculators_model_type": "eagle3", "speculators_version":
        "0.9.0", "target_hidden_size": null, "tie_word_embeddings": false, "transformer_layer_config":
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "float16", "eos_token_id": 2,
        "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
        "max_position_embeddings": 2048, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 4,
        "num_hidden_layers": 1, "num_key_value_heads": 2, "pad_token_id": null, "pretraining_tp": 1, "rms_norm_eps":
        1e-05, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": false,
        "use_cache": true, "vocab_size": 320}, "transformers_version": "5.19.0"}
    """,
}
COMMON = {
    "d2t": [128], "fc.weight": [64, 192], "layers.0.hidden_norm.weight": [64], "layers.0.input_layernorm.weight":
    [64], "layers.0.mlp.down_proj.weight": [64, 96], "layers.0.mlp.gate_proj.weight": [96, 64],
    "layers.0.mlp.up_proj.weight": [96, 64], "layers.0.post_attention_layernorm.weight": [64],
    "layers.0.self_attn.k_proj.weight": [32, 128], "layers.0.self_attn.o_proj.weight": [64, 64],
    "layers.0.self_attn.q_proj.weight": [64, 128], "layers.0.self_attn.v_proj.weight": [32, 128], "lm_head.weight":
    [128, 64], "norm.weight": [64], "t2d": [320],
}  # fmt: skip

RECORDED_TENSORS: dict[str, dict[str, list[int]]] = {
    "speculators-eagle3-trained": COMMON
    | {
        "embed_tokens.weight": [320, 64], "input_norm.weight": [192],
    },
    "speculators-eagle3-qwen3": COMMON
    | {
        "embed_tokens.weight": [320, 64], "layers.0.self_attn.k_norm.weight": [16],
        "layers.0.self_attn.q_norm.weight": [16],
    },
    "speculators-peagle": COMMON
    | {
        "embed_tokens.weight": [320, 64], "layers.1.input_layernorm.weight": [64], "layers.1.mlp.down_proj.weight":
        [64, 96], "layers.1.mlp.gate_proj.weight": [96, 64], "layers.1.mlp.up_proj.weight": [96, 64],
        "layers.1.post_attention_layernorm.weight": [64], "layers.1.self_attn.k_proj.weight": [32, 64],
        "layers.1.self_attn.o_proj.weight": [64, 64], "layers.1.self_attn.q_proj.weight": [64, 64],
        "layers.1.self_attn.v_proj.weight": [32, 64], "mask_hidden": [1, 1, 192],
    },
    "speculators-eagle3-converted": COMMON,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> str:
    return str(pico.write_checkpoint(folder, config, tensors, safetensors=True))


def eagle_of(source: Path | str, target: Path | None = None) -> EagleSpec:
    draft = (
        read_draft(Path(source)) if target is None else plan_conversion(str(source), target=str(target)).require_draft()
    )
    assert isinstance(draft.spec.architecture, EagleSpec)
    return draft.spec.architecture


@pytest.fixture(scope="module")
def weighty_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pico target with its weights, for what is copied from them."""
    return pico.save_llama(tmp_path_factory.mktemp("weighty-target"))


# --- what the library writes


@pytest.mark.parametrize("name", RECORDED)
def test_the_fake_checkpoints_are_as_the_library_writes(name: str) -> None:
    recorded, fake = json.loads(RECORDED[name]), ALL[name]
    assert {key: list(tensor.shape) for key, tensor in fake.tensors(torch.float32).items()} == RECORDED_TENSORS[name]
    assert fake.config.keys() == recorded.keys()
    if name != "speculators-eagle3-converted":  # its fake is of the days of transformers 4
        assert fake.config["transformer_layer_config"] == recorded["transformer_layer_config"]


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_library_writes_is_read(name: str, target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", json.loads(RECORDED[name]), ALL[name].tensors(torch.float32))
    eagle = eagle_of(source, target)
    fake = eagle_of(ALL[name].write(tmp_path / "fake"), target)
    assert replace(eagle, decoder=replace(eagle.decoder, rope=fake.decoder.rope)) == fake


# --- reading


def changed(name: str, tmp_path: Path, config: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """A fake checkpoint with other config keys (None: removed) and without some tensors."""
    values = {key: value for key, value in (ALL[name].config | config).items() if value is not None}
    tensors = {key: value for key, value in ALL[name].tensors(torch.float16).items() if key not in without}
    return write(tmp_path / "source", values, tensors)


TABLE = "embed_tokens.weight"
TWO_LAYERS = {"transformer_layer_config": published.LLAMA | {"num_hidden_layers": 2}}
BROKEN: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "d2t dropped": ("speculators-eagle3", {}, ("d2t", "t2d"), "the draft has 128 of 320 tokens, and no d2t says which"),
    "layer dropped": ("speculators-eagle3", TWO_LAYERS, (), "config.json has 2 layers, and the weights have 1"),
    "fc_norm dropped": ("speculators-eagle3", {"fc_norm": True}, (), "asks for a norm before fc, and fc_norm.0.weight"),
    "no mask state": ("speculators-peagle", {}, ("mask_hidden",), "type is peagle, and mask_hidden is missing"),
    "a mask state": ("speculators-peagle", {"speculators_model_type": "eagle3"}, (), "and mask_hidden is there"),
    "trained table": ("speculators-eagle3", {"embed_requires_grad": True}, (TABLE,), "its embedding was trained, and"),
    "nested and not": ("speculators-eagle3", {"vocab_size": 321}, (), "transformer_layer_config.vocab_size is 320 and"),
    "not nested": ("speculators-eagle3", {"transformer_layer_config": None}, (), "transformer_layer_config is missing"),
    "nested, unknown": (
        "speculators-eagle3", {"transformer_layer_config": published.LLAMA | {"twist": 1}}, (),
        "transformer_layer_config.twist: 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_was_lost_is_named(case: str, target: Path, tmp_path: Path) -> None:
    name, config, without, message = BROKEN[case]
    with pytest.raises(FormatError, match=message.replace("(", r"\(")) as error:
        plan_conversion(changed(name, tmp_path, config, without), target=str(target))
    if "dropped" in case and "norm" not in case:
        assert "Eagle3Converter" in str(error.value)


def test_other_types_are_refused_by_name(target: Path, tmp_path: Path) -> None:
    source = changed("speculators-eagle3", tmp_path, {"speculators_model_type": "rnnt"})
    with pytest.raises(FormatError, match="this is a draft of the kind rnnt"):
        plan_conversion(source, target=str(target))


def test_a_head_is_the_target_s_own_under_other_names(tmp_path: Path) -> None:
    """As the library's converter took it out of its target."""
    named = convert_checkpoint(str(ALL["speculators-mtp"].write(tmp_path / "library")), tmp_path / "named")
    own = convert_checkpoint(str(ALL["qwen-head"].write(tmp_path / "target")), tmp_path / "own")
    spec, same = (read_draft(folder).spec.architecture.expect(MtpSpec) for folder in (named, own))
    assert spec.tensors() == same.tensors()
    assert replace(spec, weights=()) == replace(same, weights=())
    written, library = load_file(named / "model.safetensors"), ALL["speculators-mtp"].all_tensors()
    parts = {"fc": "input_proj", "norm": "final_layernorm", "pre_fc_norm_hidden": "hidden_layernorm"}
    for ours, theirs in (parts | {"layers.0.mlp.up_proj": "mlp.up_proj"}).items():
        assert torch.equal(written[f"mtp.{ours}.weight"], library[f"mtp_layers.0.{theirs}.weight"])


@pytest.mark.parametrize(
    ("config", "renamed", "message"),
    [
        ({"model_type": "qwen3"}, {}, "no engine has multi-token prediction heads of qwen3"),
        ({}, {"mlp.up_proj.weight": "mlp.experts.gate_up_proj"}, "its experts are stored as one"),
        ({}, {"input_proj.weight": "input_projection.weight"}, "the heads lack 1 tensors: mtp.fc.weight"),
    ],
)
def test_heads_that_are_not_read_say_why(
    config: dict[str, Any], renamed: dict[str, str], message: str, tmp_path: Path
) -> None:
    published = ALL["speculators-mtp"]
    layers = published.config["transformer_layer_config"] | config
    others = {f"mtp_layers.0.{old}": f"mtp_layers.0.{new}" for old, new in renamed.items()}
    tensors = {others.get(name, name): tensor for name, tensor in published.all_tensors().items()}
    pico.write_checkpoint(tmp_path, published.config | {"transformer_layer_config": layers}, tensors)
    with pytest.raises(FormatError, match=message):
        plan_conversion(str(tmp_path))


JUNK: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 1.5, True, [1, "x"], {"x": {}})
ONE_OF_EACH = ["speculators-peagle", "speculators-eagle-layernorms"]


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_wrong_value_anywhere_in_the_config_is_a_known_failure(name: str, target: Path, tmp_path: Path) -> None:
    config = ALL[name].config
    nested = "transformer_layer_config"
    folder = ALL[name].write(tmp_path / "source")
    for value in JUNK:
        outer = [config | {key: value} for key in config]
        inner = [config | {nested: config[nested] | {key: value}} for key in config[nested]]
        for changed in (*outer, *inner):
            (folder / "config.json").write_text(json.dumps(changed))
            with contextlib.suppress(DraftkitError):
                plan_conversion(str(folder), target=str(target))


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("shape", [(), (0,), (1, 1, 1, 1)], ids=str)
def test_a_wrong_shape_of_any_tensor_is_a_known_failure(
    name: str, shape: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    folder, tensors = ALL[name].write(tmp_path / "source"), ALL[name].tensors(torch.float16)
    for wrong, tensor in tensors.items():
        save_file(tensors | {wrong: torch.zeros(shape, dtype=tensor.dtype)}, folder / "model.safetensors")
        with pytest.raises(DraftkitError):
            plan_conversion(str(folder), target=str(target)).require_draft()


def facts_of(source: str, target: Path | None) -> dict[str, tuple[str, str, str]]:
    reading = plan_conversion(source, target=str(target) if target else None).reading
    assert reading is not None
    return {fact.name: (fact.value, fact.origin, fact.note) for fact in reading.plan.facts}


def test_an_absent_norm_before_residual_is_false_and_the_report_says_that_vllm_differs(
    target: Path, tmp_path: Path
) -> None:
    facts = facts_of(changed("speculators-eagle3", tmp_path, {"norm_before_residual": None}), target)
    value, origin, note = facts["norm_before_residual"]
    assert (value, origin) == ("False", "format default")
    assert "vLLM takes an absent key" in note


def test_what_the_converter_drops_without_a_trace_is_noted(target: Path, tmp_path: Path) -> None:
    facts = facts_of(changed("speculators-eagle3-converted", tmp_path, {}), target)
    assert "q_norm" in facts["converter"][2]
    assert "converter" not in facts_of(changed("speculators-eagle3", tmp_path / "other", {}), target)


def test_missing_layer_ids_name_the_target_that_the_file_names(tmp_path: Path) -> None:
    source = changed("speculators-eagle3", tmp_path, {"eagle_aux_hidden_state_layer_ids": None})
    assert facts_of(source, None)["target"][0] == "meta-llama/Llama-3.1-8B-Instruct"
    with pytest.raises(LayoutError, match=r"pass --target.*names meta-llama/Llama-3.1-8B-Instruct"):
        plan_conversion(source).require_draft()


def test_the_rope_base_of_the_config_holds_beside_linear_scaling(target: Path, tmp_path: Path) -> None:
    """SafeAILab's classes ignore it there; the library's do not."""
    rope = {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
    source = changed(
        "speculators-eagle3", tmp_path, {"transformer_layer_config": published.LLAMA | {"rope_parameters": rope}}
    )
    assert eagle_of(source, target).decoder.rope.base == 500000.0


# --- writing


def test_a_draft_of_another_layout_gets_copies_and_the_targets_name(weighty_target: Path, tmp_path: Path) -> None:
    tensors = pico.eagle3_tensors()
    source = str(pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), tensors))
    out = convert_checkpoint(source, tmp_path / "out", to="speculators", target=str(weighty_target))
    written, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    embedding = load_file(weighty_target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(written["embed_tokens.weight"], embedding)
    assert torch.equal(written["t2d"], tensors["t2d"])
    assert torch.equal(written["layers.0.hidden_norm.weight"], tensors["midlayer.hidden_norm.weight"])
    assert written.keys() == RECORDED_TENSORS["speculators-eagle3-converted"].keys() | {"embed_tokens.weight"}
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": weighty_target.name, "architectures": ["LlamaForCausalLM"]
    }  # fmt: skip
    # What vLLM's update_eagle3 reads, and defaults otherwise.
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0


def test_a_borrowed_embedding_needs_the_target(tmp_path: Path, target: Path) -> None:
    source = str(pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), pico.eagle3_tensors()))
    unified = convert_checkpoint(source, tmp_path / "unified", target=str(target))
    config = json.loads((unified / "config.json").read_text())
    config["draftkit"]["provenance"]["target"] = None
    (unified / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutError, match=r"--to speculators needs a copy of its embed_tokens\.weight"):
        plan_conversion(str(unified), to="speculators")


def test_a_target_in_a_folder_is_asked_for_again(tmp_path: Path, weighty_target: Path) -> None:
    """The draft keeps its name; in the folder around it that leads there."""
    source = str(pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), pico.eagle3_tensors()))
    unified = convert_checkpoint(source, tmp_path / "unified", target=str(weighty_target))
    with pytest.raises(LayoutError, match=f"its target, {weighty_target.name}, is not found here\n.*\n.*--target"):
        plan_conversion(str(unified), to="speculators")
    with contextlib.chdir(weighty_target.parent):
        plan_conversion(str(unified), to="speculators")


def unified(folder: Path, spec: DraftSpec, seed: int = 0) -> str:
    """A unified folder with this spec, its weights random."""
    schema = spec.tensors()
    dtype = {"F32": torch.float32, "F16": torch.float16}[spec.dtype]
    tensors = randoms({name: t.shape for name, t in schema.items() if name != "d2t"}, dtype, seed)
    if "d2t" in schema:
        tensors["d2t"] = vocabulary_map(schema["d2t"].shape[0])["d2t"]
    provenance = Provenance(
        source="test", source_revision=None, format="test", files=(), target=None, target_revision=None, facts=(),
        dropped_config={}, losses=(), draftkit_version="0",
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(dump(config_of(spec, provenance)))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def spec_of(eagle: EagleSpec) -> DraftSpec:
    return DraftSpec(architecture=eagle, dtype="F16")


OWN = replace(pico.EAGLE3_SPEC, embed_tokens="draft")
MASKED = ParallelDrafting(mask_token_id=7, mask_state=True)
BIASED = replace(OWN, decoder=replace(OWN.decoder, qkv_bias=True))


def test_biases_that_a_draft_lacks_are_written_as_zeros(target: Path, tmp_path: Path) -> None:
    """The library and vLLM have four attention biases or none."""
    source = unified(tmp_path / "draft", spec_of(BIASED))
    out = convert_checkpoint(source, tmp_path / "out", to="speculators", target=str(target))
    written = load_file(out / "model.safetensors")
    assert not written["layers.0.self_attn.o_proj.bias"].any()
    assert written["layers.0.self_attn.q_proj.bias"].any()
    assert json.loads((out / "config.json").read_text())["transformer_layer_config"]["attention_bias"] is True


LOSSES = {
    "logit_scale": (replace(OWN, logit_scale=0.5), {}, "logit_scale is 0.5, and its class has 1.0"),
    "width": (replace(OWN, target_hidden_size=2 * H), {"hidden_size": 2 * H}, "target_hidden_size is 128"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_the_librarys_classes_ignore_is_a_loss_and_vllm_still_reads_it(case: str, tmp_path: Path) -> None:
    eagle, changes, message = LOSSES[case]
    target = str(pico.save_target_config(tmp_path / "target", **changes))
    source = unified(tmp_path / "draft", spec_of(eagle))
    with pytest.raises(LayoutError, match=message):
        convert_checkpoint(source, tmp_path / "out", to="speculators", target=target)
    out = convert_checkpoint(source, tmp_path / "out", to="speculators", target=target, allow_lossy=True)
    again = eagle_of(out, Path(target))
    assert (again.logit_scale, again.target_hidden_size) == (eagle.logit_scale, eagle.target_hidden_size)


def test_what_vllm_reads_from_the_layers_config_only_is_there(target: Path, tmp_path: Path) -> None:
    eagle = replace(OWN, aux_layer_ids=(1, 2, 4, 8), feature_norm="per_layer", parallel=MASKED)
    source = unified(tmp_path / "draft", spec_of(eagle))
    out = convert_checkpoint(source, tmp_path / "out", to="speculators", target=str(target))
    layers = json.loads((out / "config.json").read_text())["transformer_layer_config"]
    assert (layers["num_aux_hidden_states"], layers["fc_norm"]) == (4, True)


def test_the_unified_config_names_the_class_and_the_window_that_vllm_has(target: Path, tmp_path: Path) -> None:
    source = ALL["speculators-peagle-qwen3"].write(tmp_path / "source")
    out = convert_checkpoint(str(source), tmp_path / "out", target=str(target))
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention"], 64)


OBSTACLES = {
    "last hidden state": replace(OWN, aux_layer_ids=None, hidden_norm=False),
    "no final norm": replace(OWN, final_norm=False),
    "hidden state first": replace(OWN, concatenation="hidden_embedding"),
    "both norms": replace(OWN, decoder=replace(OWN.decoder, qk_norm=True, mlp_bias=True)),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_no_file_can_say_is_refused(case: str, target: Path, tmp_path: Path) -> None:
    source = unified(tmp_path / "draft", spec_of(OBSTACLES[case]))
    with pytest.raises(LayoutError, match="the speculators library has no class for this draft"):
        convert_checkpoint(source, tmp_path / "out", to="speculators", target=str(target), allow_lossy=True)


ropes = st.sampled_from(
    [
        Rope(base=10000.0, declared_base=None, scaling=None, max_position_embeddings=2048),
        Rope(base=5e5, declared_base=5e5, scaling={"rope_type": "linear", "factor": 2.0}, max_position_embeddings=64),
        Rope(base=1e6, declared_base=1e4, scaling=None, max_position_embeddings=40960),
    ]
)


@st.composite
def drafts(draw: st.DrawFn) -> EagleSpec:
    """EAGLE-3 and P-EAGLE drafts of every combination of facts that the library has classes for."""
    qk_norm, biased = draw(st.booleans()), draw(st.booleans())
    decoder = replace(
        OWN.decoder,
        num_hidden_layers=draw(st.integers(1, 3)),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([8, 16])),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=not qk_norm and draw(st.booleans()),
        qk_norm=qk_norm,
        sliding_window=draw(st.sampled_from([None, 32])),
        rope=draw(ropes),
    )
    ids = draw(st.sets(st.integers(0, pico.LAYERS), min_size=1, max_size=5))
    parallel = draw(st.sampled_from([None, MASKED]))
    return replace(
        OWN,
        decoder=decoder,
        draft_vocab_size=draw(st.sampled_from([V, VD, 1])),
        aux_layer_ids=tuple(sorted(ids)),
        feature_norm=draw(st.sampled_from(["none", "joint", "per_layer"])),
        norm_before_residual=draw(st.booleans()),
        feedback=draw(st.sampled_from(["pre_norm", "post_norm"])),
        parallel=parallel,
    )


@pytest.mark.slow
@examples(25)
@given(eagle=drafts(), seed=st.integers(0, 3))
def test_any_draft_is_the_same_after_a_round_trip(
    eagle: EagleSpec, seed: int, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("round")
    source = unified(folder / "draft", spec_of(eagle), seed)
    out = convert_checkpoint(source, folder / "out", to="speculators", target=str(target))
    back = convert_checkpoint(str(out), folder / "back")
    rope = replace(eagle.decoder.rope, declared_base=eagle.decoder.rope.base)
    assert eagle_of(back) == replace(eagle, decoder=replace(eagle.decoder, rope=rope))
    before, after = load_file(folder / "draft" / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
