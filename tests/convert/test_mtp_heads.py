"""Multi-token prediction heads in a target's checkpoint: what is wrong with them, taken out, put back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints.mtp_targets import HEADS, save_with_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftkit.convert.api import convert_checkpoint, put_heads_back, target_with_heads
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, LayoutError
from draftkit.layout.folder import read_draft
from draftkit.report.terminal.conversion import findings_of_heads

FILE = "model.safetensors"
EXPERTS = "deepseek_v3"


@pytest.fixture(scope="module", params=sorted(HEADS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(request.param, tmp_path_factory.mktemp(request.param)).folder


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(EXPERTS, tmp_path_factory.mktemp("experts")).folder


@pytest.fixture
def copy(with_experts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(with_experts, tmp_path / "copy"))


def found_in(folder: Path, *, read: bool = True) -> dict[str, str]:
    """The findings that are no praise: name → message."""
    seen = target_with_heads(str(folder))
    assert seen is not None
    return {f.name: f.message for f in findings_of_heads(*seen, read=read) if f.severity != "ok"}


def changed(folder: Path, **tensors: Tensor | None) -> None:
    """Other tensors, by the ends of their names; None for one that is gone."""
    stored = load_file(folder / FILE)
    for end, tensor in tensors.items():
        (name,) = (n for n in stored if n.startswith(HEADS[EXPERTS].layer) and n.endswith(end.replace("__", ".")))
        del stored[name]
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / FILE, {"format": "pt"})


def split(folder: Path) -> None:
    """The weights in two shards, of which one has no tensor of the head."""
    stored = load_file(folder / FILE)
    own = {n: t for n, t in stored.items() if n.startswith((HEADS[EXPERTS].layer, "model.layers.7."))}
    shards = {
        "model-00001.safetensors": {n: t for n, t in stored.items() if n not in own},
        "model-00002.safetensors": own,
    }
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in stored.values())},
        "weight_map": {name: shard for shard, tensors in shards.items() for name in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / FILE).unlink()


def without_head(folder: Path) -> None:
    stored = load_file(folder / FILE)
    save_file({n: t for n, t in stored.items() if not n.startswith(HEADS[EXPERTS].layer)}, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))


def test_a_sound_head_has_no_findings(target: Path) -> None:
    assert found_in(target) == {}


def test_inspect_says_what_there_is(with_experts: Path, draftkit: Command) -> None:
    shown = json.loads(draftkit("inspect", with_experts, "--json").out)
    assert (shown["format"], shown["promised"], shown["held"]) == ("target", 1, 1)
    assert shown["like"] == "model.layers.7."
    assert set(shown["engines"]) == {"vLLM", "SGLang", "transformers 5.23", "llama.cpp"}
    assert "it zeroes no embedding, vLLM the first" in shown["engines"]["transformers 5.23"]
    assert "--part mtp" in (out := draftkit("inspect", with_experts).out)
    assert "to read the numbers too" in out
    assert "to read the numbers too" not in draftkit("inspect", with_experts, "--check").out


@pytest.mark.parametrize(
    ("tensors", "name", "words"),
    [
        ({"mlp__shared_experts__up_proj.weight": None}, "head-tensors-missing", "the shared expert among them"),
        ({"eh_proj.weight": None}, "head-tensors-missing", "eh_proj.weight"),
        ({"hnorm.weight": torch.ones(3)}, "head-shapes", "[3]"),
        ({"eh_proj.weight": torch.full((64, 128), torch.nan)}, "heads-not-finite", "8,192 NaN"),
        ({"mlp__gate.weight": torch.zeros(4, 64)}, "heads-zero", "mlp.gate.weight"),
    ],
)
def test_damaged_heads(copy: Path, tensors: dict[str, Tensor | None], name: str, words: str) -> None:
    changed(copy, **tensors)
    found = found_in(copy)
    assert set(found) == {name}
    assert words in found[name]


def test_headers_alone_do_not_tell_nan(copy: Path) -> None:
    changed(copy, **{"eh_proj.weight": torch.full((64, 128), torch.nan)})
    assert found_in(copy, read=False) == {}


def test_a_head_that_is_promised_and_not_there(copy: Path) -> None:
    stored = load_file(copy / FILE)
    save_file({n: t for n, t in stored.items() if not n.startswith(HEADS[EXPERTS].layer)}, copy / FILE)
    assert "the weights hold none" in found_in(copy)["heads-missing"]


def test_a_head_that_is_there_and_not_promised(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert "heads-not-promised" in found_in(copy)


def quantized(folder: Path, *, head: bool, ignore: list[str]) -> None:
    """The matrices of the decoder layers in fp8, with scales."""
    stored = load_file(folder / FILE)
    for name in [n for n, t in stored.items() if ".mlp." in n and n.endswith("proj.weight")]:
        if head or not name.startswith(HEADS[EXPERTS].layer):
            stored[name] = stored[name].to(torch.float8_e4m3fn)
            stored[name.replace(".weight", ".weight_scale")] = torch.ones(())
    save_file(stored, folder / FILE, {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "ignore": ignore}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("head", "ignore", "name"),
    [
        (False, [], "heads-not-quantized"),
        (False, ["re:.*layers\\.8\\..*"], None),
        (False, ["model.layers.8"], None),
        (True, [], None),
        (True, ["re:.*layers\\.8\\..*"], "heads-quantized"),
    ],
)
def test_heads_beside_a_quantized_target(copy: Path, head: bool, ignore: list[str], name: str | None) -> None:
    quantized(copy, head=head, ignore=ignore)
    assert set(found_in(copy)) == ({name} if name else set())


def requantized(folder: Path, end: str, dtype: torch.dtype) -> None:
    """The head's quantized matrices under another name, in another dtype."""
    stored = load_file(folder / FILE)
    for name in [n for n, t in stored.items() if t.dtype == torch.float8_e4m3fn and n.startswith(HEADS[EXPERTS].layer)]:
        matrix = stored.pop(name)
        stored[name.removesuffix("weight") + end] = torch.ones(matrix.shape, dtype=dtype)
    save_file(stored, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize(("end", "dtype"), [("weight", torch.int8), ("weight_packed", torch.uint8)])
def test_heads_quantized_by_another_scheme(copy: Path, end: str, dtype: torch.dtype) -> None:
    quantized(copy, head=True, ignore=[])
    requantized(copy, end, dtype)
    found = found_in(copy)
    assert set(found) == {"heads-quantized-otherwise"}
    assert f"has {end} {'I8' if end == 'weight' else 'U8'}, weight_scale F32, the target's weight F8_E4M3" in "".join(
        found.values()
    )
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"heads": {"targets": ["model.layers.8"]}}
    (copy / "config.json").write_text(json.dumps(config))
    assert found_in(copy) == {}


def test_tensors_that_the_target_has_none_of(copy: Path) -> None:
    stored = load_file(copy / FILE)
    extra = {HEADS[EXPERTS].layer + "self_attn.gate.weight": torch.ones(4)}
    save_file(stored | extra, copy / FILE, {"format": "pt"})
    found = found_in(copy)
    assert set(found) == {"head-tensors-surplus"}
    assert "model.layers.8.self_attn.gate.weight" in found["head-tensors-surplus"]


def test_heads_in_another_dtype(copy: Path) -> None:
    stored = load_file(copy / FILE)
    own = {n: t.half() for n, t in stored.items() if n.startswith(HEADS[EXPERTS].layer)}
    save_file(stored | own, copy / FILE, {"format": "pt"})
    found = found_in(copy)
    assert set(found) == {"head-dtypes"}
    assert "is F16, the target's F32" in found["head-dtypes"]
    projection = HEADS[EXPERTS].projection + ".weight"
    save_file(stored | {projection: stored[projection].half()}, copy / FILE, {"format": "pt"})
    assert found_in(copy)["head-dtypes"].endswith(f"{projection} is F16, the target's F32")


def test_stale_copies_of_the_targets_tables(copy: Path) -> None:
    stored = load_file(copy / FILE)
    table = stored["model.embed_tokens.weight"]
    save_file(stored | {HEADS[EXPERTS].layer + "embed_tokens.weight": table.clone()}, copy / FILE)
    assert found_in(copy) == {}
    save_file(stored | {HEADS[EXPERTS].layer + "embed_tokens.weight": table + 1}, copy / FILE)
    assert set(found_in(copy)) == {"head-copies"}


@pytest.mark.parametrize("sharded", [False, True])
def test_taken_out_and_put_back_nothing_changes(copy: Path, tmp_path: Path, sharded: bool) -> None:
    if sharded:
        split(copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    head = convert_checkpoint(str(copy), tmp_path / "head", format="mtp")
    for out in (tmp_path / "whole", None):
        folder, _ = put_heads_back(str(head), str(copy), out)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_window_of_heads_is_the_unified_layouts_alone(copy: Path, tmp_path: Path) -> None:
    facts = {"sliding_window": "8", "sink_tokens": "2"}
    head = convert_checkpoint(str(copy), tmp_path / "head", format="mtp", overrides=facts)
    spec = read_draft(head).spec
    assert (spec.architecture.windows, spec.architecture.sink_tokens) == ((8,), 2)
    assert "windows of their target" in (refusal_by_vllm(spec) or "")
    with pytest.raises(LayoutError, match="a window of 8 tokens, and beside a target they run with its windows"):
        put_heads_back(str(head), str(copy), tmp_path / "whole")


def test_a_changed_head_changes_its_own_shard_alone(copy: Path, tmp_path: Path) -> None:
    split(copy)
    head = convert_checkpoint(str(copy), tmp_path / "head", format="mtp")
    stored = load_file(head / FILE)
    name = HEADS[EXPERTS].projection + ".weight"
    save_file(stored | {name: stored[name] + 1}, head / FILE, {"format": "pt"})
    folder, written = put_heads_back(str(head), str(copy), tmp_path / "whole")
    assert written == ["model-00002.safetensors"]
    other = "model-00001.safetensors"
    assert (folder / other).samefile(copy / other)
    assert torch.equal(load_file(folder / written[0])[name], stored[name] + 1)
    assert torch.equal(load_file(copy / written[0])[name], stored[name])


@pytest.mark.parametrize("sharded", [False, True])
def test_a_target_that_lost_its_head_gets_it_back(
    copy: Path, with_experts: Path, tmp_path: Path, sharded: bool
) -> None:
    head = convert_checkpoint(str(with_experts), tmp_path / "head", format="mtp")
    without_head(copy)
    if sharded:
        split(copy)
    assert target_with_heads(str(copy)) is None
    folder, _ = put_heads_back(str(head), str(copy))
    assert found_in(folder) == {}
    again = convert_checkpoint(str(folder), tmp_path / "again", format="mtp")
    assert (again / FILE).read_bytes() == (head / FILE).read_bytes()


def test_whoever_edits_the_new_target_leaves_the_old_one_as_it_was(copy: Path, tmp_path: Path) -> None:
    """Weights alone are shared, which are replaced and never written into."""
    split(copy)
    (copy / "assets").mkdir()
    for name in ("tokenizer.json", "assets/logo.svg", "model-00002.safetensors.new", "model.safetensors.new"):
        (copy / name).write_text("the target's own")
    (copy / "config.json").chmod(0o600)
    head = convert_checkpoint(str(copy), tmp_path / "head", format="mtp")
    stored = load_file(head / FILE)
    name = HEADS[EXPERTS].projection + ".weight"
    save_file(stored | {name: stored[name] + 1}, head / FILE, {"format": "pt"})
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    folder, _ = put_heads_back(str(head), str(copy), tmp_path / "whole")
    assert {path.relative_to(folder) for path in folder.rglob("*")} == {p.relative_to(copy) for p in copy.rglob("*")}
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o600
    shared = [path for path in folder.rglob("*") if path.is_file() and path.samefile(copy / path.relative_to(folder))]
    assert shared == [folder / "model-00001.safetensors"]
    for path in folder.rglob("*"):
        if path.is_file() and path not in shared:
            path.write_bytes(b"edited")
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_shard_that_no_index_names_is_not_written_over(copy: Path, with_experts: Path, tmp_path: Path) -> None:
    head = convert_checkpoint(str(with_experts), tmp_path / "head", format="mtp")
    without_head(copy)
    split(copy)
    (copy / "model-mtp.safetensors").write_text("of the user")
    for out in (tmp_path / "whole", None):
        with pytest.raises(DraftkitError, match="its index does not name"):
            put_heads_back(str(head), str(copy), out)
        assert (copy / "model-mtp.safetensors").read_text() == "of the user"
    assert not (tmp_path / "whole").exists()


def dangle(folder: Path) -> Path:
    (folder / "tokenizer.json").symlink_to("gone")
    return folder / "tokenizer.json"


def loop(folder: Path) -> Path:
    (folder / "vocab.txt").symlink_to("vocab.txt")
    return folder / "vocab.txt"


def lead_back(folder: Path) -> Path:
    (folder / "sub").mkdir()
    (folder / "sub" / "up").symlink_to(folder)
    return folder / "sub" / "up"


def lead_above(folder: Path) -> Path:
    (folder / "all").symlink_to(folder.parent)
    return folder / "all"


def make_pipe(folder: Path) -> Path:
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "pipe")
    return folder / "sub" / "pipe"


@pytest.mark.parametrize("spoil", [dangle, loop, lead_back, lead_above, make_pipe])
def test_what_is_no_file_of_a_target_is_named(copy: Path, tmp_path: Path, spoil: Callable[[Path], Path]) -> None:
    head = convert_checkpoint(str(copy), tmp_path / "head", format="mtp")
    odd = spoil(copy)
    for out in (tmp_path / "whole", None):
        with pytest.raises(DraftkitError, match=f"where: {odd}"):
            put_heads_back(str(head), str(copy), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "head"]


@pytest.mark.parametrize("inside", ["out", "deeper/out", "link/out"])
def test_the_output_does_not_lie_in_the_target(copy: Path, tmp_path: Path, inside: str) -> None:
    head = convert_checkpoint(str(copy), tmp_path / "head", format="mtp")
    (copy / "deeper").mkdir()
    (copy / "link").symlink_to("deeper")
    with pytest.raises(DraftkitError, match="lies in the target itself"):
        put_heads_back(str(head), str(copy), copy / inside)
    assert not list((copy / "deeper").iterdir())


def test_a_head_beside_quantized_layers_is_listed_as_left_alone(copy: Path, with_experts: Path, tmp_path: Path) -> None:
    head = convert_checkpoint(str(with_experts), tmp_path / "head", format="mtp")
    without_head(copy)
    quantized(copy, head=False, ignore=["lm_head"])
    folder, written = put_heads_back(str(head), str(copy))
    assert "config.json" in written
    assert found_in(folder) == {}


@pytest.mark.parametrize("stated", [7, True, "fp8", {"ignore": "lm_head"}, {"ignore": {"a": 1}}])
def test_a_quantization_that_is_none_is_named(copy: Path, with_experts: Path, tmp_path: Path, stated: object) -> None:
    head = convert_checkpoint(str(with_experts), tmp_path / "head", format="mtp")
    without_head(copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(DraftkitError, match=r"(quantization_config|ignore) is .*\n.*config.json\n  expected: an? "):
        put_heads_back(str(head), str(copy))


@pytest.mark.parametrize("ignored", [7, "lm_head", ["re:("], None])
def test_a_list_of_what_is_left_alone_that_is_none_names_nothing(copy: Path, ignored: object) -> None:
    quantized(copy, head=False, ignore=ignored)  # type: ignore[arg-type]
    assert set(found_in(copy)) == {"heads-not-quantized"}


def test_heads_of_another_target_are_refused(copy: Path, tmp_path: Path) -> None:
    other = save_with_head("qwen3_next", tmp_path / "qwen").folder
    head = convert_checkpoint(str(other), tmp_path / "head", format="mtp")
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(DraftkitError, match="keeps no heads under mtp"):
        put_heads_back(str(head), str(copy))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_a_damaged_head_is_not_taken_out(copy: Path, tmp_path: Path) -> None:
    changed(copy, **{"mlp__shared_experts__up_proj.weight": None})
    with pytest.raises(DraftkitError, match=r"lack 1 tensors: .*shared_experts\.up_proj"):
        convert_checkpoint(str(copy), tmp_path / "head", format="mtp")
    assert not (tmp_path / "head").exists()


def test_a_model_with_a_head_is_still_a_draft_of_its_own(with_experts: Path, tmp_path: Path) -> None:
    out = convert_checkpoint(str(with_experts), tmp_path / "draft")
    assert not any(name.startswith(HEADS[EXPERTS].layer) for name in load_file(out / FILE))


# --- the schema of heads, wherever they are read

WRONG = {
    "transposed": lambda t: t.T.contiguous(),
    "bool": lambda t: t.bool(),
    "int8": lambda t: t.to(torch.int8),
    "a row less": lambda t: t[:-1].clone(),
    "missing": lambda t: None,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("part", ["projection", "attention"])
def test_heads_are_read_by_a_schema(target: Path, part: str, wrong: str, tmp_path: Path) -> None:
    """In a target, alone, and in the layout, of every kind that draftkit runs."""
    heads = convert_checkpoint(str(target), tmp_path / "heads", format="mtp")
    whole, own = load_file(target / FILE), load_file(heads / FILE)
    ends = {"projection": ("eh_proj.weight", "fc.weight", "input_proj.weight"),
            "attention": ("kv_b_proj.weight", "k_proj.weight", "q_proj.weight")}[part]  # fmt: skip
    name = next(name for name in own if name.endswith(ends) and own[name].shape[0] != own[name].shape[1])
    changed = WRONG[wrong](own[name])
    for source, tensors, how in ((target, whole, "mtp"), (target, own, None), (heads, own, None)):
        folder = tmp_path / f"{source.name}-{len(tensors)}-{how}"
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        rest = {n: t for n, t in tensors.items() if n != name}
        save_file(rest | ({} if changed is None else {name: changed}), folder / FILE, {"format": "pt"})
        with pytest.raises(DraftkitError) as refused:
            convert_checkpoint(str(folder), tmp_path / "out", format=how)
        assert name in str(refused.value)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "value"), [("hidden_size", True), ("vocab_size", True), ("num_hidden_layers", True),
                                            ("num_nextn_predict_layers", True), ("num_nextn_predict_layers", 10**9),
                                            ("n_routed_experts", 10**9), ("kv_lora_rank", "32")])  # fmt: skip
def test_sizes_that_are_none(copy: Path, tmp_path: Path, key: str, value: object) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(DraftkitError):
        convert_checkpoint(str(copy), tmp_path / "head", format="mtp")


def test_numbers_that_are_not_finite_are_not_put_back(copy: Path, tmp_path: Path) -> None:
    head = convert_checkpoint(str(copy), tmp_path / "head", format="mtp")
    stored, name = load_file(head / FILE), HEADS[EXPERTS].projection + ".weight"
    stored[name][0, 0] = torch.nan
    save_file(stored, head / FILE, {"format": "pt"})
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(DraftkitError, match="1 NaN"):
        put_heads_back(str(head), str(copy))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite"])
def test_heads_of_another_family_in_the_same_place_are_refused(copy: Path, tmp_path: Path, kind: str) -> None:
    """Their parts are called as those of the target's own."""
    other = save_with_head(kind, tmp_path / "other").folder
    head = convert_checkpoint(str(other), tmp_path / "head", format="mtp")
    with pytest.raises(DraftkitError, match=f"of a target of type {kind}, and .*copy is of type {EXPERTS}"):
        put_heads_back(str(head), str(copy), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
