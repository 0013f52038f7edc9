"""Whatever the JSON of a checkpoint says, a conversion gives a whole draft or a `DraftkitError`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import pico
from fixtures.fuzzing.judge import Kind
from fixtures.fuzzing.mutate import HOSTILE, WRONG, nested, possible_keys
from fixtures.fuzzing.robust import Outcome, attempt, inspect, sandbox

import draftkit
from draftkit import convert_checkpoint
from draftkit.errors import FormatError
from draftkit.io.handles import TensorToWrite
from draftkit.io.safetensors_file import write_safetensors
from draftkit.io.tensors import open_checkpoint
from scripts.attack import fuzz


@pytest.fixture(scope="module", autouse=True)
def in_sandbox() -> Iterator[None]:
    with sandbox():
        yield


# --- sources of each format


@dataclass(frozen=True)
class Sample:
    """A sound checkpoint: a folder with model.safetensors, its config, and the target that it needs."""

    folder: Path
    config: dict[str, Any]
    target: Path | None

    def run(self, verb: Callable[[Path, Path | None], Outcome], config: object) -> Outcome:
        """`attempt` or `inspect` it with another config."""
        changed = self.folder.with_name(f"{self.folder.name}-changed")
        if not changed.exists():
            changed.mkdir()
            (changed / "model.safetensors").symlink_to(self.folder / "model.safetensors")
        (changed / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return verb(changed, self.target)


FORMATS = ("eagle", "eagle3", "causal-lm")


@pytest.fixture(scope="module")
def samples(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    folder = tmp_path_factory.mktemp("samples")
    pico.write_checkpoint(folder / "eagle", pico.eagle_config(), pico.eagle_tensors(), safetensors=True)
    pico.write_checkpoint(folder / "eagle3", pico.eagle3_config(), pico.eagle3_tensors(), safetensors=True)
    pico.save_llama(folder / "causal-lm", num_hidden_layers=1)
    return {
        name: Sample(
            folder / name,
            json.loads((folder / name / "config.json").read_text()),
            target if name == "eagle3" else None,
        )
        for name in FORMATS
    }


def test_the_samples_are_sound(samples: dict[str, Sample]) -> None:
    for sample in samples.values():
        assert sample.run(attempt, sample.config) is None


# --- configs


CODE = Path(draftkit.__file__).parent
FORMAT_KEYS = possible_keys(CODE / "convert")
CAUSAL_LM_KEYS = possible_keys(CODE / "layout" / "decoder.py", CODE / "layout" / "schema.py")  # it takes any others
TARGET_KEYS = possible_keys(CODE / "layout" / "target.py")


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_value_for_any_config_key(format: str, samples: dict[str, Sample]) -> None:
    sample = samples[format]
    possible = sample.config.keys() | (CAUSAL_LM_KEYS if format == "causal-lm" else FORMAT_KEYS)
    assert {"vocab_size", "hidden_act", "rope_scaling"} < possible
    unknown = {key for key in possible if "does not define" in str(sample.run(inspect, sample.config | {key: 1}))}
    keys = sorted(possible - unknown)
    assert len(keys) > 20
    for wrong in WRONG.values():
        accepted = [key for key in keys if sample.run(inspect, sample.config | {key: wrong}) is None]
        sample.run(attempt, sample.config | dict.fromkeys(accepted, wrong))


def test_a_wrong_value_for_any_config_key_of_the_target(
    samples: dict[str, Sample], target: Path, tmp_path: Path
) -> None:
    assert {"hidden_size", "vocab_size", "num_hidden_layers", "text_config"} < TARGET_KEYS
    config = json.loads((target / "config.json").read_text())
    for key in sorted(TARGET_KEYS):
        for wrong in (WRONG | HOSTILE).values():
            (tmp_path / "config.json").write_text(json.dumps(config | {key: wrong}))
            inspect(samples["eagle3"].folder, tmp_path)


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("format", FORMATS)
def test_a_hostile_value(format: str, name: str, samples: dict[str, Sample]) -> None:
    sample = samples[format]
    for key in ("hidden_size", "hidden_act", "rope_scaling", "model_type", "architectures", "rms_norm_eps", "unknown"):
        for value in (HOSTILE[name], [HOSTILE[name]], {"rope_type": HOSTILE[name]}):
            sample.run(attempt, sample.config | {key: value})


def test_a_config_that_is_nested_too_deep(samples: dict[str, Sample]) -> None:
    sample = samples["causal-lm"]
    assert sample.run(attempt, sample.config | {"unknown": nested(95)}) is None
    assert "nested more than 100 deep" in str(sample.run(attempt, sample.config | {"unknown": nested(400)}))


@pytest.mark.parametrize(
    "config",
    [{"num_hidden_layers": 10**9}, {"model_type": "gpt2", "n_layer": 10**9}, {"model_type": "t5", "num_layers": 10**9}],
    ids=lambda config: config.get("model_type", "llama"),
)
def test_endless_layers(config: dict[str, Any], samples: dict[str, Sample]) -> None:
    sample = samples["causal-lm"]
    assert "is 1000000000" in str(sample.run(attempt, sample.config | config))


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "logit_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_fact_that_is_no_number_is_refused(format: str, key: str, value: float, samples: dict[str, Sample]) -> None:
    sample = samples[format]
    if format == "eagle3" or key != "logit_scale":
        refused = sample.run(attempt, sample.config | {key: value})
        assert refused is not None
        assert key in str(refused)


@pytest.mark.parametrize("size", [10**9, 10**19])
@pytest.mark.parametrize("has_map", [True, False])
def test_a_vocabulary_of_absurd_size(size: int, has_map: bool, target: Path, tmp_path: Path) -> None:
    config = pico.eagle3_config(vocab_size=size, draft_vocab_size=size)
    tensors = {name: tensor for name, tensor in pico.eagle3_tensors().items() if has_map or name not in ("d2t", "t2d")}
    pico.write_checkpoint(tmp_path / "source", config, tensors, safetensors=True)
    pico.save_target_config(tmp_path / "target", vocab_size=size)
    assert attempt(tmp_path / "source", tmp_path / "target") is not None


# --- unified drafts: the draftkit block


@pytest.fixture(scope="module")
def unified(samples: dict[str, Sample], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("unified")
    for name, sample in samples.items():
        convert_checkpoint(str(sample.folder), folder / name, target=str(sample.target) if sample.target else None)
    return {name: folder / name for name in samples}


def test_a_block_of_endless_layers(unified: dict[str, Path]) -> None:
    file = unified["eagle"] / "config.json"
    text = file.read_text()
    file.write_text(text.replace('"num_hidden_layers": 1,', '"num_hidden_layers": 1000000000,'))
    refused = inspect(unified["eagle"])
    file.write_text(text)
    assert "num_hidden_layers is 1000000000" in str(refused)


# --- indexes of shards


@pytest.fixture
def sharded(samples: dict[str, Sample], tmp_path: Path) -> Path:
    """EAGLE-1 in two shards, and beside its folder one more file, which is out of bounds."""
    tensors = list(open_checkpoint(samples["eagle"].folder).values())
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(samples["eagle"].config))
    (folder / "subfolder").mkdir()
    os.mkfifo(folder / "pipe")
    halves = {"1.safetensors": tensors[:5], "2.safetensors": tensors[5:]}
    for name, half in halves.items():
        write_safetensors(folder / name, [TensorToWrite(t.name, t.dtype, t.shape, t.chunks()) for t in half])
    (tmp_path / "outside.safetensors").write_bytes((folder / "1.safetensors").read_bytes())
    weight_map = {tensor.name: name for name, half in halves.items() for tensor in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


BAD_SHARDS = {
    "parent": "../outside.safetensors",
    "parent of a subfolder": "subfolder/../../outside.safetensors",
    "absolute": "/etc/passwd",
    "backslashes": "..\\outside.safetensors",
    "a drive": "C:outside.safetensors",
    "the folder": ".",
    "the parent": "..",
    "nothing": "",
    "a zero byte": "1.safetensors\0",
    "a subfolder": "subfolder",
    "a pipe": "pipe",
    "the index": "model.safetensors.index.json",
    "the config": "config.json",
    "too long for a file name": "a" * 300,
    "half a surrogate pair": "\ud800",
    "a list": ["1.safetensors"],
    "null": None,
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_a_wrong_shard(name: str, sharded: Path) -> None:
    assert attempt(sharded) is None
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["fc.weight"] = BAD_SHARDS[name]
    file.write_text(json.dumps(index))
    assert isinstance(attempt(sharded), FormatError)


def test_an_index_of_more_shards_than_there_are(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {f"layers.{i}": f"{i}.safetensors" for i in range(20_000)}}))
    assert isinstance(attempt(sharded), FormatError)


# --- random cases


@pytest.mark.slow
@pytest.mark.long
def test_random_cases_of_every_kind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.attack.fuzz", "--cases", "1000", "--out", tmp_path],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


class Misbehaving(Kind):
    """Every sixth case is as it should be."""

    def run(self, rng: random.Random, folder: Path) -> bool:
        what = int((self.corpus / "next").read_text()) if (self.corpus / "next").exists() else 0
        (self.corpus / "next").write_text(str(what + 1))
        match what % 5:
            case 0:
                raise ValueError("a traceback")
            case 1:
                tempfile.mkdtemp()
            case 2:
                bytearray(1 << 40)
            case 3:
                raise PanicException("as of Rust")
        return True


class PanicException(BaseException):
    pass


class Dying(Kind):
    def run(self, rng: random.Random, folder: Path) -> bool:
        os._exit(9)


class Hanging(Kind):
    def run(self, rng: random.Random, folder: Path) -> bool:
        time.sleep(100)
        return True


@pytest.mark.slow
def test_the_harness_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"misbehaving": Misbehaving, "dying": Dying, "hanging": Hanging}
    monkeypatch.setattr(fuzz, "KINDS", kinds)
    monkeypatch.setattr(fuzz, "WAITING", 0)
    runs = {name: fuzz.Run(name, 5, 0, tmp_path).finish() for name in ("misbehaving", "dying")}
    monkeypatch.setattr(fuzz, "GRACE", 1)  # a busy machine takes longer than that over the others
    runs["hanging"] = fuzz.Run("hanging", 2, 0, tmp_path).finish()
    said = [failure["what"] for failure in runs["misbehaving"].failures]
    assert len(said) == 4
    for what, expected in zip(
        said, ("ValueError", "left in the temporary folder", "MemoryError", "Panic"), strict=True
    ):
        assert expected in what
    assert runs["misbehaving"].counts == {"cases": 5, "failed": 4, "accepted": 1}
    assert runs["dying"].counts == {"cases": 5, "failed": 5}
    assert "exit code 9" in runs["dying"].failures[0]["what"]
    assert "hangs" in runs["hanging"].failures[1]["what"]
    again = fuzz.Run("dying", 6, 0, tmp_path).finish()
    assert again.counts["cases"] == 6
