"""The layout: specs survive JSON, schemas are the published ones, a folder that does not fit its spec is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from draftkit.convert.unified import REFUSED_ARCHITECTURE, config_of, write_draft
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import FormatError, LayoutError
from draftkit.io.dtypes import torch_dtype
from draftkit.io.handles import TensorHandle
from draftkit.io.jsonfile import read_object
from draftkit.layout.architecture import ParallelDrafting, Rope
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.causal_lm import CausalLMSpec, TargetFeatures
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.layout.provenance import FactOrigin, InputFile, Provenance
from draftkit.layout.spec import DraftSpec

EAGLE, EAGLE3 = pico.EAGLE_SPEC, pico.EAGLE3_SPEC
DECODER = EAGLE.decoder
SCALED = Rope(
    base=500000.0,
    declared_base=10000.0,
    scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    max_position_embeddings=131072,
)
P_EAGLE = replace(
    EAGLE3,
    decoder=replace(DECODER, num_hidden_layers=2, rope=SCALED),
    target_hidden_size=48,
    aux_layer_ids=(0, 2, 6, 9),
    feature_norm="per_layer",
    norm_before_residual=True,
    feedback="post_norm",
    logit_scale=0.5,
    embed_tokens="draft",
    parallel=ParallelDrafting(mask_token_id=319, mask_state=True),
)
LM_CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LM = CausalLMSpec(config=LM_CONFIG, vocab_size=500, parallel=None, target_features=None)
PARD = replace(LM, parallel=ParallelDrafting(mask_token_id=7, mask_state=False))
PARD2 = replace(
    PARD, target_features=TargetFeatures(layer_ids=(-1, -8, -16), size=192, scale=0.02, projection_bias=True)
)
MLP = MlpSpeculatorSpec(
    target_hidden_size=64,
    inner_size=32,
    vocab_size=500,
    num_heads=4,
    tied=False,
    scale_input=True,
    top_k_per_head=(4, 3, 2, 2),
    num_candidates=5,
)

ARCHITECTURES = {
    "eagle": EAGLE,
    "eagle3": EAGLE3,
    "p-eagle": P_EAGLE,
    "draft-model": LM,
    "pard": PARD,
    "pard-2": PARD2,
    "mlp-speculator": MLP,
    "mlp-speculator, tied": replace(MLP, tied=True),
}
SPECS = {name: DraftSpec(architecture=a, dtype="BF16") for name, a in ARCHITECTURES.items()}
PROVENANCE = Provenance(
    source="org/draft",
    source_revision="0123abc",
    format="eagle",
    files=(InputFile(name="config.json", size=3, sha256="00"),),
    target="org/target",
    target_revision=None,
    facts=(FactOrigin(name="rope_theta", value="10000.0", origin="format default", note="said nothing"),),
    dropped_config={"use_cache": True},
    losses=(),
    draftkit_version="0.1.0",
)


def spec_of(architecture: Any, **changes: object) -> DraftSpec:
    return DraftSpec(architecture=replace(architecture, **changes), dtype="F16")


def with_decoder(eagle: EagleSpec, **changes: object) -> DraftSpec:
    return spec_of(eagle, decoder=replace(eagle.decoder, **changes))


def through_json(spec: DraftSpec) -> DraftSpec:
    return DraftSpec.from_dict(json.loads(json.dumps(spec.to_dict())), "a test")


# --- specs


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_survives_json(name: str) -> None:
    spec = SPECS[name]
    assert DraftSpec.from_dict(spec.to_dict(), "a test") == spec
    assert through_json(spec) == spec
    assert spec.method == name.split(",")[0]


reals = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | reals | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(max_size=5), json_values, max_size=4)
ropes = st.builds(Rope, base=reals, declared_base=st.none() | reals, scaling=st.none() | objects)
sizes = st.integers(1, 1000)
layer_ids = st.none() | st.sets(st.integers(0, 99), min_size=1).map(lambda ids: tuple(sorted(ids)))
decoders = st.builds(
    Decoder, num_hidden_layers=sizes, rms_norm_eps=reals, rope=ropes, sliding_window=st.none() | sizes
) | st.builds(
    Decoder, num_hidden_layers=sizes, rms_norm_eps=reals, rope=ropes, sliding_window=sizes, sink_tokens=sizes
)  # fmt: skip
eagles = st.builds(EagleSpec, decoder=decoders, target_hidden_size=sizes, aux_layer_ids=layer_ids, logit_scale=reals)
features = st.builds(TargetFeatures, scale=reals)
specs = st.builds(
    DraftSpec,
    architecture=eagles
    | st.builds(CausalLMSpec, config=objects, target_features=st.none() | features)
    | st.builds(MlpSpeculatorSpec, num_heads=sizes),
    dtype=st.sampled_from(["F64", "F32", "F16", "BF16"]),
)


@pytest.mark.parametrize(("window", "sink_tokens"), [(0, 0), (None, 4), (8, -1)])
def test_a_window_of_nothing_and_first_tokens_without_a_window_are_refused(
    window: int | None, sink_tokens: int
) -> None:
    with pytest.raises(LayoutError, match="sliding_window is 0" if window == 0 else f"sink_tokens is {sink_tokens}"):
        with_decoder(EAGLE3, sliding_window=window, sink_tokens=sink_tokens)


@examples(60)
@given(specs)
def test_any_spec_survives_json(spec: DraftSpec) -> None:
    assert through_json(spec) == spec


def facts_of(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every fact in a spec's dict, nested records before their own facts."""
    for name, value in data.items():
        yield (*path, name)
        if name in ("decoder", "rope", "parallel", "target_features") and value is not None:
            yield from facts_of(value, (*path, name))


def owner(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path[:-1]:
        data = data[name]
    return data


FACTS = [
    pytest.param(name, path, id=f"{name}: {'.'.join(path)}")
    for name in ("p-eagle", "pard-2", "mlp-speculator")
    for path in facts_of(SPECS[name].to_dict()["architecture"])  # type: ignore[arg-type]
    if path[-1] not in ("head_ids", "full_attention_layers")  # younger than some folders, which may lack them
]


@pytest.mark.parametrize(("name", "path"), FACTS)
def test_every_fact_must_be_there_and_of_its_type(name: str, path: tuple[str, ...]) -> None:
    missing, mistyped = SPECS[name].to_dict(), copy.deepcopy(SPECS[name].to_dict())
    del owner(missing["architecture"], path)[path[-1]]  # type: ignore[arg-type]
    owner(mistyped["architecture"], path)[path[-1]] = 1j  # type: ignore[arg-type]
    dotted = ".".join(path)
    for data, problem in ((missing, f"{dotted}: missing"), (mistyped, f"{dotted}: 1j is not ")):
        with pytest.raises(LayoutError) as error:
            DraftSpec.from_dict(data, "config.json")
        assert problem in str(error.value)


def test_all_wrong_facts_are_listed_at_once() -> None:
    data: Any = SPECS["p-eagle"].to_dict()
    architecture = data["architecture"]
    del architecture["vocab_size"], architecture["decoder"]["rope"]["base"]
    architecture |= {"color": "red", "final_norm": 1, "feedback": "sideways", "aux_layer_ids": [2, "6"]}
    architecture["decoder"] |= {"head_dim": True, "rms_norm_eps": "1e-5"}
    architecture["parallel"] = "yes"
    with pytest.raises(LayoutError) as error:
        DraftSpec.from_dict(data, "out/config.json")
    message = str(error.value)
    for problem in (
        "vocab_size: missing",
        "decoder.rope.base: missing",
        "color: unknown",
        "final_norm: 1 is not true or false",
        "feedback: 'sideways' is not one of ['pre_norm', 'post_norm']",
        "aux_layer_ids[1]: '6' is not a whole number",
        "decoder.head_dim: True is not a whole number",
        "decoder.rms_norm_eps: '1e-5' is not a number",
        "parallel: 'yes' is not an object",
    ):
        assert f"    {problem}\n" in message + "\n"
    assert message.count("\n    ") == 9
    assert "out/config.json" in message


@pytest.mark.parametrize(
    "change",
    [{"kind": "dflash"}, {"kind": []}, {"dtype": "F7"}, {"dtype": None}, {"mood": "good"}, {"architecture": [1]}],
    ids=str,
)
def test_what_is_no_spec_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        DraftSpec.from_dict(SPECS["mlp-speculator"].to_dict() | change, "a test")


# --- tensor schemas: counts are those of Appendix A of the format notes, less `t2d`, which the layout does not keep


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (spec_of(EAGLE), 10),
        (spec_of(EAGLE, embed_tokens="target"), 9),
        (spec_of(EAGLE, fusion_bias=True), 11),
        (spec_of(EAGLE, fusion_bias=True, decoder=replace(DECODER, qkv_bias=True)), 14),
        (with_decoder(EAGLE, num_hidden_layers=2), 19),
        (spec_of(EAGLE3), 14),
        (spec_of(EAGLE3, embed_tokens="draft"), 15),
        (spec_of(EAGLE3, draft_vocab_size=320), 13),
        (spec_of(EAGLE3, feature_norm="per_layer"), 17),
        (spec_of(EAGLE3, feature_norm="joint"), 15),
        (with_decoder(EAGLE3, qk_norm=True), 16),
        (with_decoder(EAGLE3, qkv_bias=True, output_bias=True, mlp_bias=True), 21),
        (spec_of(P_EAGLE, feature_norm="none"), 25),
        (spec_of(P_EAGLE), 29),
        (spec_of(MLP), 20),
        (spec_of(MLP, num_heads=3), 15),
        (spec_of(MLP, tied=True), 6),
        (spec_of(MLP, tied=True, num_heads=1), 5),
    ],
    ids=lambda value: value.method if isinstance(value, DraftSpec) else str(value),
)
def test_tensor_counts(spec: DraftSpec, count: int) -> None:
    assert len(spec.tensors()) == count


def shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    return {name: schema.shape for name, schema in spec.tensors().items()}


def test_p_eagle_tensors() -> None:
    layer = {
        "self_attn.o_proj.weight": (64, 64),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
    }
    wide = {f"self_attn.{name}_proj.weight": (rows, 128) for name, rows in (("q", 64), ("k", 32), ("v", 32))}
    narrow = {name: (rows, 64) for name, (rows, _) in wide.items()}
    assert shapes(SPECS["p-eagle"]) == {
        **{f"layers.0.{name}": shape for name, shape in (layer | wide | {"hidden_norm.weight": (64,)}).items()},
        **{f"layers.1.{name}": shape for name, shape in (layer | narrow).items()},
        **{f"fc_norm.{index}.weight": (48,) for index in range(4)},
        "fc.weight": (64, 4 * 48),
        "norm.weight": (64,),
        "embed_tokens.weight": (320, 64),
        "lm_head.weight": (128, 64),
        "mask_hidden": (1, 1, 4 * 48),
        "d2t": (128,),
    }


def test_eagle_layer_0_has_one_norm() -> None:
    found = shapes(with_decoder(EAGLE, num_hidden_layers=2))
    norms = [name for name in found if "norm" in name]
    assert sorted(norms) == [
        "layers.0.post_attention_layernorm.weight",
        "layers.1.input_layernorm.weight",
        "layers.1.post_attention_layernorm.weight",
    ]
    assert found["fc.weight"] == (64, 128)
    assert found["layers.0.self_attn.q_proj.weight"] == found["layers.1.self_attn.q_proj.weight"] == (64, 64)


def test_mlp_speculator_tensors() -> None:
    untied, tied = shapes(SPECS["mlp-speculator"]), shapes(SPECS["mlp-speculator, tied"])
    assert tied == {
        "speculator.emb.0.weight": (500, 32),
        "speculator.head.0.weight": (500, 32),
        "speculator.ln.0.weight": (32,),
        "speculator.ln.0.bias": (32,),
        "speculator.proj.0.weight": (32, 64),
        "speculator.proj.1.weight": (32, 32),
    }
    assert tied.items() <= untied.items()
    assert untied["speculator.proj.3.weight"] == (32, 32)
    assert untied["speculator.emb.3.weight"] == untied["speculator.head.3.weight"] == (500, 32)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32},
        {"model_type": "mistral", "num_key_value_heads": 4},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
        {"model_type": "phi3", "pad_token_id": 0},
    ],
    ids=lambda config: "-".join(config),
)
def test_causal_lm_tensors_are_those_of_transformers(config: dict[str, object]) -> None:
    full = LM_CONFIG | config
    values = dict(full)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    assert shapes(spec_of(LM, config=full)) == {name: tuple(t.shape) for name, t in model.state_dict().items()}


def test_a_tied_head_may_be_left_out() -> None:
    tied = spec_of(LM, config=LM_CONFIG | {"tie_word_embeddings": True}).tensors()
    assert [name for name, schema in tied.items() if not schema.required] == ["lm_head.weight"]
    assert all(schema.required for schema in SPECS["draft-model"].tensors().values())


def test_pard_2_adds_a_projection() -> None:
    extra = shapes(SPECS["pard-2"]).items() - shapes(SPECS["pard"]).items()
    assert dict(extra) == {"target_proj.weight": (64, 192), "target_proj.bias": (64,)}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"model_type": None}, "model_type"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
    ],
    ids=str,
)
def test_a_config_that_describes_no_causal_lm_is_an_error(config: dict[str, object], problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        spec_of(LM, config=LM_CONFIG | config).tensors()


# --- config.json for engines


def test_eagle3_engine_config() -> None:
    assert spec_of(EAGLE3).engine_config() == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "draft_vocab_size": 128,
        "target_hidden_size": 64,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "logit_scale": 1.0,
        "eagle_config": {"use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "num_aux_hidden_states": 3,
        "dtype": "float16",
        "torch_dtype": "float16",
    }


def test_p_eagle_engine_config() -> None:
    plain, parallel = SPECS["eagle3"].engine_config(), SPECS["p-eagle"].engine_config()
    assert {key: value for key, value in parallel.items() if key not in plain or value != plain[key]} == {
        "num_hidden_layers": 2,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": SCALED.scaling,
        "rope_parameters": {**(SCALED.scaling or {}), "rope_theta": 500000.0},
        "target_hidden_size": 48,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "logit_scale": 0.5,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 6, 9],
        "num_aux_hidden_states": 4,
        "ptd_token_id": 319,
    }


def test_eagle_engine_config() -> None:
    eagle3_only = {
        "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
        "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states",
    }  # fmt: skip
    eagle, eagle3 = spec_of(EAGLE).engine_config(), spec_of(EAGLE3).engine_config()
    common = {key: value for key, value in eagle3.items() if key not in eagle3_only}
    assert eagle == common | {"architectures": ["LlamaForCausalLM"], "qkv_bias": False}
    biased = with_decoder(EAGLE, qkv_bias=True).engine_config()
    assert (biased["qkv_bias"], biased["attention_bias"]) == (True, False)
    assert "bias" not in biased  # means attention bias to engines


@pytest.mark.parametrize("rope", [DECODER.rope, SCALED], ids=["default", "llama3"])
def test_transformers_reads_the_rope_that_is_meant(rope: Rope) -> None:
    config = LlamaConfig.from_dict(with_decoder(EAGLE3, rope=rope).engine_config())
    assert config.rope_parameters == {"rope_type": "default", **(rope.scaling or {}), "rope_theta": rope.base}
    assert config.max_position_embeddings == rope.max_position_embeddings


def test_other_engine_configs() -> None:
    assert SPECS["pard"].engine_config() == LM_CONFIG | {
        "pard_token": 7, "dtype": "bfloat16", "torch_dtype": "bfloat16"
    }  # fmt: skip
    mlp = SPECS["mlp-speculator"].engine_config()
    assert (mlp["n_predict"], mlp["top_k_tokens_per_head"], mlp["tie_weights"]) == (4, [4, 3, 2, 2], False)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of(EAGLE), None),
        (with_decoder(EAGLE, qkv_bias=True), None),
        (spec_of(EAGLE, fusion_bias=True), "fc.bias"),
        (spec_of(EAGLE, input_norm=True), "norms"),
        (spec_of(EAGLE, concatenation="hidden_embedding"), "embedding first"),
        (spec_of(EAGLE, draft_vocab_size=128, lm_head="draft"), "whole vocabulary"),
        (spec_of(EAGLE, lm_head="draft"), "target's head"),
        (with_decoder(EAGLE, sliding_window=64), "sliding window"),
        (with_decoder(EAGLE, hidden_act="gelu"), "silu"),
        (spec_of(EAGLE3), None),
        (spec_of(P_EAGLE), None),
        (with_decoder(EAGLE3, qkv_bias=True, output_bias=True), None),
        (with_decoder(EAGLE3, qkv_bias=True), "bias"),
        (with_decoder(EAGLE3, sliding_window=64), None),
        (with_decoder(EAGLE3, sliding_window=64, sink_tokens=4), "first tokens"),
        (spec_of(PARD, sliding_window=64), "a draft model with a window"),
        (with_decoder(EAGLE3, num_hidden_layers=2, sliding_window=64, full_attention_layers=(1,)), "one group"),
        (with_decoder(EAGLE3, qk_norm=True), None),
        (with_decoder(EAGLE3, qk_norm=True, qkv_bias=True), None),
        (with_decoder(EAGLE3, qk_norm=True, qkv_bias=True, output_bias=True), "o_proj"),
        (with_decoder(EAGLE3, qk_norm=True, mlp_bias=True), "MLP"),
        (with_decoder(EAGLE3, mlp_bias=True), None),
        (spec_of(EAGLE3, aux_layer_ids=None), "last state"),
        (spec_of(P_EAGLE, parallel=ParallelDrafting(mask_token_id=7, mask_state=False)), "mask_hidden"),
        (spec_of(EAGLE3, final_norm=False), "norms"),
        (spec_of(EAGLE3, concatenation="hidden_embedding"), "embedding first"),
        (spec_of(PARD), None),
        (spec_of(PARD2), "PARD-2"),
        (spec_of(MLP), "mlp-speculator"),
    ],
    ids=lambda value: value.method if isinstance(value, DraftSpec) else str(value),
)
def test_vllm_refuses_what_it_would_run_wrongly(spec: DraftSpec, reason: str | None) -> None:
    found, config = refusal_by_vllm(spec), config_of(spec, PROVENANCE)
    if reason is None:
        assert found is None
        assert config.get("architectures") == spec.engine_config().get("architectures")
    else:
        assert reason in (found or "")
        assert config["architectures"] == [REFUSED_ARCHITECTURE]


# --- folders


def zeros(spec: DraftSpec) -> dict[str, torch.Tensor]:
    """Tensors that fit the spec."""
    return {
        name: torch.zeros(s.shape, dtype=torch_dtype(spec.dtype if spec.dtype in s.dtypes else s.dtypes[0]))
        for name, s in spec.tensors().items()
    }


def draft_of(spec: DraftSpec, tensors: Mapping[str, torch.Tensor]) -> Draft:
    dtypes = {torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32"}
    handles = {
        name: TensorHandle(name, dtypes[t.dtype], tuple(t.shape), Path(), lambda size, n=t.nbytes: iter([bytes(n)]))
        for name, t in tensors.items()
    }
    return Draft(Path(), spec, PROVENANCE, handles)


def misfit(spec: DraftSpec) -> dict[str, torch.Tensor]:
    """The tensors of an EAGLE-3 spec with one missing, one too many, one of another shape and one of another dtype."""
    tensors = zeros(spec)
    del tensors["norm.weight"]
    tensors["fc.bias"] = torch.zeros(64, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:127].clone()
    tensors["d2t"] = tensors["d2t"].int()
    return tensors


MISFITS = (
    "missing: norm.weight [64]",
    "unexpected: fc.bias [64]",
    "wrong shape: lm_head.weight is [127, 64], expected [128, 64]",
    "wrong dtype: d2t is I32, expected one of I64",
)


@pytest.mark.parametrize("name", SPECS)
def test_a_folder_reads_back(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    write_draft(tmp_path / "out", draft_of(spec, zeros(spec)))
    draft = read_draft(tmp_path / "out")
    assert (draft.spec, draft.provenance) == (spec, PROVENANCE)
    assert set(draft.tensors) == set(spec.tensors())
    assert is_unified(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("draftkit")["spec"] == spec.to_dict()
    assert config["dtype"] == "bfloat16"


def test_what_does_not_fit_is_listed_and_not_written(tmp_path: Path) -> None:
    spec = SPECS["eagle3"]
    with pytest.raises(LayoutError) as error:
        write_draft(tmp_path / "out", draft_of(spec, misfit(spec)))
    assert all(problem in str(error.value) for problem in MISFITS)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_not_read(tmp_path: Path) -> None:
    spec = SPECS["eagle3"]
    write_draft(tmp_path / "out", draft_of(spec, zeros(spec)))
    save_file(misfit(spec), tmp_path / "out" / "model.safetensors")
    with pytest.raises(LayoutError) as error:
        read_draft(tmp_path / "out")
    assert all(problem in str(error.value) for problem in MISFITS)
    assert str(tmp_path / "out") in str(error.value)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (None, "no draftkit block"),
        ({"spec": SPECS["eagle"].to_dict()}, "no draftkit block"),
        ({"spec": [], "provenance": {}}, "no draftkit block"),
        ({"spec": SPECS["eagle"].to_dict(), "provenance": {"source": 3}}, "source: 3 is not text"),
    ],
    ids=["absent", "incomplete", "ill-typed", "bad provenance"],
)
def test_a_damaged_block_is_an_error(block: object, problem: str, tmp_path: Path) -> None:
    pico.write_checkpoint(tmp_path, {"draftkit": block}, {})
    with pytest.raises(LayoutError) as error:
        read_draft(tmp_path)
    assert problem in str(error.value)


def test_a_json_file_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse: no disk is used, and reading it would fail for lack of memory
    with pytest.raises(FormatError, match="1,099,511,627,776 bytes"):
        read_object(tmp_path / "config.json")
