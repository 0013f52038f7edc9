"""Whatever the JSON of a checkpoint says, a conversion gives a whole draft or a `DraftkitError`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pico
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from robust import Outcome, attempt, inspect, memory_limit

from draftkit import convert_checkpoint
from draftkit.errors import FormatError
from draftkit.layout.safetensors_file import write_safetensors
from draftkit.layout.tensors import TensorToWrite, open_checkpoint

FUZZ = settings(max_examples=100, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def limited_memory() -> Iterator[None]:
    with memory_limit():
        yield


# --- sources of each format


@dataclass(frozen=True)
class Sample:
    """A sound checkpoint: a folder with model.safetensors, its config, and the target that it needs."""

    folder: Path
    config: dict[str, Any]
    target: Path | None

    def run(self, run: Callable[[Path, Path | None], Outcome], config: object) -> Outcome:
        """`attempt` or `inspect` it with another config."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model.safetensors").symlink_to(self.folder / "model.safetensors")
            Path(folder, "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
            return run(Path(folder), self.target)


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


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "a text": "64",
    "no text": "",
    "zero": 0,
    "one": 1,
    "negative": -64,
    "a fraction": 1.5,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "a billion": 10**9,
    "beyond 64 bits": 10**30,
    "beyond floats": 10**400,
    "as many digits as Python prints": 10**4299,
    "a list": [64],
    "an object": {"rope_type": "linear", "factor": "2", "rope_theta": {}},
    "a kind of rope without its factor": {"rope_type": "yarn"},
    "deep": nested(95),
    "deeper than Python writes": nested(400),
    "half a surrogate pair": "\ud800",
    "a long text": "a" * 100_000,
}


def keys_read(monkeypatch: pytest.MonkeyPatch, file: Path, run: Callable[[], object]) -> set[str]:
    """The top-level keys of a JSON file that a run looks up."""
    keys: set[str] = set()
    text, loads = file.read_bytes(), json.loads

    class Recorded(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            keys.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            keys.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            keys.add(str(key))
            return super().__contains__(key)

    def record(given: str | bytes, **options: Any) -> Any:
        return Recorded(loads(given, **options)) if given == text else loads(given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", record)
        run()
    return keys


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_value_for_any_config_key(
    format: str, samples: dict[str, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = samples[format]
    keys = keys_read(monkeypatch, sample.folder / "config.json", lambda: attempt(sample.folder, sample.target))
    assert {"vocab_size", "draftkit"} < keys
    for wrong in WRONG.values():
        changes = ({key: wrong} for key in sorted(keys | sample.config.keys()))
        accepted = [change for change in changes if sample.run(inspect, sample.config | change) is None]
        sample.run(attempt, sample.config | {key: wrong for change in accepted for key in change})


def test_a_wrong_value_for_any_config_key_of_the_target(
    samples: dict[str, Sample], target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = samples["eagle3"].folder, target / "config.json"
    keys = keys_read(monkeypatch, file, lambda: attempt(source, target))
    assert {"hidden_size", "vocab_size", "num_hidden_layers"} < keys
    config = json.loads(file.read_text())
    for key in sorted(keys):
        for wrong in WRONG.values():
            (tmp_path / "config.json").write_text(json.dumps(config | {key: wrong}))
            inspect(source, tmp_path)


json_values = st.recursive(
    st.sampled_from(list(WRONG)).map(WRONG.__getitem__) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@FUZZ
@given(st.data(), st.sampled_from(FORMATS))
def test_any_config(samples: dict[str, Sample], data: st.DataObject, format: str) -> None:
    sample = samples[format]
    keys = st.sampled_from(sorted(sample.config)) | st.text(max_size=5)
    changes = data.draw(st.dictionaries(keys, json_values, max_size=4))
    removed = data.draw(st.sets(keys, max_size=2))
    config = {key: value for key, value in (sample.config | changes).items() if key not in removed}
    sample.run(attempt, data.draw(st.just(config) | json_values))


@FUZZ
@given(st.data(), st.sampled_from(FORMATS))
def test_a_damaged_config(samples: dict[str, Sample], data: st.DataObject, format: str) -> None:
    sample = samples[format]
    text = json.dumps(sample.config)
    cut = data.draw(st.integers(0, len(text)))
    sample.run(attempt, text[:cut] + data.draw(st.text(max_size=3)) + text[data.draw(st.integers(cut, len(text))) :])


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
        convert_checkpoint(str(sample.folder), folder / name, target=sample.target and str(sample.target))
    return {name: folder / name for name in samples}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value, itself included."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with another value at a place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@settings(FUZZ, max_examples=150)
@given(st.data(), st.sampled_from(FORMATS))
def test_any_draftkit_block(unified: dict[str, Path], data: st.DataObject, format: str) -> None:
    config = json.loads((unified[format] / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([("draftkit", *path) for path in places(config["draftkit"])]))
        config = replaced(config, place, data.draw(json_values))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.safetensors").symlink_to(unified[format] / "model.safetensors")
        Path(folder, "config.json").write_text(json.dumps(config))
        inspect(Path(folder))


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


def test_any_index(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    sound = json.loads(file.read_text())
    shards = st.sampled_from([*BAD_SHARDS.values(), "1.safetensors", "2.safetensors", "3.safetensors"])
    names = st.sampled_from(sorted(sound["weight_map"])) | st.text(max_size=3)

    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        changed = sound["weight_map"] | data.draw(st.dictionaries(names, shards, max_size=3))
        removed = data.draw(st.sets(names, max_size=2))
        weight_map = {name: shard for name, shard in changed.items() if name not in removed}
        file.write_text(json.dumps(data.draw(st.just({"weight_map": weight_map}) | json_values)))
        attempt(sharded)

    run()
    file.write_text(json.dumps({"weight_map": {f"layers.{i}": f"{i}.safetensors" for i in range(20_000)}}))
    assert isinstance(attempt(sharded), FormatError)
