"""Bad input, through the command line: one short message, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, Outcome
from fixtures.checkpoints import pico

from draftkit.convert.api import convert_checkpoint

Build = Callable[[Path], object]


def assert_refused(ran: Outcome, *problems: str) -> None:
    """One known failure: exit code 1, nothing on stdout, and one short message that names every problem."""
    assert ran.code == 1, ran.err
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert ran.err.count("error: ") == 1
    assert "Traceback" not in ran.err
    assert len(ran.err.splitlines()) <= 10
    for problem in problems:
        assert problem in ran.err


# --- sources: every one is refused by `convert` and by `inspect` alike


def eagle(*, safetensors: bool = False, drop: tuple[str, ...] = (), **config: object) -> Build:
    """An EAGLE-1 checkpoint with other config values and without the keys to drop."""

    def build(folder: Path) -> None:
        values = {key: value for key, value in pico.eagle_config(**config).items() if key not in drop}
        pico.write_checkpoint(folder, values, pico.eagle_tensors(), safetensors=safetensors)

    return build


def eagle_with(**tensors: torch.Tensor | None) -> Build:
    """An EAGLE-1 checkpoint with some tensors replaced (None: missing); `__` in a name stands for a dot."""

    def build(folder: Path) -> None:
        changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        changed = {name: tensor for name, tensor in (pico.eagle_tensors() | changes).items() if tensor is not None}
        pico.write_checkpoint(folder, pico.eagle_config(), changed)

    return build


def eagle_file(file: str, content: bytes | str) -> Build:
    """An EAGLE-1 checkpoint with a file written over."""

    def build(folder: Path) -> None:
        eagle(safetensors=file.endswith(".safetensors"))(folder)
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return build


def truncated(file: str, keep: float) -> Build:
    """An EAGLE-1 checkpoint whose weight file ends early."""

    def build(folder: Path) -> None:
        eagle(safetensors=file.endswith(".safetensors"))(folder)
        os.truncate(folder / file, int((folder / file).stat().st_size * keep))

    return build


def without(file: str) -> Build:
    def build(folder: Path) -> None:
        eagle()(folder)
        (folder / file).unlink()

    return build


def causal_lm(**config: object) -> Build:
    def build(folder: Path) -> None:
        pico.save_llama(folder, num_hidden_layers=1)
        written = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(written))

    return build


def eagle3(**config: object) -> Build:
    return lambda folder: pico.write_checkpoint(folder, pico.eagle3_config(**config), pico.eagle3_tensors())


HALF = torch.float16
SOURCES: dict[str, tuple[Build, tuple[str, ...]]] = {
    "no folder": (lambda folder: None, ("there is no folder", "source")),
    "a file": (lambda folder: folder.write_text(""), ("is a file", "pass the folder")),
    "an empty folder": (lambda folder: folder.mkdir(), ("config.json is missing",)),
    "no config": (without("config.json"), ("config.json is missing",)),
    "no weights": (without("pytorch_model.bin"), ("holds no weights", "model.safetensors", "pytorch_model.bin")),
    "config is not JSON": (eagle_file("config.json", '{"hidden_size": 64'), ("config.json is not valid JSON",)),
    "config is binary": (eagle_file("config.json", b"\xff\xfe\x00\xff"), ("config.json is not valid JSON",)),
    "config is a list": (eagle_file("config.json", "[1, 2]"), ("config.json holds list, not an object",)),
    "no hidden_size": (eagle(hidden_size=None), ("config key hidden_size is missing", "config.json")),
    "hidden_size is text": (eagle(hidden_size="64"), ("config key hidden_size is '64'", "expected: int")),
    "hidden_size is true": (eagle(hidden_size=True), ("config key hidden_size is True", "expected: int")),
    "no heads": (eagle(num_attention_heads=0), ("config key num_attention_heads is 0", "a positive integer")),
    "negative layers": (eagle(intermediate_size=-96), ("config key intermediate_size is -96",)),
    "no key heads": (eagle(num_key_value_heads=0), ("config key num_key_value_heads is 0",)),
    "no vocabulary": (eagle(vocab_size=0), ("config key vocab_size is 0",)),
    "layers are text": (eagle(num_hidden_layers="one"), ("config key num_hidden_layers is 'one'",)),
    "rope_theta is text": (eagle(rope_theta="big"), ("config key rope_theta is 'big'", "expected: float")),
    "nested rope_theta is text": (eagle(rope_parameters={"rope_theta": "big"}), ("config key rope_theta is 'big'",)),
    "rope_scaling is text": (eagle(rope_scaling="linear"), ("config key rope_scaling is 'linear'", "an object")),
    "unknown config key": (eagle(attn_temperature=2), ("attn_temperature: 2", "--ignore-key KEY")),
    "unknown format": (
        lambda folder: pico.write_checkpoint(folder, {}, {"a.weight": torch.ones(2)}),
        ("no known draft format", "a.weight", "draftkit formats"),
    ),
    "no tensors": (lambda folder: pico.write_checkpoint(folder, {}, {}), ("no known draft format",)),
    "truncated .bin": (truncated("pytorch_model.bin", 0.9), ("pytorch_model.bin is truncated or damaged",)),
    "half a .bin": (truncated("pytorch_model.bin", 0.5), ("pytorch_model.bin is truncated or damaged",)),
    "empty .bin": (truncated("pytorch_model.bin", 0), ("pytorch_model.bin is truncated or damaged",)),
    "truncated .safetensors": (truncated("model.safetensors", 0.9), ("model.safetensors is truncated or damaged",)),
    "empty .safetensors": (truncated("model.safetensors", 0), ("model.safetensors is truncated or damaged",)),
    "Git LFS pointer": (
        eagle_file("pytorch_model.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ("Git LFS pointer", "git lfs pull"),
    ),
    "wrong shapes": (
        eagle_with(
            layers__0__mlp__up_proj__weight=torch.zeros(95, 64, dtype=HALF),
            embed_tokens__weight=torch.zeros(319, 64, dtype=HALF),
        ),
        (
            "wrong shape: layers.0.mlp.up_proj.weight is [95, 64], expected [96, 64]",
            "wrong shape: embed_tokens.weight is [319, 64], expected [320, 64]",
        ),
    ),
    "wrong dtype": (
        eagle_with(layers__0__mlp__up_proj__weight=torch.zeros(96, 64, dtype=torch.int8)),
        ("wrong dtype: layers.0.mlp.up_proj.weight is I8",),
    ),
    "missing and unexpected tensors": (
        eagle_with(
            layers__0__self_attn__o_proj__weight=None,
            layers__0__mlp__down_proj__weight=None,
            norm__weight=torch.ones(64, dtype=HALF),
        ),
        (
            "missing: layers.0.self_attn.o_proj.weight [64, 64]",
            "missing: layers.0.mlp.down_proj.weight [64, 96]",
            "unexpected: norm.weight [64]",
        ),
    ),
    "q_proj is a vector": (
        eagle_with(layers__0__self_attn__q_proj__weight=torch.zeros(64, dtype=HALF)),
        ("layers.0.self_attn.q_proj.weight has shape [64]", "a matrix"),
    ),
    "heads that do not divide": (eagle(num_attention_heads=3), ("wrong shape: layers.0.self_attn.q_proj.weight",)),
    "EAGLE-3 of another width": (
        eagle3(target_hidden_size=100),
        ("fc.weight has 192 columns", "no multiple of the target's width 100", "target_hidden_size"),
    ),
    "causal LM of no known type": (causal_lm(model_type="no-such-model"), ("model_type 'no-such-model'",)),
    "causal LM without heads": (causal_lm(num_attention_heads=0), ("config key num_attention_heads is 0",)),
    "causal LM of another width": (
        causal_lm(intermediate_size=95),
        ("wrong shape: model.layers.0.mlp.up_proj.weight is [96, 64], expected [95, 64]",),
    ),
}


@pytest.mark.slow
@pytest.mark.few(37)
@pytest.mark.parametrize("verb", ["convert", "inspect"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_bad_source_is_refused(name: str, verb: str, draftkit: Command, tmp_path: Path) -> None:
    build, problems = SOURCES[name]
    build(tmp_path / "source")
    (tmp_path / "parent").mkdir()
    out = [tmp_path / "parent" / "out"] if verb == "convert" else ["--json"]
    ran = draftkit(verb, tmp_path / "source", *out)
    if verb == "inspect" and ran.out:  # what can be read is described all the same
        assert {"format", "facts", "tensors"} <= json.loads(ran.out).keys()
        ran = replace(ran, out="")
    assert_refused(ran, *problems)
    assert list((tmp_path / "parent").iterdir()) == []


class Bomb:
    """A pickle of this creates the file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


HOSTILE: dict[str, tuple[Callable[[object, Path], object], tuple[str, ...]]] = {
    "zip": (torch.save, ("loading pytorch_model.bin would run code", "posix.mkdir", "safetensors")),
    "before zip": (partial(torch.save, _use_new_zipfile_serialization=False), ("would run code", "posix.mkdir")),
    "plain pickle": (lambda value, path: path.write_bytes(pickle.dumps(value)), ("pytorch_model.bin",)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_named(name: str, draftkit: Command, tmp_path: Path) -> None:
    write, problems = HOSTILE[name]
    eagle()(tmp_path / "source")
    write(pico.eagle_tensors() | {"x": Bomb(tmp_path / "proof")}, tmp_path / "source" / "pytorch_model.bin")
    assert_refused(draftkit("convert", tmp_path / "source", tmp_path / "out"), *problems)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


# --- targets


def other_target(without: Sequence[str] = (), **changes: object) -> Build:
    def build(folder: Path) -> None:
        pico.save_target_config(folder, **changes)
        config = json.loads((folder / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in without}
        (folder / "config.json").write_text(json.dumps(config))

    return build


TARGETS: dict[str, tuple[Build, Build, tuple[str, ...]]] = {
    "another hidden size and vocabulary": (
        eagle(),
        other_target(hidden_size=96, vocab_size=640),
        ("the draft reads 64, the target has 96", "the draft has 320 tokens, the target 640"),
    ),
    "another hidden size, EAGLE-3": (
        eagle3(),
        other_target(hidden_size=96),
        ("the draft reads 64, the target has 96", "--target"),
    ),
    "no number of layers": (
        eagle3(),
        other_target(without=["num_hidden_layers", "model_type"]),
        ("no usable num_hidden_layers (found None)",),
    ),
    "too few layers": (eagle3(), other_target(num_hidden_layers=6), ("has 6 layers", "at least 7")),
    "no config": (eagle3(), lambda folder: folder.mkdir(), ("config.json is missing",)),
    "no folder": (eagle3(), lambda folder: None, ("there is no folder",)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_does_not_fit_is_refused(name: str, draftkit: Command, tmp_path: Path) -> None:
    source, target, problems = TARGETS[name]
    source(tmp_path / "source")
    target(tmp_path / "target")
    ran = draftkit("convert", tmp_path / "source", tmp_path / "parent" / "out", "--target", tmp_path / "target")
    assert_refused(ran, *problems)
    assert not (tmp_path / "parent").exists()


def test_eagle3_needs_its_target(draftkit: Command, tmp_path: Path) -> None:
    eagle3()(tmp_path / "source")
    ran = draftkit("convert", tmp_path / "source", tmp_path / "out")
    assert_refused(ran, "does not state aux_layer_ids", "--target")
    assert not (tmp_path / "out").exists()
    seen = draftkit("inspect", tmp_path / "source")
    assert seen.code == 0
    assert "missing: aux_layer_ids" in seen.out


# --- other arguments


@pytest.mark.parametrize("content", [{"notes.txt": "mine"}, None], ids=["a folder", "a file"])
def test_an_existing_output_is_kept(content: dict[str, str] | None, draftkit: Command, tmp_path: Path) -> None:
    eagle()(tmp_path / "source")
    out = tmp_path / "out"
    if content is None:
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    problem = "the output is a file" if content is None else "the output is already there"
    assert_refused(draftkit("convert", tmp_path / "source", out), problem)
    assert_refused(draftkit("convert", tmp_path / "source", out, "--force"), problem)
    assert (out if content is None else out / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["zoo:nothing"], "the zoo has no model 'nothing'"),
        (["org"], "neither a folder nor a Hub id"),
        (["SOURCE", "--revision", "main"], "has no revisions"),
        (["SOURCE", "--target", "zoo:nothing"], "the zoo has no model"),
    ],
    ids=str,
)
def test_a_name_of_nothing_is_refused(arguments: list[str], problem: str, draftkit: Command, tmp_path: Path) -> None:
    eagle()(tmp_path / "source")
    given = [str(tmp_path / "source") if argument == "SOURCE" else argument for argument in arguments]
    assert_refused(draftkit("inspect", *given), problem)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["eval", "--target", "t", "--draft", "d", "--k", "0"], "--k"),
        (["eval", "--target", "t", "--draft", "d", "--limit", "0"], "--limit"),
        (["eval", "--target", "t", "--draft", "d", "--dtype", "float8"], "--dtype"),
        (["eval", "--target", "t"], "--draft"),
        (["convert"], "source"),
        (["convert", "source", "--fast"], "--fast"),
        (["transmogrify"], "transmogrify"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], named: str, draftkit: Command) -> None:
    ran = draftkit(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err
    assert "Traceback" not in ran.err


# --- eval


@pytest.fixture(scope="module")
def models(running_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft for it, and targets that cannot run or do not fit."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "target").symlink_to(running_target)
    eagle()(folder / "draft")
    convert_checkpoint(str(folder / "draft"), folder / "unified")
    pico.save_tokenizer(pico.save_llama(folder / "other-target", hidden_size=32, num_hidden_layers=1))
    pico.save_tokenizer(pico.save_target_config(folder / "no-weights"))
    pico.save_llama(folder / "no-tokenizer", num_hidden_layers=1)
    return folder


def evaluate(draftkit: Command, models: Path, target: str, draft: str, *arguments: object) -> Outcome:
    return draftkit(
        "eval", "--target", models / target, "--draft", models / draft, "--dataset", "zoo", "--json", *arguments
    )


PROMPTS = {
    "missing": (None, ("prompts cannot be read", "--dataset zoo")),
    "empty": ("\n\n", ("holds no prompts",)),
    "not JSON": ('{"prompt": "a"}\n\n{"prompt": \n', ("not valid JSON", "prompts.jsonl, line 3")),
    "no prompt": ('{"prompt": "a"}\n{"words": "b"}\n', ("no known shape", "prompts.jsonl, line 2")),
    "not an object": ("[]\n", ("holds list", "prompts.jsonl, line 1")),
    "not text": (b"\xff\xfe\x80", ("not valid JSON", "codec")),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_bad_prompts_are_refused(name: str, models: Path, draftkit: Command, tmp_path: Path) -> None:
    content, problems = PROMPTS[name]
    prompts = tmp_path / "prompts.jsonl"
    if content is not None:
        prompts.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(evaluate(draftkit, models, "target", "draft", "--prompts", prompts), *problems)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "draft", "problem"),
    [
        ("other-target", "draft", "the draft reads 64, the target has 32"),
        ("other-target", "unified", "the draft is for a target with 64 hidden states; this one has 32"),
        ("target", "nothing", "there is no folder"),
        ("nothing", "draft", "there is no folder"),
        ("no-weights", "draft", "cannot load the target"),
        ("no-tokenizer", "draft", "the target has no tokenizer"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    target: str, draft: str, problem: str, models: Path, draftkit: Command, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    before = sorted(models.rglob("*"))
    arguments = ("--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 2)
    assert_refused(evaluate(draftkit, models, target, draft, *arguments), problem)
    assert sorted(models.rglob("*")) == before


@pytest.mark.long
def test_libraries_add_nothing_to_the_message(models: Path, tmp_path: Path) -> None:
    """In a process of its own, where transformers' log and progress bars would reach stderr."""
    arguments: list[Any] = ["eval", "--target", models / "target", "--draft", models / "draft", "--prompts", "nothing"]
    command = [sys.executable, "-c", "from draftkit.cli import main; main()", *map(str, arguments)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert_refused(Outcome(ran.returncode, ran.stdout, ran.stderr), "the prompts cannot be read")


def work_tree(out: Path, source: Path) -> Path:
    (out / ".git").mkdir(parents=True)
    return out


def clone_of_a_draft(out: Path, source: Path) -> Path:
    convert_checkpoint(str(source), out)
    (out / ".git").mkdir()
    return out


def other_model(out: Path, source: Path) -> Path:
    shutil.copytree(source, out)
    return out


def the_source(out: Path, source: Path) -> Path:
    return source


@pytest.mark.parametrize("make", [work_tree, clone_of_a_draft, other_model, the_source])
def test_force_replaces_nothing_of_others(
    make: Callable[[Path, Path], Path], draftkit: Command, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    eagle()(source)
    out = make(tmp_path / "out", source)
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    for to in ("unified", "eagle"):
        assert_refused(draftkit("convert", source, out, "--to", to, "--force"), f"where: {out}")
    assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_force_replaces_what_draftkit_wrote(draftkit: Command, tmp_path: Path) -> None:
    eagle()(tmp_path / "source")
    for to in ("unified", "eagle", "unified"):
        assert draftkit("convert", tmp_path / "source", tmp_path / "out", "--to", to, "--force").code == 0
    assert_refused(
        draftkit("convert", tmp_path / "out", tmp_path / "out", "--to", "eagle", "--force"), "the source itself"
    )


def test_the_input_is_not_replaced(draftkit: Command, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "some text"}\n')
    for command in (("data", "prepare", rows, rows, "--target", "zoo:target"), ("report", rows, "--out", rows)):
        assert_refused(draftkit(*command, "--force"), "one of the inputs")
    assert rows.read_text() == '{"text": "some text"}\n'


@pytest.mark.slow
@pytest.mark.parametrize("depth", [200, 10_000, 1_000_000])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_that_nest_without_end_are_refused(depth: int, suffix: str, draftkit: Command, tmp_path: Path) -> None:
    rows = tmp_path / f"rows{suffix}"
    rows.write_text('[{"text": ' * (suffix == ".json") + "[" * depth + "]" * depth + "}]" * (suffix == ".json"))
    assert_refused(draftkit("data", "prepare", rows, tmp_path / "out", "--target", "zoo:target"), "not valid JSON")
    assert_refused(
        draftkit("eval", "--target", "zoo:target", "--draft", "zoo:eagle", "--prompts", rows), "not valid JSON"
    )
