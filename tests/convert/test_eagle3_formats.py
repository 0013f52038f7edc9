"""The EAGLE-3 family with flat configs, and SGLang: what is read from odd files, what is written, lost and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from fixtures.checkpoints.published.checkpoint import Tensors, randoms
from fixtures.checkpoints.published.eagle3 import MODELOPT, MODELOPT_EAGLE, SPECFORGE, YARN, config, eagle3, quantized
from fixtures.checkpoints.published.layers import VD, H, V, vocabulary_map
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftkit.convert.api import Conversion, convert_checkpoint, plan_conversion
from draftkit.convert.unified import config_of
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, FormatError, LayoutError
from draftkit.layout.architecture import ParallelDrafting, Rope
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.provenance import Provenance
from draftkit.layout.spec import DraftSpec
from draftkit.models.eagle import load_eagle

EAGLE, EAGLE3 = pico.EAGLE_SPEC, pico.EAGLE3_SPEC
ALL = all_published()
PROVENANCE = Provenance(
    source="a test", source_revision=None, format="a test", files=(), target=None, target_revision=None, facts=(),
    dropped_config={}, losses=(), draftkit_version="0",
)  # fmt: skip


def with_decoder(eagle: EagleSpec, **changes: Any) -> EagleSpec:
    return replace(eagle, decoder=replace(eagle.decoder, **changes))


def with_rope(eagle: EagleSpec, **changes: Any) -> EagleSpec:
    return with_decoder(eagle, rope=replace(eagle.decoder.rope, **changes))


def unified(folder: Path, eagle: EagleSpec, quantization: dict[str, object] | None = None) -> str:
    """A unified draft of this spec, with random weights."""
    spec = DraftSpec(architecture=eagle, dtype="F16", quantization=quantization)
    shapes = {name: schema.shape for name, schema in spec.tensors().items() if name != "d2t"}
    tensors = randoms(shapes, torch.float16, seed=7)
    if eagle.reduced_vocabulary:
        tensors |= vocabulary_map(eagle.draft_vocab_size, mask=False)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(spec, PROVENANCE)))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def foreign(folder: Path, values: dict[str, Any], tensors: Tensors) -> str:
    return str(pico.write_checkpoint(folder, values, tensors, safetensors=True))


def eagle_of(conversion: Conversion) -> EagleSpec:
    architecture = conversion.require_draft().spec.architecture
    assert isinstance(architecture, EagleSpec)
    return architecture


@pytest.fixture
def whole_target(tmp_path: Path) -> str:
    """The pico target with the two tensors that exporters copy."""
    folder = pico.save_target_config(tmp_path / "whole-target")
    tables = {"model.embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
    save_file(randoms(tables, torch.float16, seed=5), folder / "model.safetensors")
    return str(folder)


# --- written configs

SIZES = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "vocab_size": V, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
LLAMA, SGLANG = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["LlamaForCausalLMEagle3"]}
IDS = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
ENGINE_EAGLE3 = SIZES | SGLANG | IDS | {"draft_vocab_size": VD, "target_hidden_size": H}
LINEAR: dict[str, object] = {"rope_type": "linear", "factor": 2.0}
MULTIMODAL: dict[str, object] = {"rope_type": "default", "mrope_section": [4, 2, 2]}
WRITTEN: dict[str, tuple[str, EagleSpec, dict[str, Any]]] = {
    "eagle3": ("eagle", EAGLE3, SIZES | LLAMA | {"draft_vocab_size": VD}),
    "eagle3, own embedding": (
        "eagle", replace(EAGLE3, embed_tokens="draft"),
        SIZES | LLAMA | {"draft_vocab_size": VD, "target_hidden_size": H},
    ),
    "eagle3, linear rope": (
        "eagle", with_rope(EAGLE3, scaling=LINEAR),
        SIZES | LLAMA | {"draft_vocab_size": VD, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "sglang": ("sglang", EAGLE3, ENGINE_EAGLE3),
    "sglang, linear rope": (
        "sglang", with_rope(EAGLE3, scaling=LINEAR), ENGINE_EAGLE3 | {"rope_scaling": LINEAR | {"type": "linear"}},
    ),
    "sglang, multimodal rope": (
        "sglang", with_rope(EAGLE3, scaling=MULTIMODAL, base=5e6),
        ENGINE_EAGLE3 | {"rope_scaling": MULTIMODAL | {"type": "default"}, "rope_theta": 5e6},
    ),
    "sglang, knobs": (
        "sglang", replace(EAGLE3, aux_layer_ids=(1, 2, 4, 7), feature_norm="per_layer", feedback="post_norm"),
        ENGINE_EAGLE3 | {
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3, 6]},
            "num_aux_hidden_states": 4, "fc_norm": True, "norm_output": True,
        },
    ),
    "sglang, joint norm": (
        "sglang", replace(EAGLE3, feature_norm="joint"), ENGINE_EAGLE3 | {"norm_before_fc": True},
    ),
    "sglang, last state": (
        "sglang", replace(EAGLE3, aux_layer_ids=None),
        ENGINE_EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}},
    ),
    "sglang, eagle-1": (
        "sglang", EAGLE, SIZES | {"architectures": ["LlamaForCausalLMEagle"], "attention_bias": False},
    ),
    "sglang, eagle-1 with biases": (
        "sglang", with_decoder(EAGLE, qkv_bias=True),
        SIZES | {"architectures": ["LlamaForCausalLMEagle"], "attention_bias": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_config_is_exact(name: str, target: Path, tmp_path: Path) -> None:
    destination, eagle, expected = WRITTEN[name]
    source = unified(tmp_path / "source", eagle)
    out = convert_checkpoint(source, tmp_path / "out", to=destination, target=str(target))
    assert json.loads((out / "config.json").read_text()) == expected


def test_sglang_gets_the_biases_it_would_make_up(target: Path, tmp_path: Path) -> None:
    source = unified(tmp_path / "source", with_decoder(EAGLE, qkv_bias=True, num_hidden_layers=2))
    out = convert_checkpoint(source, tmp_path / "out", to="sglang", target=str(target))
    before, after = load_file(Path(source) / "model.safetensors"), load_file(out / "model.safetensors")
    added = {name: tensor for name, tensor in after.items() if name not in before}
    assert sorted(added) == ["fc.bias", "layers.0.self_attn.o_proj.bias", "layers.1.self_attn.o_proj.bias"]
    assert {tensor.shape for tensor in added.values()} == {(H,)}
    assert not any(tensor.any() for tensor in added.values())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_deeper_layers_get_the_names_of_sglang(target: Path, tmp_path: Path) -> None:
    source = unified(tmp_path / "source", with_decoder(EAGLE3, num_hidden_layers=2))
    out = convert_checkpoint(source, tmp_path / "out", to="sglang", target=str(target))
    names = set(load_file(out / "model.safetensors"))
    assert {"midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "layers.1.hidden_norm.weight"} <= names
    assert "layers.1.input_layernorm.weight" not in names


@pytest.mark.parametrize("destination", ["eagle", "sglang"])
def test_a_borrowed_head_is_copied(destination: str, whole_target: str, tmp_path: Path) -> None:
    """SGLang leaves it random, and SafeAILab's class has one of its own."""
    eagle = replace(EAGLE3, draft_vocab_size=V, lm_head="target")
    source = unified(tmp_path / "source", eagle)
    out = convert_checkpoint(source, tmp_path / "out", to=destination, target=whole_target)
    head = load_file(Path(whole_target) / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], head)


# --- what is lost

BOTH = ("eagle", "sglang")
LOST: dict[str, tuple[EagleSpec, dict[str, tuple[str, ...]]]] = {
    "residual": (replace(EAGLE3, norm_before_residual=True), dict.fromkeys(BOTH, ("norm_before_residual",))),
    "logit_scale": (replace(EAGLE3, logit_scale=0.5), dict.fromkeys(BOTH, ("logit_scale",))),
    "joint": (replace(EAGLE3, feature_norm="joint"), {"eagle": ("feature_norm",), "sglang": ()}),
    "per_layer": (replace(EAGLE3, feature_norm="per_layer"), {"eagle": ("feature_norm",), "sglang": ()}),
    "feedback": (replace(EAGLE3, feedback="post_norm"), {"eagle": ("feedback",), "sglang": ()}),
    "head_dim": (with_decoder(EAGLE3, head_dim=32), {"eagle": ("head_dim",), "sglang": ()}),
    "qk_norm": (with_decoder(EAGLE3, qk_norm=True), dict.fromkeys(BOTH, ("qk_norm",))),
    "window": (with_decoder(EAGLE3, sliding_window=64), {"eagle": ("sliding_window",), "sglang": ()}),
    "window of one token": (with_decoder(EAGLE3, sliding_window=1), dict.fromkeys(BOTH, ("sliding_window",))),
    "biases": (
        with_decoder(EAGLE3, qkv_bias=True, output_bias=True, mlp_bias=True),
        dict.fromkeys(BOTH, ("qkv_bias", "output_bias", "mlp_bias")),
    ),
    "activation": (with_decoder(EAGLE3, hidden_act="gelu"), {"eagle": (), "sglang": ("hidden_act",)}),
    "yarn": (with_rope(EAGLE3, scaling=YARN), {"eagle": ("rope_scaling",), "sglang": ()}),
    "multimodal": (with_rope(EAGLE3, scaling=MULTIMODAL), {"eagle": ("rope_scaling",), "sglang": ()}),
    "scaled base": (
        with_rope(EAGLE3, scaling=LINEAR, base=5e5), {"eagle": ("rope_theta",), "sglang": ()},
    ),
    "concatenation": (replace(EAGLE3, concatenation="hidden_embedding"), dict.fromkeys(BOTH, ("concatenation",))),
    "eagle-1 norms": (
        replace(EAGLE, embedding_norm=True, hidden_norm=True, input_norm=True, final_norm=True, feedback="post_norm"),
        dict.fromkeys(BOTH, ("embedding_norm", "hidden_norm", "input_norm", "final_norm", "feedback")),
    ),
    "eagle-1 vocabulary": (
        replace(EAGLE, draft_vocab_size=VD, lm_head="draft"), dict.fromkeys(BOTH, ("draft_vocab_size", "lm_head")),
    ),
    "eagle-1 o_proj bias": (with_decoder(EAGLE, output_bias=True), {"eagle": ("output_bias",), "sglang": ()}),
}  # fmt: skip


@pytest.mark.parametrize("destination", BOTH)
@pytest.mark.parametrize("name", LOST)
def test_what_a_destination_cannot_compute_is_a_loss(
    name: str, destination: str, whole_target: str, tmp_path: Path
) -> None:
    eagle, expected = LOST[name]
    conversion = plan_conversion(unified(tmp_path / "source", eagle), to=destination, target=whole_target)
    assert tuple(loss.split(" is ")[0] for loss in conversion.losses) == expected[destination]


PLAIN = {
    "norm_before_residual": False, "logit_scale": 1.0, "qkv_bias": False, "output_bias": False,
    "mlp_bias": False, "qk_norm": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.slow
@given(
    norm_before_residual=st.booleans(),
    feature_norm=st.sampled_from(["none", "joint", "per_layer"]),
    feedback=st.sampled_from(["pre_norm", "post_norm"]),
    logit_scale=st.sampled_from([1.0, 0.5]),
    embed_tokens=st.sampled_from(["draft", "target"]),
    aux_layer_ids=st.sampled_from([(2, 4, 5), (1, 3, 4, 7), (6,), None]),
    layers=st.integers(1, 3),
    vocabulary=st.sampled_from([VD, V]),
    decoder=st.fixed_dictionaries({
        "qkv_bias": st.booleans(), "output_bias": st.booleans(), "mlp_bias": st.booleans(), "qk_norm": st.booleans(),
        "sliding_window": st.sampled_from([None, 64]), "head_dim": st.sampled_from([16, 32]),
        "hidden_act": st.sampled_from(["silu", "gelu"]),
    }),
    rope=st.sampled_from([None, LINEAR, YARN, MULTIMODAL]),
)  # fmt: skip
@examples(50)
def test_sglang_holds_the_draft_without_its_losses(
    decoder: dict[str, Any],
    rope: dict[str, object] | None,
    layers: int,
    vocabulary: int,
    target: Path,
    tmp_path_factory: pytest.TempPathFactory,
    **changes: Any,
) -> None:
    """Read back, it is the same draft but for the facts that were reported as lost."""
    folder = tmp_path_factory.mktemp("sglang")
    if changes["aux_layer_ids"] is None:
        changes["feature_norm"] = "none"
    eagle = replace(EAGLE3, draft_vocab_size=vocabulary, **changes)
    eagle = with_rope(with_decoder(eagle, num_hidden_layers=layers, **decoder), scaling=rope)
    source = unified(folder / "source", eagle)
    lost = {loss.split(" is ")[0] for loss in plan_conversion(source, to="sglang", target=str(target)).losses}
    out = convert_checkpoint(source, folder / "out", to="sglang", target=str(target), allow_lossy=True)
    back = eagle_of(plan_conversion(str(out), target=str(target)))
    assert back == replace(
        eagle,
        norm_before_residual=False,
        logit_scale=1.0,
        decoder=replace(
            eagle.decoder, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
            hidden_act=back.decoder.hidden_act, rope=replace(eagle.decoder.rope, declared_base=10000.0),
        ),
    )  # fmt: skip
    flat = {"norm_before_residual": eagle.norm_before_residual, "logit_scale": eagle.logit_scale}
    flat |= {name: getattr(eagle.decoder, name) for name in PLAIN.keys() & decoder.keys()}
    assert lost == {name for name, value in PLAIN.items() if flat[name] != value}


# --- what is refused

REFUSED: dict[str, tuple[str, EagleSpec, str]] = {
    "layers": ("eagle", with_decoder(EAGLE3, num_hidden_layers=2), "2 layers, and its class has one"),
    "captured": ("eagle", replace(EAGLE3, aux_layer_ids=(2, 4)), "its class captures three"),
    "last state": ("eagle", replace(EAGLE3, aux_layer_ids=None), "its class captures three"),
    "hidden_norm": ("sglang", replace(EAGLE3, hidden_norm=False), r"layers\.0\.hidden_norm\.weight, which the draft"),
    "final_norm": ("eagle", replace(EAGLE3, final_norm=False), r"norm\.weight, which the draft lacks"),
    "others": ("eagle", replace(EAGLE3, aux_layer_ids=(1, 4, 5)), r"and its class \[2, 4, 5\]"),
    "p-eagle": (
        "sglang", replace(EAGLE3, embed_tokens="draft", parallel=ParallelDrafting(mask_token_id=3, mask_state=True)),
        "there is no p-eagle in the layout of sglang",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_cannot_hold_is_refused(name: str, target: Path, tmp_path: Path) -> None:
    destination, eagle, reason = REFUSED[name]
    with pytest.raises(LayoutError, match=reason) as error:
        plan_conversion(unified(tmp_path / "source", eagle), to=destination, target=str(target))
    assert "--to unified" in str(error.value)


def test_safeailabs_layout_needs_to_know_the_target(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="pass --target"):
        plan_conversion(unified(tmp_path / "source", EAGLE3), to="eagle")


def test_quantized_weights_go_where_they_are_understood(target: Path, tmp_path: Path) -> None:
    source = ALL["modelopt-fp8"].write(tmp_path / "source")
    plan = partial(plan_conversion, str(source), target=str(target))
    assert refusal_by_vllm(plan(to="vllm").require_draft().spec) is None
    with pytest.raises(LayoutError, match="weights are quantized"):
        plan(to="eagle")
    out = convert_checkpoint(str(source), tmp_path / "out", to="sglang", target=str(target))
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_algo"] == "FP8"
    written, read = load_file(out / "model.safetensors"), ALL["modelopt-fp8"].all_tensors()
    name = "self_attn.k_proj.weight"
    assert written[f"midlayer.{name}"].dtype == torch.float8_e4m3fn
    assert torch.equal(written[f"midlayer.{name}_scale"], read[f"layers.0.{name}_scale"])


def test_sglang_has_no_quantized_fusion(target: Path, tmp_path: Path) -> None:
    tensors = quantized(torch.float16)
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    tensors |= {"fc.weight_scale": torch.tensor(1.0), "fc.input_scale": torch.tensor(1.0)}
    source = foreign(tmp_path / "source", config(**MODELOPT, quantization_config={"quant_algo": "FP8"}), tensors)
    with pytest.raises(LayoutError, match="fc is quantized, and SGLang loads it as a plain matrix"):
        plan_conversion(source, to="sglang", target=str(target))


# --- odd files

Change = Callable[[dict[str, Any], Tensors], object]


def nested(**changes: Any) -> Change:
    """Other keys of `eagle_config`."""
    return lambda values, tensors: values.update(eagle_config=MODELOPT_EAGLE | changes)


def narrow(values: dict[str, Any], tensors: Tensors) -> None:
    """Attention over the hidden state alone, as ModelOpt exports a draft without captured layers."""
    values["eagle_config"] = MODELOPT_EAGLE | {"use_aux_hidden_state": False}
    for name in "qkv":
        key = f"layers.0.self_attn.{name}_proj.weight"
        tensors[key] = tensors[key][:, :H].contiguous()
    del tensors["fc.weight"], tensors["layers.0.hidden_norm.weight"]


def latent(values: dict[str, Any], tensors: Tensors) -> None:
    tensors["layers.0.self_attn.kv_a_proj_with_mqa.weight"] = torch.zeros(24, 2 * H)


def both_norms(values: dict[str, Any], tensors: Tensors) -> None:
    tensors |= {"input_norm.weight": torch.ones(3 * H)} | {f"fc_norm.{i}.weight": torch.ones(H) for i in range(3)}


def unexplained(values: dict[str, Any], tensors: Tensors) -> None:
    tensors.update(quantized(torch.float16))


def unscaled(values: dict[str, Any], tensors: Tensors) -> None:
    tensors.update(quantized(torch.float16))
    values["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    del tensors["layers.0.self_attn.v_proj.weight_scale"]


def setting(**changes: Any) -> Change:
    return lambda values, tensors: values.update(changes)


ODD: dict[str, tuple[Change, str]] = {
    "latent attention": (latent, "EAGLE-3 with latent attention"),
    "no token": (narrow, "the draft never sees the token"),
    "unknown nested key": (nested(tree_depth=4), "eagle_config.tree_depth: 4"),
    "ill-typed nested key": (nested(use_last_layernorm="yes"), "use_last_layernorm is 'yes'"),
    "irregular layers": (nested(next_layer_regular=False), "next_layer_regular"),
    "layers of no known kind": (nested(next_layer_regular={"a": 1}), "next_layer_regular is {'a': 1}"),
    "layers that are not read": (nested(use_aux_hidden_state=False), "and use_aux_hidden_state is false"),
    "two norms before fc": (both_norms, "both input_norm and fc_norm"),
    "a norm that is not there": (setting(fc_norm=True), r"fc_norm\.0\.weight is missing"),
    "parallel without its state": (setting(parallel_drafting=True), "there is no mask_hidden"),
    "fp8 without a config": (unexplained, "no quantization_config"),
    "fp8 without a scale": (unscaled, r"v_proj\.weight_scale"),
    "layers beyond fc": (nested(eagle_aux_hidden_state_layer_ids=[1, 3]), "fc.weight reads 3"),
    "another width": (setting(target_hidden_size=60), "no multiple of the target's width 60"),
    "window of some layers": (setting(layer_types=["sliding_attention"]), "and a window"),
    "rope by layer type": (
        setting(rope_parameters={"full_attention": {"rope_theta": 1e6}}), "different parameters for full_attention",
    ),
    "rope of half a head": (
        setting(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}), "a part of each head",
    ),
    "rope without its factor": (setting(rope_scaling={"type": "linear"}), "factor is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_the_layout_does_not_describe_is_named(name: str, tmp_path: Path) -> None:
    change, problem = ODD[name]
    values, tensors = config(**MODELOPT), eagle3(torch.float16, first="layers.0.", t2d=False)
    change(values, tensors)
    with pytest.raises(DraftkitError, match=problem):
        plan_conversion(foreign(tmp_path, values, tensors))


def test_rope_parameters_without_effect_are_written_down(tmp_path: Path) -> None:
    values, tensors = config(**MODELOPT), eagle3(torch.float16, first="layers.0.", t2d=False)
    setting(rope_scaling={"type": "linear", "factor": 2.0, "beta_slow": 0.5})(values, tensors)
    draft = plan_conversion(foreign(tmp_path, values, tensors)).require_draft()
    assert "without effect: beta_slow 0.5" in {fact.name: fact.note for fact in draft.provenance.facts}["rope_scaling"]


def test_what_says_nothing_of_the_draft_is_written_down(tmp_path: Path) -> None:
    values, tensors = config(**MODELOPT), eagle3(torch.float16, first="layers.0.", t2d=False)
    nested(parallel_draft_step=7)(values, tensors)
    draft = plan_conversion(foreign(tmp_path, values, tensors)).require_draft()
    assert draft.provenance.dropped_config["eagle_config.parallel_draft_step"] == 7


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = eagle3(torch.float16, extra={"layers.0.hidden_norm.weight": (H,)})
    with pytest.raises(FormatError, match="under two names"):
        plan_conversion(foreign(tmp_path, config(**SPECFORGE), tensors), format="specforge")


def test_a_mask_token_must_be_given(target: Path, tmp_path: Path) -> None:
    source = ALL["specforge-peagle"].write(tmp_path / "source")
    plan = partial(plan_conversion, str(source), target=str(target))
    assert plan().reading.plan.missing == (  # type: ignore[union-attr]
        ("mask_token_id", "ask its author for the mask token of the training and pass --set mask_token_id=…"),
    )
    with pytest.raises(LayoutError, match="does not state mask_token_id"):
        plan().require_draft()
    assert eagle_of(plan(overrides={"mask_token_id": "7"})).parallel == ParallelDrafting(
        mask_token_id=7, mask_state=True
    )


@pytest.mark.parametrize("said", [None, False, True])
def test_norm_output_is_about_the_feedback(said: bool | None, target: Path, tmp_path: Path) -> None:
    """In every engine, and in SpecForge since its pull request 879; what older drafts meant can be set."""
    source = foreign(tmp_path, config(**SPECFORGE, norm_output=... if said is None else said), eagle3(torch.float16))
    plan = partial(plan_conversion, source, target=str(target))
    assert (eagle_of(plan()).feedback, eagle_of(plan()).final_norm) == ("post_norm" if said else "pre_norm", True)
    draft = plan(overrides={"final_norm": "false", "feedback": "pre_norm"}).require_draft()
    assert isinstance(draft.spec.architecture, EagleSpec)
    assert (draft.spec.architecture.feedback, draft.spec.architecture.final_norm) == ("pre_norm", False)
    assert "norm.weight" not in draft.tensors


# Nested ids number layer outputs, but for files whose last id is the target's number of layers.
@pytest.mark.parametrize(
    ("key", "said", "ids", "note"),
    [
        ("eagle_config", [1, 3, 4], (2, 4, 5), "layer outputs"),
        ("eagle_config", [5, 6, 7], (6, 7, 8), "layer outputs"),
        ("eagle_config", [4, 6, 8], (4, 6, 8), "states, as layer 8 has no output"),
        ("eagle_aux_hidden_state_layer_ids", [1, 3, 4], (1, 3, 4), ""),
    ],
)
def test_layer_ids_by_the_key_they_stand_under(
    key: str, said: list[int], ids: tuple[int, ...], note: str, target: Path, tmp_path: Path
) -> None:
    stated: object = {"eagle_aux_hidden_state_layer_ids": said} if key == "eagle_config" else said
    source = foreign(tmp_path, config(**SPECFORGE | {key: stated}), eagle3(torch.float16))
    conversion = plan_conversion(source, target=str(target))
    assert eagle_of(conversion).aux_layer_ids == ids
    fact = next(f for f in conversion.require_draft().provenance.facts if f.name == "aux_layer_ids")
    assert fact.origin == "stated"
    assert note in fact.note


# What each trainer makes of the rope in its config.
LLAMA3: dict[str, object] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, tuple[str, dict[str, Any], float, dict[str, object] | None]] = {
    "SafeAILab": ("eagle3", {"rope_theta": 5e5}, 5e5, None),
    "SafeAILab, scaled": ("eagle3", {"rope_theta": 5e5, "rope_scaling": LINEAR}, 10000.0, LINEAR),
    "SpecForge": ("specforge", {"rope_theta": 5e5}, 5e5, None),
    "SpecForge, scaled": ("specforge", {"rope_theta": 5e5, "rope_scaling": LINEAR}, 5e5, LINEAR),
    "SpecForge, both spellings": (
        "specforge",
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3,
    ),
    "SpecForge, silent": ("specforge", {}, 10000.0, None),
    "AngelSlim": ("angelslim", {"rope_theta": 1e6}, 10000.0, None),
    "AngelSlim, scaled": ("angelslim", {"rope_theta": 1e6, "rope_scaling": LINEAR}, 10000.0, LINEAR),
    "AngelSlim, multimodal": (
        "angelslim", {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}, 1e6,
        MULTIMODAL,
    ),
    "ModelOpt": ("modelopt-megatron", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_what_the_trainer_made_of_it(name: str, target: Path, tmp_path: Path) -> None:
    trainer, keys, base, scaling = ROPES[name]
    source = foreign(tmp_path, config(**SPECFORGE, **keys), eagle3(torch.float16))
    rope = eagle_of(plan_conversion(source, target=str(target), format=trainer)).decoder.rope
    assert rope == Rope(base=base, declared_base=keys.get("rope_theta"), scaling=scaling, max_position_embeddings=2048)


def test_early_stop_signals_are_cut_off(target: Path, tmp_path: Path) -> None:
    published = ALL["angelslim-early-stop"]
    source = str(published.write(tmp_path / "source"))
    with pytest.raises(LayoutError, match=r"3 rows of fc\.weight"):
        convert_checkpoint(source, tmp_path / "out", target=str(target))
    out = convert_checkpoint(source, tmp_path / "out", target=str(target), allow_lossy=True)
    assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], published.all_tensors()["fc.weight"][:H])
    assert read_draft(out).provenance.losses


@pytest.mark.parametrize("name", ["specforge-peagle", "automodel-peagle"])
def test_a_parallel_draft_is_what_vllm_asks_for(name: str, target: Path, tmp_path: Path) -> None:
    published = ALL[name]
    source = str(published.write(tmp_path / "source"))
    out = convert_checkpoint(source, tmp_path / "out", target=str(target), overrides=published.overrides)
    written, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["ptd_token_id"] == 300
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert written["num_aux_hidden_states"] == 3
    assert tensors["mask_hidden"].numel() == 3 * H
    assert "embed_tokens.weight" in tensors


# --- quantized weights in draftkit's own models

SCALES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, list[int] | None]] = {
    "tensor": (lambda weight: torch.tensor(0.5), "weight_scale", None),
    "rows": (lambda weight: torch.rand(len(weight)), "weight_scale", None),
    "row matrix": (lambda weight: torch.rand(len(weight), 1), "weight_scale", None),
    "blocks": (lambda weight: torch.rand([-(-n // 48) for n in weight.shape]), "weight_scale_inv", [48, 48]),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_quantized_draft_computes_with_its_scales(name: str, tmp_path: Path) -> None:
    make, suffix, block = SCALES[name]
    tensors = eagle3(torch.float32, first="layers.0.", t2d=False)
    plain = dict(tensors)
    torch.manual_seed(2)
    for key in [key for key in tensors if key.startswith("layers.0.") and tensors[key].ndim == 2]:
        tensors[key] = tensors[key].to(torch.float8_e4m3fn)
        scale = tensors[key.replace("weight", suffix)] = make(tensors[key])
        factor = scale
        if name == "rows":
            factor = scale[:, None]
        if block is not None:
            rows, columns = tensors[key].shape
            factor = scale.repeat_interleave(48, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
        plain[key] = tensors[key].float() * factor
    settings_of_fp8 = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    values = config(**MODELOPT)
    pairs = ((values | {"quantization_config": settings_of_fp8}, tensors), (values, plain))
    folders = [foreign(tmp_path / str(i), *pair) for i, pair in enumerate(pairs)]
    target = pico.llama()
    tokens, positions = torch.arange(5)[None], torch.arange(5)[None]
    hidden = torch.randn(1, 5, H, generator=torch.Generator().manual_seed(1))
    outputs = []
    for folder in folders:
        out = convert_checkpoint(folder, Path(folder) / "unified")
        draft: Draft = read_draft(out)
        model = load_eagle(draft, target, attention="eager")
        outputs.append(model.logits(model(tokens, hidden, positions).head_input))
    torch.testing.assert_close(outputs[0], outputs[1])
