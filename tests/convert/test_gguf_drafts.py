"""Drafts in GGUF: what is written, what comes back byte for byte, and what llama.cpp would run wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.unified import write_unified
from safetensors.torch import load_file

from draftkit.checks.checkpoint import findings_of_reading
from draftkit.checks.gguf import table_as_head
from draftkit.convert.api import Reading, convert_checkpoint, describe_checkpoint, plan_conversion
from draftkit.engines.llama_cpp import check_target, serve_command
from draftkit.errors import DraftkitError, LayoutError, TargetError
from draftkit.io.gguf_file import GgufTensor, read_gguf, read_typed, write_gguf
from draftkit.io.handles import memory_handle
from draftkit.layout.target import read_target_facts

ZOO = ("zoo:eagle3", "zoo:draft-model", "zoo:dflash", "zoo:dspark")


def written(source: str, out: Path, **arguments: object) -> Path:
    return convert_checkpoint(source, out, to="gguf", target="zoo:target", **arguments)  # type: ignore[arg-type]


def rewritten(file: Path, out: Path, keys: dict[str, object], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A copy of a file with other values of some keys, None for none, and of some tensors."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, "eagle3")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or (name in keys and keys[name] is None):
            continue
        items = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, keys.get(name, field.contents()), field.types[0], items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, (tensors or {}).get(tensor.name, tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def with_keys(file: Path, out: Path, keys: dict[str, object], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A copy of a file with more or other keys and tensors."""
    metadata = dict(read_typed(file, "")) | keys
    metadata["general.architecture"] = read_gguf(file).metadata["general.architecture"]
    handles = {handle.name: handle for handle in read_gguf(file).tensors}
    handles |= {n: memory_handle(n, torch.from_numpy(values), file) for n, values in (tensors or {}).items()}
    write_gguf(out, metadata, [GgufTensor(handle, handle.dtype) for handle in handles.values()])
    return out


def names_found(file: Path) -> set[str]:
    found = describe_checkpoint(str(file), target="zoo:target")
    assert isinstance(found, Reading)
    return {finding.name for finding in findings_of_reading(found)}


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("unified")
    return {source: convert_checkpoint(source, folder / source[4:], target="zoo:target") for source in ZOO}


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("zoo:eagle3", tmp_path_factory.mktemp("gguf") / "eagle3.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("stored", [None, "f32"])
@pytest.mark.parametrize("source", ZOO)
def test_what_comes_back_is_what_went_out(
    source: str, stored: str | None, unified: dict[str, Path], tmp_path: Path
) -> None:
    """In the draft's own dtype (float16, bfloat16), and in float32 and back."""
    file = written(str(unified[source]), tmp_path / "draft.gguf", stored=stored)
    back = convert_checkpoint(str(file), tmp_path / "back", target="zoo:target")
    before, after = (load_file(folder / "model.safetensors") for folder in (unified[source], back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


def test_rows_and_ids_are_those_that_llama_cpp_reads(eagle3: Path, unified: dict[str, Path]) -> None:
    tensors = load_file(unified["zoo:eagle3"] / "model.safetensors")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(eagle3).tensors}
    heads = (6, 2, 16, -1)  # of the draft; two halves of 16 rows
    query = tensors["layers.0.self_attn.q_proj.weight"].numpy().reshape(heads).swapaxes(1, 2).reshape(192, -1)
    assert np.array_equal(found["blk.0.attn_q.weight"], query)
    assert np.array_equal(found["d2t"], tensors["d2t"].numpy() + np.arange(len(tensors["d2t"])))
    assert found["blk.0.attn_norm.weight"].dtype == np.float32


def test_every_key_is_stated(eagle3: Path) -> None:
    metadata = read_gguf(eagle3).metadata
    assert metadata["eagle3.target_layers"] == [2, 5, 7]
    assert metadata["eagle3.rope.freq_base"] == 10000.0
    assert metadata["eagle3.norm_before_residual"] is metadata["eagle3.norm_before_fc"] is False
    assert metadata["eagle3.attention.key_length"] == metadata["eagle3.rope.dimension_count"] == 32
    assert metadata["tokenizer.ggml.tokens"] == metadata["eagle3.vocab_size"] == 4096
    assert '"source": "zoo:eagle3"' in metadata["draftkit.provenance"]


@pytest.mark.slow
def test_the_tokenizer_of_a_target_in_gguf_is_copied(eagle3: Path, tmp_path: Path) -> None:
    target = written("zoo:target", tmp_path / "target.gguf")
    other = convert_checkpoint("zoo:eagle3", tmp_path / "draft.gguf", to="gguf", target=str(target))
    one, two = (gguf.GGUFReader(file) for file in (eagle3, other))
    for name in (name for name in one.fields if name.startswith("tokenizer.")):
        assert one.get_field(name).contents() == two.get_field(name).contents(), name  # type: ignore[union-attr]


@pytest.mark.parametrize(("stored", "least"), [("q8_0", 0.999), ("q4_0", 0.99)])
def test_quantized_weights_are_near_and_come_back_as_float32(
    stored: str, least: float, unified: dict[str, Path], tmp_path: Path
) -> None:
    file = written("zoo:eagle3", tmp_path / "draft.gguf", stored=stored)
    back = plan_conversion(str(file), target="zoo:target").require_draft()
    assert back.spec.dtype == "F32"
    name = "layers.0.self_attn.q_proj.weight"
    was = load_file(unified["zoo:eagle3"] / "model.safetensors")[name].float()
    assert torch.cosine_similarity(back.tensors[name].load().flatten(), was.flatten(), dim=0) > least


CHANGED = {
    "four layers": ({"aux_layer_ids": (1, 2, 4, 6)}, "its graph 3", False),
    "two layers": ({"num_hidden_layers": 2}, "its graph 1", False),
    "a norm for each state": ({"feature_norm": "per_layer"}, "feature_norm is per_layer", True),
    "the state after the norm": ({"feedback": "post_norm"}, "feedback is post_norm", True),
    "a scale of the logits": ({"logit_scale": 0.5}, "logit_scale is 0.5", True),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is gelu", True),
    "biases": ({"qkv_bias": True}, "qkv_bias is True", True),
    "a window": ({"sliding_window": 64}, "sliding_window is 64", True),
    "the last state": ({"aux_layer_ids": (2, 4, 8)}, "gives it stale memory", True),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_llama_cpp_would_run_wrongly_is_refused(case: str, tmp_path: Path) -> None:
    facts, message, lossy = CHANGED[case]
    decoder = {name: facts[name] for name in facts if hasattr(pico.EAGLE3_SPEC.decoder, name)}
    own = {name: facts[name] for name in facts if name not in decoder}
    spec = replace(pico.EAGLE3_SPEC, decoder=replace(pico.EAGLE3_SPEC.decoder, **decoder), **own)
    source, target = write_unified(tmp_path / "draft", spec), pico.save_target_config(tmp_path / "target")
    pico.save_tokenizer(target, ("a", "b"))
    out = tmp_path / "draft.gguf"
    with pytest.raises(LayoutError, match=message):
        convert_checkpoint(source, out, to="gguf", target=str(target))
    assert not out.exists()
    if lossy:
        convert_checkpoint(source, out, to="gguf", target=str(target), allow_lossy=True)
        assert message in str(read_gguf(out).metadata["draftkit.provenance"])


@pytest.mark.slow
def test_defects_are_found_by_name(eagle3: Path, tmp_path: Path) -> None:
    assert names_found(eagle3) == set()
    ids = next(tensor.data for tensor in gguf.GGUFReader(eagle3).tensors if tensor.name == "d2t")
    offsets = rewritten(eagle3, tmp_path / "offsets.gguf", {}, {"d2t": ids - np.arange(len(ids))})
    assert names_found(offsets) == {"gguf-d2t-offsets"}
    mended = plan_conversion(str(offsets), target="zoo:target", overrides={"d2t": "offsets"}).require_draft()
    assert torch.equal(mended.tensors["d2t"].load(), torch.from_numpy(ids - np.arange(len(ids))))
    assert names_found(rewritten(eagle3, tmp_path / "order.gguf", {"eagle3.target_layers": [7, 5, 2]})) == {
        "gguf-layer-order"
    }
    early = rewritten(eagle3, tmp_path / "early.gguf", {"eagle3.target_layers": [1, 4, 6]})
    assert names_found(early) == {"layer-ids-as-outputs"}
    late = rewritten(eagle3, tmp_path / "late.gguf", {"eagle3.target_layers": [3, 6, 8]})
    assert names_found(late) == {"layer-ids"}
    last = rewritten(eagle3, tmp_path / "last.gguf", {"eagle3.target_layers": [2, 5, 10]})
    assert names_found(last) == {"gguf-last-state"}
    assert names_found(rewritten(eagle3, tmp_path / "base.gguf", {"eagle3.rope.freq_base": None})) == {
        "gguf-default-taken"
    }


def test_defects_of_block_drafters_are_found_by_name(unified: dict[str, Path], tmp_path: Path) -> None:
    block = written("zoo:dflash", tmp_path / "block.gguf")
    assert names_found(block) == set()
    layers = int(read_gguf(block).metadata["dflash.block_count"])
    window = {"dflash.attention.sliding_window": 64}
    refused = describe_checkpoint(str(with_keys(block, tmp_path / "w.gguf", window)), target="zoo:target")
    assert isinstance(refused, Reading)
    assert {finding.name for finding in findings_of_reading(refused)} == {"gguf-window-without-pattern"}
    pattern = {"dflash.attention.sliding_window_pattern": [True] * layers}
    assert names_found(with_keys(block, tmp_path / "p.gguf", pattern)) == {"gguf-pattern-without-window"}
    both = with_keys(block, tmp_path / "b.gguf", window | pattern)
    assert names_found(both) == set()
    assert plan_conversion(str(both), target="zoo:target").require_draft().spec.facts()["sliding_window"] == 64
    text = with_keys(block, tmp_path / "m.gguf", {"tokenizer.ggml.mask_token_id": 5})
    assert names_found(text) == {"gguf-mask-is-text"}
    table = {"token_embd.weight": np.ones((4096, 192), np.float32)}
    found = describe_checkpoint(str(with_keys(block, tmp_path / "t.gguf", {}, table)), target="zoo:target")
    assert isinstance(found, Reading)
    assert found.target is not None
    origins = {fact.name: fact for fact in found.plan.facts}
    assert not list(table_as_head.find(origins, found.target))  # whose table is its output layer
    untied = replace(found.target, config=dict(found.target.config) | {"tie_word_embeddings": False})
    assert [finding.name for finding in table_as_head.find(origins, untied)] == ["gguf-table-as-head"]


def test_a_norm_of_ones_and_another_vocabulary_are_found(tmp_path: Path, eagle3: Path) -> None:
    ones = {"enc.output_norm.weight": np.ones(576, np.float32)}
    file = with_keys(eagle3, tmp_path / "ones.gguf", {"eagle3.norm_before_fc": True}, ones)
    assert names_found(file) == {"gguf-norm-of-ones"}
    other = pico.save_llama(tmp_path / "other")
    pico.save_tokenizer(other, ("a", "b"), ("c", "d"))  # transformers 5.17 reads no list of one merge
    draft = convert_checkpoint(str(other), tmp_path / "other.gguf", to="gguf", target=str(other))
    assert "gguf-other-vocabulary" in names_found(draft)


def test_a_file_that_llama_cpp_does_not_load_is_an_error(eagle3: Path, tmp_path: Path) -> None:
    old = rewritten(eagle3, tmp_path / "old.gguf", {"eagle3.target_layers": None})
    with pytest.raises(DraftkitError, match=r"no eagle3.target_layers: llama.cpp does not load it"):
        plan_conversion(str(old), target="zoo:target")
    bare = rewritten(eagle3, tmp_path / "bare.gguf", {"tokenizer.ggml.tokens": None})
    with pytest.raises(DraftkitError, match="the file has no tokenizer"):
        plan_conversion(str(bare), target="zoo:target")


@pytest.mark.slow
def test_the_command_line_writes_shows_and_measures_one(draftkit: Command, tmp_path: Path) -> None:
    out = tmp_path / "draft.gguf"
    command = ("convert", "zoo:eagle3", out, "--to", "gguf", "--target", "zoo:target", "--type", "q8_0")
    outcome = draftkit(*command)
    assert outcome.code == 0, outcome.err
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3 --no-spec-draft-backend-sampling" in outcome.out
    assert draftkit(*command).code == 1  # it is there already
    assert draftkit(*command, "--force").code == 0
    assert "stored as" in draftkit("inspect", out, "--target", "zoo:target", "-v").out
    assert "--to gguf" in draftkit("convert", "zoo:eagle3", tmp_path / "x", "--type", "f16").err
    assert "x.gguf" in draftkit("convert", "zoo:eagle3", tmp_path / "x", *command[3:]).err
    other = tmp_path / "other.gguf"
    rewritten(out, other, {"draftkit.provenance": None})
    assert "has not written" in draftkit("convert", "zoo:eagle3", other, *command[3:], "--force").err


def test_a_window_that_llama_cpp_does_not_end_within_a_block_is_refused(tmp_path: Path) -> None:
    """The zoo's block has eight rows, none of which is causal."""
    with pytest.raises(LayoutError, match=r"window of 7 ends within its block of 8 rows, and llama.cpp's has no end"):
        written("zoo:dflash", tmp_path / "narrow.gguf", overrides={"sliding_window": "7"})
    file = written("zoo:dflash", tmp_path / "wide.gguf", overrides={"sliding_window": "8"})
    assert read_gguf(file).metadata["dflash.attention.sliding_window"] == 8


def test_a_stream_of_another_length_is_an_error(eagle3: Path, tmp_path: Path) -> None:
    handle = read_gguf(eagle3).tensors[0]
    cut = replace(handle, reader=lambda _: iter([b"\0" * 8]))
    with pytest.raises(LayoutError, match="came with 8 bytes"):
        write_gguf(tmp_path / "out.gguf", {"general.architecture": "eagle3"}, [GgufTensor(cut, cut.dtype)])


def test_targets_that_hand_out_no_states_are_refused_by_name(unified: dict[str, Path], tmp_path: Path) -> None:
    spec = plan_conversion("zoo:eagle3", target="zoo:target").require_draft().spec
    target = read_target_facts(pico.save_target_config(tmp_path), "a target", None)
    check_target(spec, target)
    with pytest.raises(TargetError, match="layer inputs of glm4_moe targets"):
        check_target(spec, replace(target, config={"model_type": "glm4_moe"}))
    chain = plan_conversion("zoo:draft-model", target="zoo:target").require_draft().spec
    check_target(chain, replace(target, config={"model_type": "glm4_moe"}))
    assert serve_command(chain, "zoo:target", Path("d.gguf"), 4) == (
        "llama-server -m TARGET.gguf -md d.gguf --spec-type draft-simple --spec-draft-n-max 4"
    )
