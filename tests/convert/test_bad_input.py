"""Bad input, through the command line: one short message, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, Outcome
from fixtures.checkpoints import pico
from fixtures.checkpoints.bad import SOURCES, TARGETS, eagle, eagle3

from draftkit.convert.api import convert_checkpoint


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


@pytest.mark.slow
@pytest.mark.few(12)
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
