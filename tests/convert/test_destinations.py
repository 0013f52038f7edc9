"""Where drafts go: overrides, losses, the fold for vLLM, tensors of the target, and the commands that serve them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.published.checkpoint import Published, randoms
from fixtures.examples import examples
from fixtures.servers.hub_server import HubServer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftkit.convert.api import convert_checkpoint, plan_conversion
from draftkit.convert.destinations import destinations
from draftkit.convert.export import target_embedding, target_head
from draftkit.errors import DraftkitError, FormatError, LayoutError, TargetError
from draftkit.io.settings import read_value
from draftkit.layout.facts import with_facts
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import read_target_facts

EAGLE3 = DraftSpec(architecture=pico.EAGLE3_SPEC, dtype="F16")


@pytest.fixture
def eagle3(tmp_path: Path) -> str:
    return str(pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), pico.eagle3_tensors()))


def eagle_of(folder: Path) -> EagleSpec:
    architecture = read_draft(folder).spec.architecture
    assert isinstance(architecture, EagleSpec)
    return architecture


# --- overrides

OVERRIDES = {
    "rope_theta": ("500000", lambda e: e.decoder.rope.base, 500000.0),
    "rope_scaling": ('{"rope_type": "linear", "factor": 2.0}', lambda e: e.decoder.rope.scaling["factor"], 2.0),
    "max_position_embeddings": ("4096", lambda e: e.decoder.rope.max_position_embeddings, 4096),
    "norm_before_residual": ("true", lambda e: e.norm_before_residual, True),
    "feedback": ("post_norm", lambda e: e.feedback, "post_norm"),
    "aux_layer_ids": ("1,3,4", lambda e: e.aux_layer_ids, (1, 3, 4)),
    "logit_scale": ("0.5", lambda e: e.logit_scale, 0.5),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_fact_can_be_set(name: str, eagle3: str, target: Path, tmp_path: Path) -> None:
    text, value, expected = OVERRIDES[name]
    out = convert_checkpoint(eagle3, tmp_path / "out", target=str(target), overrides={name: text})
    assert value(eagle_of(out)) == expected
    fact = next(fact for fact in read_draft(out).provenance.facts if fact.name == name)
    assert (fact.value, fact.origin) == (text, "overridden")


def test_a_unified_draft_takes_overrides_too(eagle3: str, target: Path, tmp_path: Path) -> None:
    first = convert_checkpoint(eagle3, tmp_path / "first", target=str(target))
    again = convert_checkpoint(str(first), tmp_path / "again", overrides={"rope_theta": "1e6"})
    assert eagle_of(again).decoder.rope.base == 1e6
    assert json.loads((again / "config.json").read_text())["rope_theta"] == 1e6


def test_a_window_is_set_in_words_and_taken_away(eagle3: str, target: Path, tmp_path: Path) -> None:
    """As hints of `convert` and the list of settings write it."""
    first = convert_checkpoint(eagle3, tmp_path / "first", target=str(target), overrides={"sliding_window": "4k"})
    assert eagle_of(first).decoder.sliding_window == 4096
    again = convert_checkpoint(str(first), tmp_path / "again", overrides={"sliding_window": "none"})
    assert eagle_of(again).decoder.sliding_window is None


def test_layers_can_be_set_without_a_target(eagle3: str, tmp_path: Path) -> None:
    out = convert_checkpoint(eagle3, tmp_path / "out", overrides={"aux_layer_ids": "2,4,5"})
    assert eagle_of(out).aux_layer_ids == (2, 4, 5)


BAD_OVERRIDES = {
    "unknown": ({"rope_tehta": "1"}, "there is no fact rope_tehta", "rope_theta"),
    "too deep": ({"rope_scaling": "[" * 200 + "]" * 200}, "nested too deep", "--set rope_scaling"),
    "a number without end": (
        {"rope_scaling": '{"factor": 1' + "0" * 400 + "}"},
        "more than 20 digits",
        "--set rope_scaling",
    ),
    "half a character": ({"hidden_act": "\ud800"}, "not a configuration", "--set hidden_act"),
    "ill-typed": ({"norm_before_residual": "maybe"}, "'maybe' is not true or false", ""),
    "no choice": ({"feedback": "sideways"}, "'sideways' is not one of", "post_norm"),
    "unsorted": ({"aux_layer_ids": "5,4,2"}, "aux_layer_ids are [5, 4, 2]", "ascending"),
    "too many": ({"aux_layer_ids": "1,2,3,4"}, "fc.weight is [64, 192], expected [64, 256]", ""),
    "measured": ({"qkv_bias": "true"}, "the tensors decide it", "False"),
}


@pytest.mark.parametrize("name", BAD_OVERRIDES)
def test_a_bad_override_is_refused(name: str, eagle3: str, target: Path, tmp_path: Path) -> None:
    overrides, *problems = BAD_OVERRIDES[name]
    with pytest.raises(DraftkitError) as error:
        convert_checkpoint(eagle3, tmp_path / "out", target=str(target), overrides=overrides)
    assert all(problem in str(error.value) for problem in problems)
    assert not (tmp_path / "out").exists()


def test_set_needs_a_fact_and_a_value(draftkit: Command, eagle3: str, target: Path, tmp_path: Path) -> None:
    ran = draftkit("convert", eagle3, tmp_path / "out", "--target", target, "--set", "rope_theta")
    assert ran.code == 1
    assert "--set NAME=VALUE" in ran.err


@pytest.mark.slow
@given(st.sampled_from(["hidden_act", "feedback", "embed_tokens"]), st.text(max_size=8))
def test_overrides_never_give_an_ill_typed_spec(name: str, text: str) -> None:
    try:
        value = read_value(text)
    except DraftkitError:  # it is no YAML
        return
    try:
        changed = replace(EAGLE3, architecture=with_facts(EAGLE3.architecture, "a test", **{name: value}))
    except LayoutError:
        return
    assert DraftSpec.from_dict(json.loads(json.dumps(changed.to_dict())), "a test") == changed


# --- checks


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_check_names_what_is_not_finite(value: float, draftkit: Command, tmp_path: Path) -> None:
    tensors = pico.eagle_tensors()
    tensors["layers.0.mlp.up_proj.weight"][3, 5] = value
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), tensors)
    ran = draftkit("convert", source, tmp_path / "out", "--check")
    assert ran.code == 1
    assert "layers.0.mlp.up_proj.weight" in ran.err
    assert not (tmp_path / "out").exists()
    assert draftkit("convert", source, tmp_path / "out").code == 0  # only on request: it reads everything


def test_a_digest_is_taken_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftkit.convert.unified.SMALL_FILE", 1000)
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), pico.eagle_tensors())
    for digest in (False, True):
        draft = plan_conversion(str(source), digest=digest).require_draft()
        digests = {file.name: file.sha256 for file in draft.provenance.files}
        assert digests["config.json"]
        assert bool(digests["pytorch_model.bin"]) == digest


def test_the_word_of_the_hub_is_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the Hub's cache a large file is a link to a blob, which has the name that its content should have."""
    monkeypatch.setattr("draftkit.convert.unified.SMALL_FILE", 1000)
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), pico.eagle_tensors())
    weights = source / "pytorch_model.bin"
    sound = hashlib.sha256(weights.read_bytes()).hexdigest()
    for said in (sound, "0" * 64):
        weights.rename(tmp_path / said)
        weights.symlink_to(tmp_path / said)
        files = {file.name: file for file in plan_conversion(str(source)).require_draft().provenance.files}
        unread = files[weights.name]
        assert (unread.sha256, unread.hub_sha256) == (None, said)
        if said == sound:
            read = plan_conversion(str(source), digest=True).require_draft().provenance.files
            assert (sound, sound) in {(file.sha256, file.hub_sha256) for file in read}
        else:
            with pytest.raises(FormatError, match=f"not the file that the Hub has(.|\n)*{said}"):
                plan_conversion(str(source), digest=True)
            monkeypatch.setattr("draftkit.convert.unified.SMALL_FILE", 1 << 20)
            with pytest.raises(FormatError, match="not the file that the Hub has"):
                plan_conversion(str(source))
        weights.unlink()
        (tmp_path / said).rename(weights)


# --- destinations


def test_an_unknown_destination_lists_those_that_are(eagle3: str, target: Path) -> None:
    with pytest.raises(LayoutError, match="no destination onnx") as error:
        plan_conversion(eagle3, to="onnx", target=str(target))
    assert all(name in str(error.value) for name in destinations())


def test_a_destination_without_a_layout_for_the_draft_says_which_have_one(eagle3: str, target: Path) -> None:
    with pytest.raises(LayoutError, match="there is no eagle3 in the layout of mlp-speculator") as error:
        plan_conversion(eagle3, to="mlp-speculator", target=str(target))
    assert "--to speculators" in str(error.value)


def test_losses_need_consent_and_are_recorded(tmp_path: Path) -> None:
    config = pico.eagle3_config(norm_before_residual=True)
    source = str(pico.write_checkpoint(tmp_path / "source", config, pico.eagle3_tensors()))
    target = pico.save_llama(tmp_path / "target")  # with weights: what takes the draft without loss copies some
    options: dict[str, Any] = {"to": "sglang", "target": str(target)}
    with pytest.raises(LayoutError, match="loses") as error:
        convert_checkpoint(source, tmp_path / "out", **options)
    assert "norm_before_residual" in str(error.value)
    assert "--to speculators" in str(error.value)
    assert not (tmp_path / "out").exists()
    out = convert_checkpoint(source, tmp_path / "out", **options, allow_lossy=True)
    provenance = json.loads((out / "draftkit-provenance.json").read_text())
    assert any("norm_before_residual" in loss for loss in provenance["export_losses"])


def test_a_unified_draft_goes_out_as_the_checkpoint_would(eagle3: str, target: Path, tmp_path: Path) -> None:
    unified = convert_checkpoint(eagle3, tmp_path / "unified", target=str(target))
    outs = [
        convert_checkpoint(source, tmp_path / f"out{i}", to="sglang", target=str(target))
        for i, source in enumerate((eagle3, str(unified)))
    ]
    names = ["config.json", "model.safetensors"]
    assert [(outs[0] / name).read_bytes() for name in names] == [(outs[1] / name).read_bytes() for name in names]


# --- vLLM: the fold


@pytest.mark.parametrize("own_table", [True, False], ids=["own table", "the target's table"])
def test_a_folded_bias_gives_the_same_fusion(own_table: bool, tmp_path: Path) -> None:
    tensors = pico.eagle_tensors(bias=True, embed=own_table, dtype=torch.float32)
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(torch_dtype="float32"), tensors)
    target = pico.save_llama(tmp_path / "target")
    out = convert_checkpoint(str(source), tmp_path / "out", to="vllm", target=str(target))
    assert (eagle_of(out).fusion_bias, eagle_of(out).embed_tokens) == (False, "draft")
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    written = load_file(out / "model.safetensors")
    assert "fc.bias" not in written
    table = tensors.get("embed_tokens.weight", load_file(target / "model.safetensors").get("model.embed_tokens.weight"))
    assert table is not None
    hidden = torch.randn(320, 64)
    before = torch.cat([table, hidden], 1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    after = torch.cat([written["embed_tokens.weight"], hidden], 1) @ written["fc.weight"].T
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after - tensors["fc.bias"], before, atol=1e-2)  # the bias does matter here


def test_a_bias_that_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    tensors = pico.eagle_tensors(bias=True, dtype=torch.float32)
    tensors["fc.weight"][:, :64] = torch.outer(torch.ones(64), torch.ones(64))  # reaches one direction only
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), tensors)
    with pytest.raises(LayoutError, match=r"fc\.bias cannot be folded"):
        convert_checkpoint(str(source), tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()


def test_vllm_takes_a_draft_that_it_runs_as_it_is(eagle3: str, target: Path, tmp_path: Path) -> None:
    for to in ("unified", "vllm"):
        convert_checkpoint(eagle3, tmp_path / to, to=to, target=str(target))
    assert load_file(tmp_path / "vllm" / "model.safetensors").keys() == read_draft(tmp_path / "unified").tensors.keys()


# --- tensors of the target


@pytest.mark.slow
def test_only_the_shards_that_are_needed_are_fetched(tmp_path: Path) -> None:
    """A target of two shards on the Hub: the embedding's is downloaded, the other is not."""
    repo = pico.save_llama(tmp_path / "repo")
    tensors = load_file(repo / "model.safetensors")
    (repo / "model.safetensors").unlink()
    table = "model.embed_tokens.weight"
    shards = {"one.safetensors": [table], "two.safetensors": [name for name in tensors if name != table]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, repo / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (repo / "model.safetensors.index.json").write_text(json.dumps(index))
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), pico.eagle_tensors(bias=True, embed=False))
    with HubServer({"org/target": repo}) as server:
        hub = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "vllm", "--target", "org/target"]
        command = [sys.executable, "-m", "draftkit", *arguments]
        ran = subprocess.run(command, env=os.environ | hub, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in (tmp_path / "home").rglob("*.safetensors")} == {"one.safetensors"}


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = pico.save_llama(tmp_path, tie_word_embeddings=True)
    facts = read_target_facts(folder, str(folder), None)
    assert torch.equal(target_head(facts).load(), target_embedding(facts).load())


def test_a_target_without_the_tensor_is_an_error(tmp_path: Path) -> None:
    folder = pico.save_target_config(tmp_path)
    with pytest.raises(TargetError, match=r"has no tensor lm_head\.weight"):
        target_head(read_target_facts(folder, str(folder), None))


# --- serving


def test_the_command_that_serves_the_draft_is_printed(
    draftkit: Command, eagle3: str, target: Path, tmp_path: Path
) -> None:
    ran = draftkit("convert", eagle3, tmp_path / "out put", "--target", target)
    line = next(line for line in ran.out.splitlines() if line.startswith("vLLM: "))
    settings = json.loads(line.partition("--speculative-config ")[2].strip("'"))
    assert settings == {"model": str(tmp_path / "out put"), "method": "eagle3", "num_speculative_tokens": 3}
    ran = draftkit("convert", eagle3, tmp_path / "sglang", "--target", target, "--to", "sglang")
    assert "SGLang: python -m sglang.launch_server" in ran.out
    assert "--speculative-algorithm EAGLE3" in ran.out


def test_a_draft_that_vllm_would_run_wrongly_gets_no_command(draftkit: Command, tmp_path: Path) -> None:
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), pico.eagle_tensors(bias=True))
    ran = draftkit("convert", source, tmp_path / "out")
    assert "vllm serve" not in ran.out
    assert "vLLM refuses to load it" in ran.out
    assert "--to vllm folds fc.bias" in ran.out
    assert "--to vllm folds fc.bias" in draftkit("inspect", tmp_path / "out").out


def test_what_to_vllm_cannot_mend_is_not_promised(draftkit: Command, tmp_path: Path) -> None:
    config = pico.eagle_config(hidden_act="gelu")
    source = pico.write_checkpoint(tmp_path / "source", config, pico.eagle_tensors(bias=True))
    ran = draftkit("convert", source, tmp_path / "out")
    assert "vLLM refuses to load it" in ran.out
    assert "--to vllm" not in ran.out


# --- any shape, dtype and split


@pytest.mark.slow
@examples(30)
@given(
    heads=st.integers(1, 4), groups=st.integers(1, 3), head_dim=st.sampled_from([2, 8, 10]),
    inner=st.integers(1, 40), vocabulary=st.integers(20, 60), layers=st.integers(1, 3), bias=st.booleans(),
    embed=st.booleans(), shards=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)  # fmt: skip
def test_any_eagle_draft_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, heads: int, groups: int, head_dim: int, inner: int, vocabulary: int,
    layers: int, bias: bool, embed: bool, dtype: torch.dtype, shards: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("draft")
    hidden, queries = heads * groups * head_dim, heads * groups
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {"fc.bias": (hidden,)} if bias else {}
    shapes |= {"embed_tokens.weight": (vocabulary, hidden)} if embed else {}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (hidden, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (heads * head_dim, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (heads * head_dim, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, hidden),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {f"layers.{i}.input_layernorm.weight": (hidden,)} if i else {}
    config = pico.eagle_config(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=queries, num_key_value_heads=heads,
        vocab_size=vocabulary, num_hidden_layers=layers, bias=bias,
    )  # fmt: skip
    source = Published(
        name="any", format="eagle", method="eagle", config=config, count=len(shapes),
        tensors=lambda dtype: randoms(shapes, dtype, seed=heads),
    )  # fmt: skip
    unified = convert_checkpoint(str(source.write(folder / "source", dtype, shards)), folder / "unified")
    back = convert_checkpoint(str(unified), folder / "back", to="eagle")
    before, after = source.all_tensors(dtype), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
