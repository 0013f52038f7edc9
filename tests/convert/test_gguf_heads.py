"""Multi-token prediction heads in GGUF: in a file of their own, in the target's, and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.mtp_targets import LAYERS, save_with_head
from safetensors.torch import load_file, save_file

from draftkit.checks.checkpoint import findings_of_reading
from draftkit.convert.api import Reading, convert_checkpoint, describe_checkpoint, put_heads_back
from draftkit.convert.formats.gguf.heads import HEADS
from draftkit.engines.llama_cpp import WITH_HEADS
from draftkit.engines.serving import uses_of_heads
from draftkit.errors import DraftkitError, FormatError, LayoutError, TargetError
from draftkit.io.gguf_file import read_gguf
from draftkit.layout.mtp import KINDS

TESTED = ("glm4_moe", "glm4_moe_lite", "hy_v3", "qwen3_5_text", "qwen3_next")
HYBRID = ("qwen3_5_text", "qwen3_next")


def target_file(kind: str, out: Path, hidden_size: int = pico.HIDDEN) -> Path:
    """A target as llama.cpp's converter writes it without its heads; of its layers, one tensor."""
    writer = gguf.GGUFWriter(out, HEADS[kind].architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden_size)
    if kind in HYBRID:
        writer.add_array(f"{HEADS[kind].architecture}.attention.recurrent_layers", [True, True, True, False] * 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(pico.VOCABULARY)])
    table = np.ones((pico.VOCABULARY, hidden_size), np.float32)
    writer.add_tensor("token_embd.weight", table)
    writer.add_tensor("output.weight", gguf.quantize(table, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.add_tensor("output_norm.weight", np.ones(hidden_size, np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(hidden_size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with heads in bfloat16 as `heads`, and `target.gguf`; each made once."""
    found: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in found:
            found[kind] = folder = tmp_path_factory.mktemp(kind)
            save_with_head(kind, folder / "target")
            path = folder / "target" / "model.safetensors"
            save_file({n: t.bfloat16() for n, t in load_file(path).items()}, path, {"format": "pt"})
            convert_checkpoint(str(folder / "target"), folder / "heads", format="mtp")
            target_file(kind, folder / "target.gguf")
        return found[kind]

    return make


def names_found(file: Path) -> set[str]:
    found = describe_checkpoint(str(file))
    assert isinstance(found, Reading)
    assert found.plan.refusal is None
    return {finding.name for finding in findings_of_reading(found)}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TESTED)
def test_heads_come_back_byte_for_byte(kind: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    """From a file of their own, and from the target's."""
    work, before = made(kind), stored(made(kind) / "heads")
    target = str(work / "target.gguf")
    apart = convert_checkpoint(str(work / "heads"), tmp_path / "mtp.gguf", to="gguf", target=target)
    whole, changed = put_heads_back(str(work / "heads"), target, tmp_path / "whole.gguf")
    assert changed == ["whole.gguf"]
    for number, file in enumerate((apart, whole)):
        after = stored(convert_checkpoint(str(file), tmp_path / f"back-{number}"))
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def test_both_files_agree_with_the_target(made: Callable[[str], Path], tmp_path: Path) -> None:
    work = made("qwen3_next")
    heads, target = str(work / "heads"), str(work / "target.gguf")
    whole, _ = put_heads_back(heads, target, tmp_path / "whole.gguf")
    again, _ = put_heads_back(heads, str(whole), tmp_path / "again.gguf")  # in the place of those that are there
    apart = convert_checkpoint(heads, tmp_path / "mtp.gguf", to="gguf", target=target)
    own, theirs = (gguf.GGUFReader(file) for file in (whole, target))
    names = {tensor.name: tensor for tensor in own.tensors}
    assert all(np.array_equal(names[tensor.name].data, tensor.data) for tensor in theirs.tensors)
    assert names["output.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert [tensor.name for tensor in gguf.GGUFReader(again).tensors] == [*names]
    for file in (whole, again, apart):
        metadata = read_gguf(file).metadata
        assert metadata["qwen3next.block_count"] == LAYERS + 1
        assert metadata["qwen3next.nextn_predict_layers"] == 1
        assert metadata["qwen3next.attention.recurrent_layers"] == [True, True, True, False] * 2 + [False]
        assert metadata["tokenizer.ggml.tokens"] == pico.VOCABULARY
    alone = {handle.name: handle for handle in read_gguf(apart).tensors}
    assert "blk.0.attn_norm.weight" not in alone
    assert alone.keys() >= {"token_embd.weight", "output_norm.weight", "output.weight"}
    experts = [stored(work / "heads")[f"mtp.layers.0.mlp.experts.{number}.up_proj.weight"] for number in range(4)]
    assert torch.equal(alone[f"blk.{LAYERS}.ffn_up_exps.weight"].load(), torch.stack(experts))
    norm = stored(work / "heads")["mtp.norm.weight"].float()
    assert torch.equal(alone[f"blk.{LAYERS}.nextn.shared_head_norm.weight"].load(), norm + 1)
    assert alone[f"blk.{LAYERS}.ffn_gate_inp.weight"].dtype == "F32"


def test_experts_that_are_stored_as_one(tmp_path: Path, made: Callable[[str], Path]) -> None:
    work, folder = made("qwen3_next"), tmp_path / "target"
    tensors = stored(work / "target")
    for experts in {name.partition("experts.")[0] + "experts." for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}{number}.{part}_proj.weight") for number in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{experts}gate_up_proj": torch.cat((gate, up), 1), f"{experts}down_proj": down}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((work / "target" / "config.json").read_bytes())
    convert_checkpoint(str(folder), tmp_path / "heads", format="mtp")
    files = [convert_checkpoint(str(heads), tmp_path / f"{n}.gguf", to="gguf", target=str(work / "target.gguf"))
             for n, heads in enumerate((work / "heads", tmp_path / "heads"))]  # fmt: skip
    one, two = ({t.name: t.load() for t in read_gguf(file).tensors} for file in files)
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_other_states_and_copies_of_tables_are_named(made: Callable[[str], Path], tmp_path: Path) -> None:
    work = made("glm4_moe")
    whole, _ = put_heads_back(str(work / "heads"), str(work / "target.gguf"), tmp_path / "whole.gguf")
    assert names_found(whole) == {"gguf-head-states"}
    reader, copies = gguf.GGUFReader(whole), tmp_path / "copies.gguf"
    writer = gguf.GGUFWriter(copies, "glm4moe")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(f"blk.{LAYERS}.nextn.embed_tokens.weight", np.ones((pico.VOCABULARY, pico.HIDDEN), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert names_found(copies) == {"gguf-head-states", "gguf-head-copies"}
    heads = convert_checkpoint(str(copies), tmp_path / "heads")
    assert stored(heads).keys() == stored(work / "heads").keys()


def test_what_llama_cpp_does_not_run_is_refused_by_name(tmp_path: Path, made: Callable[[str], Path]) -> None:
    save_with_head("deepseek_v3", tmp_path / "target")
    convert_checkpoint(str(tmp_path / "target"), tmp_path / "heads", format="mtp")
    out, target = tmp_path / "mtp.gguf", str(made("glm4_moe") / "target.gguf")
    with pytest.raises(LayoutError, match="runs no multi-token prediction heads of deepseek_v3"):
        convert_checkpoint(str(tmp_path / "heads"), out, to="gguf", target=target)
    save_with_head("glm4_moe", tmp_path / "two", modules=2)
    convert_checkpoint(str(tmp_path / "two"), tmp_path / "two-heads", format="mtp")
    with pytest.raises(LayoutError, match="runs one head of glm4_moe targets, and there are 2"):
        convert_checkpoint(str(tmp_path / "two-heads"), out, to="gguf", target=target)
    assert not out.exists()
    assert uses_of_heads(KINDS["deepseek_v3"], 1, "deepseek_v3")["llama.cpp"].startswith("none")
    assert "state of a rejected token" in uses_of_heads(KINDS["qwen3_next"], 1, "qwen3_next")["llama.cpp"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - HEADS.keys()))
def test_heads_of_other_targets_are_refused_by_name(kind: str, tmp_path: Path, made: Callable[[str], Path]) -> None:
    """Those that llama.cpp runs and draftkit does not write, and those that neither does."""
    heads = shutil.copytree(made("glm4_moe") / "heads", tmp_path / "heads")
    text = (heads / "config.json").read_text().replace('"model_type": "glm4_moe"', f'"model_type": "{kind}"')
    config = json.loads(text)
    config["draftkit"]["spec"]["architecture"]["parts"] = None  # as of kinds that draftkit does not run
    (heads / "config.json").write_text(json.dumps(config))
    reason = "has not been compared" if kind in WITH_HEADS else "runs no multi-token prediction heads"
    with pytest.raises(LayoutError, match=f"{reason}|of {kind}") as refused:
        convert_checkpoint(str(heads), tmp_path / "mtp.gguf", to="gguf", target=str(made("glm4_moe") / "target.gguf"))
    assert reason in str(refused.value)
    assert f"of {kind}" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_a_file_of_another_target_is_refused(tmp_path: Path, made: Callable[[str], Path]) -> None:
    heads, other = str(made("glm4_moe") / "heads"), made("hy_v3") / "target.gguf"
    with pytest.raises(TargetError, match="is of type hy_v3"):
        convert_checkpoint(heads, tmp_path / "mtp.gguf", to="gguf", target=str(other))
    with pytest.raises(LayoutError, match="is no GGUF file"):
        convert_checkpoint(heads, tmp_path / "mtp.gguf", to="gguf", target=str(made("glm4_moe") / "target"))
    wider = target_file("glm4_moe", tmp_path / "wider.gguf", 2 * pico.HIDDEN)
    with pytest.raises(TargetError, match="128 wide"):
        put_heads_back(heads, str(wider), tmp_path / "whole.gguf")
    with pytest.raises(DraftkitError, match="a GGUF file of its own"):
        put_heads_back(heads, str(made("glm4_moe") / "target.gguf"))


def test_a_file_of_another_writer_needs_its_target(tmp_path: Path, made: Callable[[str], Path]) -> None:
    work = made("hy_v3")
    apart = convert_checkpoint(str(work / "heads"), tmp_path / "m.gguf", to="gguf", target=str(work / "target.gguf"))
    data = apart.read_bytes()  # keys of the same length that nobody knows
    (tmp_path / "other.gguf").write_bytes(data.replace(b"draftkit.config", b"strangers.confi").replace(b"draftkit.weights", b"strangers.weight"))  # fmt: skip # noqa: E501
    with pytest.raises(FormatError, match="does not say of which target"):
        convert_checkpoint(str(tmp_path / "other.gguf"), tmp_path / "back")
    target = str(work / "target")
    after = stored(convert_checkpoint(str(tmp_path / "other.gguf"), tmp_path / "back", target=target))
    before = stored(work / "heads")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor.float(), after[name].float()) for name, tensor in before.items())


def test_the_command_line_says_how_each_file_is_served(
    draftkit: Command, tmp_path: Path, made: Callable[[str], Path]
) -> None:
    heads, target = made("glm4_moe") / "heads", made("glm4_moe") / "target.gguf"
    apart, whole = tmp_path / "mtp.gguf", tmp_path / "whole.gguf"
    said = draftkit("convert", heads, apart, "--to", "gguf", "--target", target)
    assert f"-md {apart} --spec-type draft-mtp --spec-draft-n-max" in said.out, said.err
    said = draftkit("convert", heads, whole, "--into", target)
    assert f"llama-server -m {whole} --spec-type draft-mtp --spec-draft-n-max 3" in said.out, said.err
    assert json.loads(draftkit("inspect", whole, "--json").out)["format"] == "gguf-mtp"
