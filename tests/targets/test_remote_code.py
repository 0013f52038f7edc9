"""Python code that comes with a model runs when the user says so, and never because transformers asks."""

from __future__ import annotations

import ast
import io
import json
import shutil
from pathlib import Path

import pytest
from conftest import Command
from transformers import dynamic_module_utils

import draftkit as package
from draftkit.runtime.architecture_check import Decoding, decoding_of
from draftkit.targets.pretrained import read_config, trust_remote_code

TOKENIZER_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

(Path(__file__).parent / "has_run").touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

(Path(__file__).parent / "has_run").touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where transformers puts the code that it runs, and a terminal at which the user says yes to everything."""
    folder = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def own_tokenizer(tmp_path: Path, running_target: Path) -> Path:
    """A model whose tokenizer is a class of its own."""
    folder = shutil.copytree(running_target, tmp_path / "own-tokenizer")
    (folder / "own_tokenizer.py").write_text(TOKENIZER_CODE)
    path = folder / "tokenizer_config.json"
    names = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    return _change_config(folder, {"model_type": "unheard-of"}, TOKENIZER_CODE)


@pytest.fixture
def own_model(tmp_path: Path, running_target: Path) -> Path:
    """A model whose config and causal LM are classes of its own."""
    folder = shutil.copytree(running_target, tmp_path / "own-model")
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    return _change_config(folder, {"model_type": "own", "architectures": ["OwnModel"], "auto_map": names}, MODEL_CODE)


def _change_config(folder: Path, changes: dict[str, object], code: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (folder / "own.py").write_text(code)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a b c"}) + "\n")
    return path


def has_run(modules: Path) -> bool:
    return any(modules.rglob("has_run"))


def test_no_code_of_a_tokenizer_runs(
    draftkit: Command, modules: Path, own_tokenizer: Path, rows: Path, tmp_path: Path
) -> None:
    arguments = ("data", "prepare", rows, tmp_path / "samples.jsonl", "--target", own_tokenizer)
    ran = draftkit(*arguments)
    assert ran.code == 1
    assert "--trust-remote-code" in ran.err
    assert not has_run(modules)
    ran = draftkit(*arguments, "--trust-remote-code")
    assert (ran.code, has_run(modules)) == (0, True), ran.err


@pytest.mark.slow
def test_no_code_of_a_model_runs(draftkit: Command, modules: Path, own_model: Path) -> None:
    arguments = (
        "eval",
        "--target",
        own_model,
        "--draft",
        "ngram",
        "--dataset",
        "zoo",
        "--limit",
        1,
        "--max-new-tokens",
        4,
    )
    ran = draftkit(*arguments)
    assert ran.code == 1
    assert "--trust-remote-code" in ran.err
    assert not has_run(modules)
    ran = draftkit(*arguments, "--trust-remote-code")
    assert (ran.code, has_run(modules)) == (0, True), ran.err
    ran = draftkit(*arguments)
    assert ran.code == 1, "trust ends with the command"


def test_a_class_that_comes_with_a_model_is_held_against_generate(
    tmp_path: Path, modules: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each text of its code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with trust_remote_code():
        assert decoding_of(read_config(own_model)) == Decoding("equal")
        (own_model / "own.py").write_text(MODEL_CODE + "    # changed\n")
        assert decoding_of(read_config(own_model)) == Decoding("equal")
    assert len(list((tmp_path / "draftkit" / "architectures").iterdir())) == 2


def test_a_vocabulary_is_planned_without_code(
    draftkit: Command, modules: Path, own_model: Path, running_target: Path, rows: Path, tmp_path: Path
) -> None:
    samples = tmp_path / "samples.jsonl"
    assert draftkit("data", "prepare", rows, samples, "--target", running_target).code == 0
    arguments = ("--recipe", "eagle3", "--target", own_model, "--data", samples, "--out", tmp_path / "run")
    assert draftkit("train", *arguments, "--plan-vocab").code == 0
    assert not has_run(modules)


LOADERS = {
    (name, method)
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")
    for method in ("from_pretrained", "from_config")
}


@pytest.mark.long
def test_every_loader_is_told() -> None:
    """Without the argument, transformers would ask."""
    untold = []
    for path in Path(package.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner = call.func.value
            if not (isinstance(owner, ast.Name) and (owner.id, call.func.attr) in LOADERS):
                continue
            if "trust_remote_code" not in {keyword.arg for keyword in call.keywords}:
                untold.append(f"{path}:{call.lineno}")
    assert not untold
