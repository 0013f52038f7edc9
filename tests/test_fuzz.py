"""Whatever the JSON of a checkpoint says, a conversion gives a whole draft or a `DraftkitError`."""

from __future__ import annotations

import ast
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import all_published
from published.checkpoint import Published, write_weights
from robust import Outcome, attempt, inspect, sandbox

import draftkit
from draftkit import convert_checkpoint
from draftkit.errors import FormatError
from draftkit.layout.safetensors_file import write_safetensors
from draftkit.layout.tensors import TensorToWrite, open_checkpoint

FUZZ = settings(max_examples=100, deadline=None)


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


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "a text": "64",
    "negative": -64,
    "NaN": float("nan"),
    "64 bits": (1 << 64) - 1,
    "a list": [64],
    "an object": {"rope_type": "linear", "factor": "2", "rope_theta": {}},
}
HOSTILE: dict[str, Any] = {
    "zero": 0,
    "a fraction": 1.5,
    "a billion": 10**9,
    "infinite": float("-inf"),
    "beyond floats": 10**400,
    "as many digits as Python prints": 10**4299,
    "no text": "",
    "half a surrogate pair": "\ud800",
    "a long text": "a" * 100_000,
    "control characters": "\0\x1b[2J\n",
    "deep": nested(95),
    "deeper than Python writes": nested(400),
}


def possible_keys(*sources: Path) -> set[str]:
    """Every text in the code that could be the key of a config, so that none is forgotten that a format reads."""
    files = [file for source in sources for file in (source.rglob("*.py") if source.is_dir() else [source])]
    constants = [
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
    ]
    texts = {constant.value for constant in constants if isinstance(constant.value, str)}
    return {text for text in texts if re.fullmatch(r"[a-z_][a-z0-9_]+", text)}


CODE = Path(draftkit.__file__).parent
FORMAT_KEYS = possible_keys(CODE / "convert")
CAUSAL_LM_KEYS = possible_keys(CODE / "layout" / "decoder.py", CODE / "layout" / "schema.py")  # it takes any others
TARGET_KEYS = possible_keys(CODE / "layout" / "target.py")


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


json_values = st.recursive(
    st.sampled_from(list(WRONG | HOSTILE)).map((WRONG | HOSTILE).__getitem__)
    | st.integers()
    | st.floats()
    | st.text(max_size=5),
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
        convert_checkpoint(str(sample.folder), folder / name, target=str(sample.target) if sample.target else None)
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


# --- every published format


def odd_tensors(tensor: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    """Other tensors in place of one: of other shapes, other dtypes and, where it maps tokens, other values."""
    shapes = [
        (),
        (0,) * tensor.dim(),
        (1, *tensor.shape),
        tuple(size + 1 for size in tensor.shape),
        tuple(tensor.shape),
    ]
    dtypes = [tensor.dtype, torch.int64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]
    values = [0, 1, -1, 1 << 62, -(1 << 63)]
    return st.builds(
        lambda shape, dtype, value: torch.full(shape, value, dtype=torch.int64).to(dtype),
        st.sampled_from(shapes),
        st.sampled_from(dtypes),
        st.sampled_from(values),
    )


@settings(FUZZ, max_examples=80)
@given(st.data(), st.sampled_from(list(all_published().values())))
def test_any_change_to_a_published_checkpoint(data: st.DataObject, published: Published) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = published.write(Path(folder, "source")), None
        if published.target is not None:
            target = pico.save_target_config(Path(folder, "target"), **published.target)
        config = published.config
        for _ in range(data.draw(st.integers(0, 2))):
            config = replaced(config, data.draw(st.sampled_from(list(places(config)))), data.draw(json_values))
        (source / "config.json").write_text(json.dumps(config))
        tensors = published.tensors(torch.float16)
        for name in data.draw(st.sets(st.sampled_from(sorted(tensors)), max_size=2)):
            tensors[name] = data.draw(odd_tensors(tensors[name]))
        for name in data.draw(st.sets(st.sampled_from(sorted(tensors)), max_size=1)):
            del tensors[name]
        write_weights(source / published.weights, tensors)
        attempt(source, target, overrides=published.overrides, allow_lossy=True)


@pytest.mark.parametrize("changed", ["token_map", "lm_head.weight"])
def test_a_token_map_that_points_nowhere(changed: str, tmp_path: Path) -> None:
    published = all_published()["vllm-eagle-token-map"]
    tensors = published.tensors(torch.float16)
    # The smallest offset that there is, and a head of which the map should take rows that it has not.
    smallest = torch.full_like(tensors["token_map"], torch.iinfo(torch.int64).min)
    other = {"token_map": smallest, "lm_head.weight": tensors["lm_head.weight"].new_zeros(129, 65)}
    source = published.write(tmp_path / "source")
    write_weights(source / published.weights, tensors | {changed: other[changed]})
    target = pico.save_target_config(tmp_path / "target", **(published.target or {}))
    assert attempt(source, target) is not None


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
