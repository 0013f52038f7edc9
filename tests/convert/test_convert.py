"""Conversion: every tensor keeps its bytes, every fact has the right value and origin, every config key has a fate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PretrainedConfig

from draftkit.convert.api import convert_checkpoint, inspect_checkpoint, plan_conversion
from draftkit.convert.facts import HARMLESS_KEYS, Facts
from draftkit.convert.plan import Plan
from draftkit.errors import DraftkitError, FormatError, LayoutError
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import read_draft

Tensors = dict[str, torch.Tensor]

EAGLE, EAGLE3 = pico.EAGLE_SPEC, pico.EAGLE3_SPEC


def with_decoder(eagle: EagleSpec, **changes: Any) -> EagleSpec:
    return replace(eagle, decoder=replace(eagle.decoder, **changes))


def with_rope(eagle: EagleSpec, **changes: Any) -> EagleSpec:
    return with_decoder(eagle, rope=replace(eagle.decoder.rope, **changes))


# Fact → value and origin, of the plain cases.
COMMON_FACTS = {
    "hidden_size": ("64", "stated"),
    "num_attention_heads": ("4", "stated"),
    "intermediate_size": ("96", "stated"),
    "num_hidden_layers": ("1", "stated"),
    "num_key_value_heads": ("2", "stated"),
    "head_dim": ("16", "from tensors"),
    "hidden_act": ("silu", "stated"),
    "rms_norm_eps": ("1e-05", "stated"),
    "qkv_bias": ("False", "from tensors"),
    "output_bias": ("False", "from tensors"),
    "mlp_bias": ("False", "from tensors"),
    "rope_theta": ("10000.0", "format default"),
    "rope_scaling": ("default", "format default"),
    "max_position_embeddings": ("2048", "stated"),
    "vocab_size": ("320", "stated"),
    "dtype": ("F16", "from tensors"),
    "qk_norm": ("False", "from tensors"),
    "sliding_window": ("None", "format default"),
    "full_attention_layers": ("[]", "format default"),
    "sink_tokens": ("0", "format default"),
    "concatenation": ("embedding_hidden", "format default"),
}
EAGLE_FACTS = COMMON_FACTS | {
    "fusion_bias": ("False", "from tensors"),
    "embed_tokens": ("draft", "from tensors"),
    "lm_head": ("target", "format default"),
    "draft_vocab_size": ("320", "format default"),
    "target_hidden_size": ("64", "format default"),
    "aux_layer_ids": ("None", "format default"),
    "token_entry": ("fusion", "format default"),
    "feature_norm": ("none", "format default"),
    "embedding_norm": ("False", "format default"),
    "hidden_norm": ("False", "format default"),
    "input_norm": ("False", "format default"),
    "norm_before_residual": ("False", "format default"),
    "final_norm": ("False", "format default"),
    "feedback": ("pre_norm", "format default"),
    "logit_scale": ("1.0", "format default"),
    "parallel": ("None", "format default"),
}
EAGLE3_FACTS = COMMON_FACTS | {
    "draft_vocab_size": ("128", "stated"),
    "target_hidden_size": ("64", "format default"),
    "aux_layer_ids": ("[2, 4, 5]", "from target"),
    "embed_tokens": ("target", "from tensors"),
    "lm_head": ("draft", "from tensors"),
    "norm_before_residual": ("False", "format default"),
    "feature_norm": ("none", "from tensors"),
    "feedback": ("pre_norm", "format default"),
    "logit_scale": ("1.0", "format default"),
    "token_entry": ("attention", "format default"),
    "fusion_bias": ("False", "format default"),
    "embedding_norm": ("True", "format default"),
    "hidden_norm": ("True", "format default"),
    "input_norm": ("False", "format default"),
    "final_norm": ("True", "format default"),
    "parallel": ("None", "from tensors"),
}


@dataclass(frozen=True)
class Case:
    """A published checkpoint, and what becomes of it. None removes a config key, `null` writes JSON's null."""

    spec: EagleSpec
    config: dict[str, Any] = field(default_factory=dict)
    null: tuple[str, ...] = ()
    tensors: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # tensors that the layout does not keep
    target: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, *, safetensors: bool = False) -> tuple[Path, Tensors]:
        """The checkpoint folder, and its tensors."""
        eagle3 = self.spec.method == "eagle3"
        tensors = (pico.eagle3_tensors if eagle3 else pico.eagle_tensors)(**self.tensors)
        config = (pico.eagle3_config if eagle3 else pico.eagle_config)(**self.config) | dict.fromkeys(self.null)
        return pico.write_checkpoint(folder, config, tensors, safetensors=safetensors), tensors


BIASED = replace(EAGLE, fusion_bias=True)
BIAS_FACT = {"fusion_bias": ("True", "from tensors")}
CASES = {
    # EAGLE-1, with the quirks of the published configs (`eagle/train/*.json` of SafeAILab/EAGLE)
    "eagle": Case(EAGLE),
    "eagle, bias absent": Case(EAGLE, config={"bias": None}),
    "eagle, bias true": Case(EAGLE, config={"bias": True}),
    "eagle, fc.bias": Case(BIASED, tensors={"bias": True}, facts=BIAS_FACT),
    "eagle, fc.bias, bias absent": Case(BIASED, config={"bias": None}, tensors={"bias": True}, facts=BIAS_FACT),
    "eagle, fc.bias, bias true": Case(BIASED, config={"bias": True}, tensors={"bias": True}, facts=BIAS_FACT),
    "eagle, no embed_tokens": Case(
        replace(EAGLE, embed_tokens="target"),
        tensors={"embed": False},
        facts={"embed_tokens": ("target", "from tensors")},
    ),
    "eagle, qwen2": Case(
        with_decoder(EAGLE, qkv_bias=True),
        config={
            "qkv_bias": True, "model_type": "qwen2", "attention_dropout": 0.0, "sliding_window": 131072,
            "use_sliding_window": False, "max_window_layers": 28,
        },
        tensors={"qkv_bias": True},
        facts={"qkv_bias": ("True", "from tensors")},
    ),
    "eagle, two layers": Case(
        with_decoder(EAGLE, num_hidden_layers=2),
        config={"num_hidden_layers": 2},
        tensors={"layers": 2},
        facts={"num_hidden_layers": ("2", "stated")},
    ),
    "eagle, layers misstated": Case(
        EAGLE, config={"num_hidden_layers": 32}, facts={"num_hidden_layers": ("1", "from tensors")}
    ),
    "eagle, layers not stated": Case(
        EAGLE, config={"num_hidden_layers": None}, facts={"num_hidden_layers": ("1", "from tensors")}
    ),
    "eagle, vicuna 7B": Case(
        with_decoder(BIASED, num_key_value_heads=4),
        config={"bias": None, "num_key_value_heads": None},
        tensors={"bias": True, "kv_heads": 4},
        facts=BIAS_FACT | {"num_key_value_heads": ("4", "format default")},
    ),
    "eagle, vicuna 33B": Case(
        EAGLE,
        config={"max_position_embeddings": None, "max_sequence_length": 2048},
        facts={"max_position_embeddings": ("2048", "format default")},
    ),
    "eagle, llama 2": Case(EAGLE, config={"pretraining_tp": 1}, null=("rope_scaling",)),
    "eagle, llama 3": Case(
        with_rope(EAGLE, base=500000.0, declared_base=500000.0),
        config={"rope_theta": 500000.0},
        facts={"rope_theta": ("500000.0", "stated")},
    ),
    "eagle, rope_parameters": Case(
        with_rope(EAGLE, base=1000000.0, declared_base=1000000.0),
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        facts={"rope_theta": ("1000000.0", "stated"), "rope_scaling": ("default", "stated")},
    ),
    # The reference builds its linear and dynamic rope without the config's base.
    "eagle, linear rope": Case(
        with_rope(EAGLE, declared_base=500000.0, scaling={"factor": 2.0, "rope_type": "linear"}),
        config={"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        facts={"rope_scaling": ("linear", "stated")},
    ),
    "eagle, mixtral": Case(EAGLE, config={"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}),
    "eagle, bare config": Case(
        with_decoder(EAGLE, rms_norm_eps=1e-6),
        config={"hidden_act": None, "rms_norm_eps": None},
        facts={"hidden_act": ("silu", "format default"), "rms_norm_eps": ("1e-06", "format default")},
    ),
    # EAGLE-3
    "eagle3": Case(EAGLE3, dropped=("t2d",)),
    "eagle3, embed_tokens": Case(
        replace(EAGLE3, embed_tokens="draft"),
        tensors={"embed": True},
        facts={"embed_tokens": ("draft", "from tensors")},
        dropped=("t2d",),
    ),
    "eagle3, narrow target": Case(
        replace(EAGLE3, embed_tokens="draft", target_hidden_size=32),
        config={"target_hidden_size": 32},
        tensors={"embed": True, "target_hidden": 32},
        facts={"embed_tokens": ("draft", "from tensors"), "target_hidden_size": ("32", "stated")},
        dropped=("t2d",),
        target={"hidden_size": 32},
    ),
    "eagle3, full vocabulary": Case(
        replace(EAGLE3, draft_vocab_size=320),
        config={"draft_vocab_size": 320},
        tensors={"draft_vocabulary": 320},
        facts={"draft_vocab_size": ("320", "stated")},
        dropped=("t2d", "d2t"),
    ),
    "eagle3, layers misstated": Case(
        EAGLE3,
        config={"num_hidden_layers": 40},
        facts={"num_hidden_layers": ("1", "from tensors")},
        dropped=("t2d",),
    ),
    "eagle3, deep target": Case(
        replace(EAGLE3, aux_layer_ids=(2, 16, 29)),
        facts={"aux_layer_ids": ("[2, 16, 29]", "from target")},
        dropped=("t2d",),
        target={"num_hidden_layers": 32},
    ),
    "eagle3, bias": Case(EAGLE3, config={"bias": True}, dropped=("t2d",)),
}  # fmt: skip


def plan_of(source: Path, target: Path | None = None) -> Plan:
    reading = plan_conversion(str(source), target=target and str(target)).reading
    assert reading is not None
    return reading.plan


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("safetensors", [False, True], ids=["bin", "safetensors"])
@pytest.mark.parametrize("name", CASES)
def test_a_published_checkpoint_converts(name: str, safetensors: bool, tmp_path: Path) -> None:
    case = CASES[name]
    source, tensors = case.write(tmp_path / "source", safetensors=safetensors)
    target = str(pico.save_target_config(tmp_path / "target", **case.target))
    draft = read_draft(convert_checkpoint(str(source), tmp_path / "out", target=target))

    assert draft == read_draft(tmp_path / "out")
    assert draft.spec.architecture == case.spec
    assert draft.spec.dtype == "F16"

    written = load_file(tmp_path / "out" / "model.safetensors")
    kept = {n.replace("midlayer.", "layers.0."): tensor for n, tensor in tensors.items() if n not in case.dropped}
    assert {n: raw(tensor) for n, tensor in written.items()} == {n: raw(tensor) for n, tensor in kept.items()}

    facts = {fact.name: (fact.value, fact.origin) for fact in draft.provenance.facts}
    assert facts == (EAGLE_FACTS if case.spec.method == "eagle" else EAGLE3_FACTS) | case.facts
    assert len(facts) == len(draft.provenance.facts)  # no fact has two origins
    assert draft.provenance.source == source.name
    assert draft.provenance.target == "target"


@pytest.mark.parametrize("name", CASES)
def test_every_config_key_and_tensor_has_a_fate(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source, tensors = case.write(tmp_path / "source")
    target = pico.save_target_config(tmp_path / "target", **case.target)
    plan = plan_of(source, target)

    used = {fact.name for fact in plan.facts} | {"rope_parameters", "layer_types", "sliding_window"}
    config = json.loads((source / "config.json").read_text())
    assert config.keys() <= used | plan.dropped_keys.keys()
    assert all(plan.dropped_keys.values())
    assert [move.sources for move in plan.moves] == [(name,) for name in tensors]
    assert {move.sources[0] for move in plan.moves if move.operation == "drop"} == set(case.dropped)
    assert all(move.reason for move in plan.moves if move.operation == "drop")


def test_a_misstated_fact_says_what_the_config_said(tmp_path: Path) -> None:
    source, _ = CASES["eagle, layers misstated"].write(tmp_path)
    facts = {fact.name: fact for fact in plan_of(source).facts}
    assert "32" in facts["num_hidden_layers"].note


def test_unknown_config_keys_are_one_error(tmp_path: Path) -> None:
    config = pico.eagle_config(attn_temperature=0.5, layer_scale=[1, 2])
    pico.write_checkpoint(tmp_path / "source", config, pico.eagle_tensors())
    with pytest.raises(FormatError) as error:
        convert_checkpoint(str(tmp_path / "source"), tmp_path / "out")
    message = str(error.value)
    assert "attn_temperature: 0.5" in message
    assert "layer_scale: [1, 2]" in message
    assert "config.json" in message
    assert not (tmp_path / "out").exists()


def test_a_format_reads_keys_that_it_calls_otherwise() -> None:
    facts = Facts({"n_vocab": 320, "n_layer": "two", "n_head": 4}, "config.json")
    facts.rename({"n_vocab": "vocab_size", "n_layer": "num_layers", "n_head": "num_heads", "n_embd": "hidden_size"})
    assert facts.size("vocab_size") == 320
    assert facts.found[0].note == "config n_vocab"
    with pytest.raises(FormatError, match="config key n_layer is 'two'"):
        facts.optional("num_layers", int)
    with pytest.raises(FormatError, match="n_head"):
        facts.check_all_used()
    with pytest.raises(FormatError, match="config has n_vocab and vocab_size"):
        Facts({"n_vocab": 1, "vocab_size": 1}, "config.json").rename({"n_vocab": "vocab_size"})


def test_bookkeeping_of_transformers_is_dropped(tmp_path: Path) -> None:
    written = PretrainedConfig().to_dict() | GenerationConfig._get_default_generation_params()
    assert written.keys() <= HARMLESS_KEYS.keys()
    harmless = written | dict.fromkeys(HARMLESS_KEYS, "any")
    pico.write_checkpoint(tmp_path, harmless | pico.eagle_config(), pico.eagle_tensors())
    plan = plan_of(tmp_path)
    assert plan.spec == plan_of(CASES["eagle"].write(tmp_path / "plain")[0]).spec
    assert plan.dropped_keys.keys() >= HARMLESS_KEYS.keys() - pico.eagle_config().keys()


def test_what_changes_layers_is_no_bookkeeping(tmp_path: Path) -> None:
    changes = {"per_layer_config": {"0": {"hidden_act": "gelu"}}}
    pico.write_checkpoint(tmp_path, pico.eagle_config(**changes), pico.eagle_tensors())
    with pytest.raises(FormatError, match="per_layer_config"):
        plan_conversion(str(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
def test_null_says_nothing(nested: bool, target: Path, tmp_path: Path) -> None:
    keys = {"eagle_config": {"future_option": None}} if nested else {"future_option": None}
    pico.write_checkpoint(tmp_path, pico.eagle3_config(), pico.eagle3_tensors())
    (tmp_path / "config.json").write_text(json.dumps(pico.eagle3_config() | keys))
    conversion = plan_conversion(str(tmp_path), target=str(target))
    assert conversion.reading is not None
    assert conversion.reading.plan.dropped_keys["eagle_config.future_option" if nested else "future_option"] == "null"
    assert conversion.losses == ()


def test_an_unknown_key_that_is_ignored_is_a_recorded_loss(draftkit: Command, target: Path, tmp_path: Path) -> None:
    keys = {"attn_temperature": 0.5, "eagle_config": {"tree_depth": 4}}
    pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(**keys), pico.eagle3_tensors())
    convert = ("convert", tmp_path / "source", tmp_path / "out", "--target", target)
    ran = draftkit(*convert, "--ignore-key", "attn_temperature")
    assert ran.code == 1
    assert "eagle_config.tree_depth: 4" in ran.err
    assert "attn_temperature" not in ran.err
    ran = draftkit(*convert, "--ignore-key", "attn_temperature", "--ignore-key", "eagle_config.tree_depth")
    assert ran.code == 0, ran.err
    assert "lost: config key attn_temperature, 0.5" in ran.out
    draft = read_draft(tmp_path / "out")
    assert ["attn_temperature" in loss for loss in draft.provenance.losses] == [False, True]
    assert draft.provenance.dropped_config["attn_temperature"] == 0.5
    assert draft.provenance.dropped_config["eagle_config.tree_depth"] == 4


@pytest.mark.parametrize("key", ["not_there", "hidden_size", "use_cache"])
def test_what_needs_no_ignoring_is_not_ignored(key: str, draftkit: Command, tmp_path: Path) -> None:
    source, _ = CASES["eagle"].write(tmp_path)
    ran = draftkit("convert", source, tmp_path / "out", "--ignore-key", key)
    assert ran.code == 1
    assert f"nothing to ignore in {key}" in ran.err


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["eagle, fc.bias", "eagle3"])
def test_conversion_is_reproducible(name: str, target: Path, tmp_path: Path) -> None:
    source, _ = CASES[name].write(tmp_path / "source")
    for out in ("first", "second"):
        convert_checkpoint(str(source), tmp_path / out, target=str(target))
    assert content(tmp_path / "first") == content(tmp_path / "second")


@pytest.mark.parametrize("name", ["automodel", "automodel-eagle"])
def test_dropped_keys_have_one_order(name: str, tmp_path: Path) -> None:
    """Not that of a set, which changes from run to run."""
    reading = plan_conversion(str(all_published()[name].write(tmp_path))).reading
    assert reading is not None
    reasons = reading.plan.dropped_keys
    common = max(set(reasons.values()), key=list(reasons.values()).count)
    dropped = [key for key, reason in reasons.items() if reason == common]
    assert dropped == sorted(dropped)
    assert len(dropped) > 4


def test_dtypes_may_be_mixed(tmp_path: Path) -> None:
    tensors = pico.eagle_tensors(dtype=torch.bfloat16)
    tensors["layers.0.post_attention_layernorm.weight"] = torch.rand(64, dtype=torch.float32)
    pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), tensors)
    draft = read_draft(convert_checkpoint(str(tmp_path / "source"), tmp_path / "out"))
    assert draft.spec.dtype == "BF16"
    assert draft.tensors["layers.0.post_attention_layernorm.weight"].dtype == "F32"


# --- the draft vocabulary


def moved(index: int, target_id: int) -> Callable[[Tensors], object]:
    """Let draft token `index` stand for `target_id`."""
    return lambda tensors: tensors["d2t"].__setitem__(index, target_id - index)


def flipped(tensors: Tensors) -> None:
    tensors["t2d"][5] ^= True


BAD_VOCABULARIES: dict[str, tuple[Callable[[Tensors], object], dict[str, Any], str]] = {
    "t2d disagrees": (flipped, {}, "t2d marks"),
    "t2d is short": (lambda t: t.update(t2d=t["t2d"][:-1].clone()), {}, "t2d is BOOL [319]"),
    "t2d is no mask": (lambda t: t.update(t2d=t["t2d"].long()), {}, "t2d is I64"),
    "beyond the end": (moved(127, 320), {}, "d2t[127] maps to token 320, outside 0…319"),
    "before the start": (moved(0, -1), {}, "d2t[0] maps to token -1"),
    "repeated": (lambda t: moved(3, int(t["d2t"][2]) + 2)(t), {}, "d2t maps 1 draft tokens"),
    "d2t is missing": (lambda t: t.pop("d2t"), {}, "d2t is missing"),
    "d2t is narrow": (lambda t: t.update(d2t=t["d2t"].short()), {}, "d2t is I16"),
    "d2t is short": (
        lambda t: t.update(d2t=t["d2t"][:-1].clone()) or t.pop("t2d"),
        {},
        "d2t is I64 [127], not I64 [128]",
    ),
    "d2t was never set": (lambda t: t["d2t"].zero_(), {}, "t2d marks"),
    "more than the target has": (lambda t: None, {"draft_vocab_size": 321}, "321 exceeds vocab_size 320"),
    "a head of another size": (lambda t: None, {"draft_vocab_size": 127}, "d2t is I64 [128], not I64 [127]"),
}


@pytest.mark.parametrize("name", BAD_VOCABULARIES)
def test_a_bad_vocabulary_map_is_refused(name: str, target: Path, tmp_path: Path) -> None:
    spoil, config, problem = BAD_VOCABULARIES[name]
    tensors = pico.eagle3_tensors()
    spoil(tensors)
    pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(**config), tensors)
    with pytest.raises(DraftkitError) as error:
        convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", target=str(target))
    assert problem in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spoil", "problem"), [(moved(7, 8), "d2t maps 1 draft tokens"), (flipped, "t2d marks 319")], ids=["d2t", "t2d"]
)
def test_a_full_vocabulary_has_no_map(
    spoil: Callable[[Tensors], object], problem: str, target: Path, tmp_path: Path
) -> None:
    tensors = pico.eagle3_tensors(draft_vocabulary=320)
    spoil(tensors)
    pico.write_checkpoint(tmp_path, pico.eagle3_config(draft_vocab_size=320), tensors)
    with pytest.raises(FormatError, match=problem):
        plan_conversion(str(tmp_path), target=str(target))


def test_a_permuted_full_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    tensors = pico.eagle3_tensors(draft_vocabulary=320)
    tensors["d2t"][:2] = torch.tensor([1, -1])
    pico.write_checkpoint(tmp_path, pico.eagle3_config(draft_vocab_size=320), tensors)
    with pytest.raises(FormatError, match="permutes"):
        plan_conversion(str(tmp_path), target=str(target))


MENDED: dict[str, Callable[[Tensors], object]] = {
    "zero": lambda t: t["d2t"].zero_(), "outside": moved(127, 320), "missing": lambda t: t.pop("d2t"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MENDED)
def test_a_broken_map_is_described_and_mended_from_t2d(
    name: str, draftkit: Command, target: Path, tmp_path: Path
) -> None:
    tensors = pico.eagle3_tensors()
    sound = tensors["d2t"].clone()
    MENDED[name](tensors)
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), tensors)
    ran = draftkit("inspect", source, "--target", target, "-v")
    assert ran.code == 0
    assert ran.out.splitlines()[0].endswith("1 known defect; 9 facts assumed")
    assert all(
        text in ran.out for text in ("norm_before_residual", "midlayer.hidden_norm.weight", "--set d2t=from_t2d")
    )
    found = json.loads(draftkit("inspect", source, "--target", target, "--json").out)["findings"]
    assert [(finding["name"], finding["severity"]) for finding in found] == [("d2t", "error")]
    refused = draftkit("convert", source, tmp_path / "out", "--target", target)
    assert refused.code == 1
    assert "--set d2t=from_t2d" in refused.err
    assert draftkit("convert", source, tmp_path / "out", "--target", target, "--set", "d2t=from_t2d").code == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["d2t"], sound)
    fact = next(fact for fact in read_draft(tmp_path / "out").provenance.facts if fact.name == "d2t")
    assert (fact.value, fact.origin) == ("from_t2d", "overridden")


def test_a_map_in_int32_is_widened(target: Path, tmp_path: Path) -> None:
    tensors = pico.eagle3_tensors()
    sound = tensors["d2t"].clone()
    pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), tensors | {"d2t": sound.int()})
    out = convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", target=str(target))
    assert torch.equal(load_file(out / "model.safetensors")["d2t"], sound)


def test_a_unified_draft_with_a_map_out_of_range_is_one_message(
    draftkit: Command, target: Path, tmp_path: Path
) -> None:
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), pico.eagle3_tensors(embed=True))
    out = convert_checkpoint(str(source), tmp_path / "out", target=str(target))
    tensors = load_file(out / "model.safetensors")
    tensors["d2t"][5] = 1000
    save_file(tensors, out / "model.safetensors")
    described = json.loads(draftkit("inspect", out, "--json").out)
    assert [finding["name"] for finding in described["findings"] if "d2t" in finding["name"]] == ["broken-d2t"]
    for to in ("speculators", "sglang"):
        ran = draftkit("convert", out, tmp_path / to, "--to", to, "--target", target)
        assert (ran.code, "d2t[5] maps to token 1005, outside 0…319" in ran.err) == (1, True)
        assert not (tmp_path / to).exists()


def test_inspect_describes_what_it_can_read(draftkit: Command, target: Path, tmp_path: Path) -> None:
    tensors = pico.eagle3_tensors()
    del tensors["midlayer.mlp.up_proj.weight"]
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(layer_scale=3), tensors)
    ran = draftkit("inspect", source, "--target", target, "-v")
    assert ran.code == 1
    assert ran.out.splitlines()[0].endswith("not convertible as it is; 9 facts assumed")
    assert "format eagle3, " in draftkit("inspect", source, "--target", target).out
    assert all(text in ran.out for text in ("hidden_size", "midlayer.hidden_norm.weight"))
    assert "layer_scale" in ran.err
    assert json.loads(draftkit("inspect", source, "--target", target, "--json").out)["format"] == "eagle3"


def test_inspect_describes_what_no_format_recognizes(draftkit: Command, tmp_path: Path) -> None:
    source = pico.write_checkpoint(tmp_path, {"model_type": "odd", "width": 7}, {"odd.weight": torch.ones(7, 5)})
    ran = draftkit("inspect", source, "-v")
    assert ran.code == 1
    assert all(text in ran.out for text in ("no draft of a known format", "width", "odd.weight", "[7, 5]"))
    assert "no known draft format has these 1 tensors" in ran.err
    described = json.loads(draftkit("inspect", source, "--json").out)
    assert (described["format"], described["config"]["width"]) == ("unknown", 7)


@pytest.mark.parametrize("spoilt", ["tensors", "spec"])
def test_inspect_describes_a_unified_draft_that_is_not_valid(spoilt: str, draftkit: Command, tmp_path: Path) -> None:
    source, _ = CASES["eagle"].write(tmp_path)
    out = convert_checkpoint(str(source), tmp_path / "out")
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    if spoilt == "tensors":
        tensors["fc.weight"] = tensors["fc.weight"][:, :3].contiguous()
        save_file(tensors, out / "model.safetensors")
    else:
        del config["draftkit"]["spec"]["architecture"]["final_norm"]
        (out / "config.json").write_text(json.dumps(config))
    ran = draftkit("inspect", out, "-v")
    assert ran.code == 1
    assert all(text in ran.out for text in ("unified, not convertible", "hidden_size", "fc.weight"))
    assert {"tensors": "wrong shape: fc.weight", "spec": "final_norm: missing"}[spoilt] in ran.err


def test_a_full_vocabulary_needs_no_buffers(target: Path, tmp_path: Path) -> None:
    tensors = pico.eagle3_tensors(draft_vocabulary=320)
    del tensors["d2t"], tensors["t2d"]
    pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(draft_vocab_size=320), tensors)
    draft = read_draft(convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", target=str(target)))
    assert len(draft.tensors) == 13


def test_borrowing_an_embedding_of_another_width_is_refused(tmp_path: Path) -> None:
    case = Case(EAGLE3, config={"target_hidden_size": 32}, tensors={"target_hidden": 32})
    source, _ = case.write(tmp_path / "source")
    target = pico.save_target_config(tmp_path / "target", hidden_size=32)
    with pytest.raises(FormatError, match=r"embed_tokens\.weight is missing"):
        plan_conversion(str(source), target=str(target))


# --- causal language models


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_causal_lm_keeps_its_config_and_tokenizer(tied: bool, tmp_path: Path) -> None:
    source = pico.save_llama(pico.save_tokenizer(tmp_path / "source"), num_hidden_layers=1, tie_word_embeddings=tied)
    draft = read_draft(convert_checkpoint(str(source), tmp_path / "out"))
    config = json.loads((source / "config.json").read_text())
    assert draft.spec.method == "draft-model"
    assert isinstance(draft.spec.architecture, CausalLMSpec)
    assert draft.spec.architecture.config == config
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert ("lm_head.weight" in before) is not tied
    assert {n: raw(tensor) for n, tensor in after.items()} == {n: raw(tensor) for n, tensor in before.items()}
    own = {"config.json", "model.safetensors"}
    assert {n: data for n, data in content(tmp_path / "out").items() if n not in own} == {
        n: data for n, data in content(source).items() if n not in own
    }
    assert (tmp_path / "out" / "tokenizer.json").is_file()


# --- commands


def test_a_unified_draft_is_not_converted_again(tmp_path: Path) -> None:
    source, _ = CASES["eagle"].write(tmp_path / "source")
    draft = read_draft(convert_checkpoint(str(source), tmp_path / "out"))
    assert inspect_checkpoint(str(tmp_path / "out")) == draft
    with pytest.raises(LayoutError, match="is a unified draft already"):
        convert_checkpoint(str(tmp_path / "out"), tmp_path / "again")


def test_a_dry_run_writes_nothing(
    draftkit: Command, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES["eagle3"].write(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    ran = draftkit("convert", "source", "out", "--target", target, "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert "midlayer.hidden_norm.weight" in ran.out
    assert "layers.0.hidden_norm.weight" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# vLLM takes method `eagle` from `eagle-` anywhere in a path.
@pytest.mark.parametrize(
    ("case", "source", "out"),
    [
        ("eagle", "EAGLE-LLaMA3-8B", "EAGLE-LLaMA3-8B-draftkit"),
        ("eagle", "hass", "hass-draftkit"),
        ("eagle3", "my-eagle-3-x", "my-eagle_3-x-draftkit"),
        ("eagle3", "EAGLE-3", "EAGLE_3-draftkit"),
        ("eagle3", "my-eagle", "my-eagle_draftkit"),
        ("eagle3", "eagle3-x/", "eagle3-x-draftkit"),
    ],
)
def test_default_folder_names(
    case: str, source: str, out: str, draftkit: Command, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CASES[case].write(tmp_path / source)
    monkeypatch.chdir(tmp_path)
    assert draftkit("convert", source, "--target", target).code == 0
    assert {path.name for path in tmp_path.iterdir()} == {source.rstrip("/"), out}


def test_the_current_folder_gives_its_name(draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["eagle"].write(tmp_path / "source")
    monkeypatch.chdir(tmp_path / "source")
    assert draftkit("convert", ".").code == 0
    assert (tmp_path / "source" / "source-draftkit" / "config.json").is_file()


IMPORTS = """
import json
import sys
from draftkit.cli import main

loaded = {}
looks = (["--help"], ["inspect", "--formats"], ["inspect", "source"])
for arguments in (*looks, ["convert", "source", "out"], ["inspect", "out"]):
    sys.argv = ["draftkit", *arguments]
    try:
        main()
    except SystemExit as exit:
        assert not exit.code, exit.code
    loaded[" ".join(arguments)] = list(sys.modules)
print(json.dumps(loaded))
"""


@pytest.mark.slow
def test_safetensors_need_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Nor does the help need what only commands do, nor a look at a draft what measurements do."""
    CASES["eagle"].write(tmp_path / "source", safetensors=True)
    command = [sys.executable, "-c", IMPORTS]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    loaded = {key: set(names) for key, names in json.loads(ran.stdout.splitlines()[-1]).items()}
    assert not {"yaml", "rich", "pydantic"} & loaded["--help"]
    assert sum(name.startswith("draftkit.") for name in loaded["--help"]) <= 36
    assert not {"yaml", "draftkit.results"} & loaded["inspect source"]
    assert not {"torch", "transformers", "huggingface_hub", "numpy"} & loaded["inspect out"]
    assert read_draft(tmp_path / "out").spec.method == "eagle"
