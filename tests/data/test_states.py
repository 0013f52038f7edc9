"""Hidden states on disk: what they lose, that they are the target's own, and that nothing wrong is ever read."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from fixtures import plain_store
from fixtures.checkpoints import pico
from fixtures.checkpoints.targets import TARGETS, target_model
from fixtures.examples import examples
from fixtures.fuzzing.killed import killed_at_rename
from fixtures.precision import LAYER, assert_close
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.states import ENCODINGS, Encoding
from draftkit.data.states import write as write_module
from draftkit.data.states.encoding import BY_CHANNEL, channel_bytes, decode, encode, vector_bytes
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.online import load_final_norm
from draftkit.data.states.shards import Manifest, Part, read_manifest, shard_ranges
from draftkit.data.states.vllm import VllmExtractor, layer_ids
from draftkit.data.states.workers import on_devices
from draftkit.data.states.write import StatesSettings, TargetExtractor, check_room, open_states_job, write_states
from draftkit.engines.vllm.worker import PromptTokens
from draftkit.errors import DraftkitError
from draftkit.io.atomic import is_empty
from draftkit.io.safetensors_file import read_safetensors
from draftkit.targets.states import FINAL, AuxLayers
from draftkit.targets.tokens import load_embeddings

assert plain_store
LAYERS = (2, 4, 5)
LENGTHS = (40, 7, 61, 1, 23, 64, 12)
SETTINGS: dict[str, Any] = {"tokens_per_row": 64, "shard_tokens": 100, "device": "cpu"}

# |x − decoded| of a number x that shares its scale with a largest magnitude m.
BOUNDS = {
    "float32": lambda x, m: 0 * x,
    "bf16": lambda x, m: abs(x) / 256,
    "int8": lambda x, m: m / 253,
    "int8-channel": lambda x, m: m / 253,
    "fp8": lambda x, m: np.maximum(abs(x) / 15.9, m / 400_000),
}

numbers = st.floats(-(2.0**120), 2.0**120, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
vectors = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 16)), elements=numbers)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
@given(states=vectors)
@examples(60)
def test_encodings_round_within_their_bounds(encoding: Encoding, states: np.ndarray) -> None:
    encoded = encode(torch.from_numpy(states), encoding)
    found = decode(encoded, torch.float32).numpy()
    largest = abs(states).max(0 if encoding in BY_CHANNEL else -1, keepdims=True).astype(np.float64)
    assert (abs(found.astype(np.float64) - states) <= BOUNDS[encoding](states.astype(np.float64), largest)).all()
    stored = sum(t.numel() * t.itemsize for t in encoded if t is not None)
    size = states.shape[1]
    assert stored == len(states) * vector_bytes(size, encoding) + channel_bytes(size, encoding)


def test_scales_of_channels_keep_small_channels_beside_a_large_one() -> None:
    states = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    states[:, 3] *= 1000

    def error(encoding: Encoding) -> float:
        others = [i for i in range(16) if i != 3]
        return float((decode(encode(states, encoding), torch.float32) - states)[:, others].norm())

    assert error("int8-channel") < 0.01 * error("int8")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_keep_zeros_and_denormals_finite(encoding: Encoding) -> None:
    states = torch.zeros(3, 8)
    states[1, 0] = 1e-44
    found = decode(encode(states, encoding), torch.float32)
    assert torch.isfinite(found).all()
    assert torch.equal(found[0], states[0])
    assert (found - states).abs().max() <= 1e-38


def random_samples(lengths: Sequence[int], vocabulary: int = pico.VOCABULARY) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample.of(f"row-{i}", random.integers(3, vocabulary, length).tolist(), [(length // 2, length)])
        for i, length in enumerate(lengths)
    ]


def save_samples(path: Path, samples: Sequence[Sample]) -> Path:
    write_samples(path, samples, SamplesOrigin("pico", "0" * 64), force=True)
    return path


def alone(model: PreTrainedModel, sample: Sample, layers: Sequence[int]) -> Tensor:
    """[T, S, H] of one sample, by transformers' own forward."""
    tokens = torch.from_numpy(sample.tokens).long()[None]
    with torch.no_grad():
        states = model.get_decoder()(tokens, output_hidden_states=True).hidden_states
    return torch.stack([states[i][0] for i in (*layers, -1)], dim=1)


WINDOW = {"sliding_window": 8, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "gpt_neox": {"initializer_range": 0.5},
    "phi": {},
}


def config_of(family: str) -> PretrainedConfig:
    sizes = pico.llama_config().to_dict()
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "initializer_range", "tie_word_embeddings")
    return CONFIG_MAPPING[family](**({key: sizes[key] for key in (*shared, *more)} | FAMILIES[family]))


def random_model(family: str) -> PreTrainedModel:
    if family in TARGETS:
        return target_model(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if "norm" in name:  # which would all be the same
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval().requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", *TARGETS])
def test_samples_of_a_row_do_not_see_each_other(family: str) -> None:
    model, samples = random_model(family), random_samples(LENGTHS)
    found = dict(TargetExtractor(model, LAYERS, 128)(samples))
    assert found.keys() == set(range(len(samples)))
    for place, sample in enumerate(samples):
        assert_close(found[place], alone(model, sample, LAYERS), depth=pico.LAYERS * LAYER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pico target."""
    logging.disable_progress_bar()  # as the command does where it is the first to import transformers
    return pico.save_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_samples(tmp_path_factory.mktemp("data") / "data.jsonl", random_samples(LENGTHS))


def write(data: Path, out: Path, target: Path, **changes: Any) -> Manifest:
    with open_states_job(data, out, StatesSettings(target=str(target), **(SETTINGS | changes))) as job:
        return job.write()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def stored(folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("states") / "out"
    write(data, out, folder, encoding="float32")
    return out


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Path:
    """States that a test may spoil."""
    out = tmp_path / "out"
    out.mkdir()
    for name, held in content(stored).items():
        (out / name).write_bytes(held)
    return out


@pytest.mark.parametrize("aux_layers", [AuxLayers(LAYERS), AuxLayers((5, 2, FINAL)), AuxLayers((FINAL,)), None])
def test_what_is_read_is_what_the_target_computes(
    aux_layers: AuxLayers | None, stored: Path, data: Path, folder: Path
) -> None:
    source = OfflineStates(stored, data=data, target=folder, aux_layers=aux_layers, dtype=torch.float32, verify=True)
    samples, model, row = random_samples(LENGTHS), pico.llama(), (5, 0, 3, 2)
    features, last = source.states_of(row, 200)
    expected = torch.cat([alone(model, samples[i], LAYERS) for i in row])
    size = len(expected)
    torch.testing.assert_close(last[0, :size], expected[:, -1], rtol=1e-4, atol=1e-4)
    assert last.shape == (1, 200, pico.HIDDEN)
    assert not last[0, size:].any()
    if aux_layers is None:
        assert features is None
        return
    assert features is not None
    order = [(*LAYERS, FINAL).index(state) for state in aux_layers.states]
    torch.testing.assert_close(features[0, :size], expected[:, order].flatten(1), rtol=1e-4, atol=1e-4)
    assert not features[0, size:].any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_plan_is_what_is_written(encoding: Encoding, data: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_states_job(data, out, StatesSettings(target=str(folder), encoding=encoding, **SETTINGS)) as job:
        assert is_empty(out)
        manifest = job.write()
    handles = [handle for shard in manifest.shards for handle in read_safetensors(out / shard.file)]
    plan = job.plan
    assert plan.bytes == sum(handle.nbytes for handle in handles)
    files = sum(path.stat().st_size for path in out.iterdir())
    assert plan.bytes < files < plan.bytes + plan.shards * write_module.FILE_BYTES
    per_token = [
        handle.nbytes
        for handle in handles
        if handle.name == "states" or (handle.name == "scales" and encoding not in BY_CHANNEL)
    ]
    assert plan.bytes_per_token * plan.tokens == sum(per_token)
    assert (plan.documents, plan.tokens, plan.shards) == (len(LENGTHS), sum(LENGTHS), len(manifest.shards))
    assert plan.seconds > 0
    assert manifest == read_manifest(out)
    source = OfflineStates(out, data=data, target=folder, aux_layers=AuxLayers(LAYERS))
    assert source.states_of([2], 64).last.dtype == torch.bfloat16


def test_states_in_eight_bits_are_near_those_in_full(stored: Path, data: Path, folder: Path, tmp_path: Path) -> None:
    exact = OfflineStates(stored, data=data, target=folder, aux_layers=None, dtype=torch.float32).states_of(
        range(7), 208
    )
    for encoding, limit in (("bf16", 0.003), ("int8", 0.02), ("int8-channel", 0.02), ("fp8", 0.03)):
        write(data, tmp_path / encoding, folder, encoding=encoding)
        source = OfflineStates(tmp_path / encoding, data=data, target=folder, aux_layers=None, dtype=torch.float32)
        error = (source.states_of(range(7), 208).last - exact.last).norm() / exact.last.norm()
        assert error < limit


@given(lengths=st.lists(st.integers(0, 50), max_size=30), shard=st.integers(1, 60))
def test_shards_hold_every_sample_once(lengths: list[int], shard: int) -> None:
    ranges = shard_ranges(lengths, shard)
    assert [number for numbers in ranges for number in numbers] == list(range(len(lengths)))
    for numbers in ranges:
        assert len(numbers) == 1 or sum(lengths[i] for i in numbers) <= shard


@pytest.mark.slow
@pytest.mark.parametrize("renames", range(4))  # the manifest's, then those of a shard and the manifest in turn
def test_a_killed_run_goes_on(renames: int, stored: Path, data: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert killed_at_rename(renames, lambda: write(data, out, folder, encoding="float32"))
    found = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if not path.name.startswith(".")}
    assert len(found) == (0, 1, 2, 2)[renames]
    write(data, out, folder, encoding="float32")
    assert content(out) == content(stored)
    if renames == 3:  # the shard was in the manifest
        assert (out / "states-00000.safetensors").stat().st_mtime_ns == found["states-00000.safetensors"]


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["disk", *(pytest.param(place, marks=pytest.mark.long) for place in ("disk without locks", "store"))]
)
def test_many_workers_write_each_shard_once_though_some_are_killed(
    place: str, stored: Path, data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their locks go with them, and nobody computes what another has: every shard is computed once for each that was
    killed while it was at it, and once more. In a store, and on a file system that has no locks, each has a part, and
    is started again."""
    out, log = tmp_path / "out", tmp_path / "computed"
    address = f"plain://{out}" if place == "store" else out
    in_parts = place != "disk"
    if place == "disk without locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)

    def work(number: int, kill_at: int | None) -> None:
        computed, part = 0, Part(number, 4) if in_parts else Part(0, 1)
        settings = StatesSettings(target=str(folder), encoding="float32", part=part, **SETTINGS)
        with open_states_job(data, address, settings) as job:
            extract = job.extractor

            def noted(samples: Sequence[Sample]) -> Iterator[tuple[int, Tensor]]:
                nonlocal computed
                computed += 1
                with log.open("a") as file:
                    file.write(samples[0].id + "\n")
                if computed == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.05)  # so that others find it locked
                yield from extract(samples)

            replace(job, extractor=noted).write()

    def run(*kills: int | None) -> list[int]:
        children = []
        for number, kill_at in enumerate(kills):
            if (child := os.fork()) == 0:
                torch.set_num_threads(1)
                try:
                    work(number, kill_at)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

    ended = run(1, 2, None, None)
    assert set(ended) <= {0, -signal.SIGKILL}
    if in_parts:
        assert -signal.SIGKILL in ended
        assert run(None, None, None, None) == [0, 0, 0, 0]
        assert read_manifest(out) == read_manifest(stored)
        write(data, out, folder, encoding="float32")  # one process takes over the manifests of all parts
    assert content(out) == content(stored)
    begun = log.read_text().split()
    shards = read_manifest(out).shards
    assert len(set(begun)) == len(shards)
    assert len(begun) == len(shards) + ended.count(-signal.SIGKILL)


@pytest.mark.slow
def test_workers_from_the_command_line(
    draftkit: Command, stored: Path, data: Path, folder: Path, tmp_path: Path
) -> None:
    command = ("data", "states", data, tmp_path / "out", "--target", folder, "--encoding", "float32", "--device", "cpu")
    ran = draftkit(*command, "--tokens-per-row", 64, "--shard-tokens", 100, "--workers", 2, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert content(tmp_path / "out") == content(stored)


def test_each_worker_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("draftkit.data.states.workers.device_named", str)
    with_vllm = StatesSettings(target="t", vllm_python="python", tensor_parallel=2, device="cuda:2")
    assert [own.device for own in on_devices(with_vllm, 3)] == ["cuda:2", "cuda:4", "cuda:6"]
    with pytest.raises(DraftkitError, match="4 workers need 8 GPUs from cuda:2 on, and there are 8"):
        on_devices(with_vllm, 4)
    assert on_devices(StatesSettings(target="t", device="cpu"), 2) == [StatesSettings(target="t", device="cpu")] * 2


def test_a_worker_that_is_no_longer_wanted_stops_at_a_shard(data: Path, folder: Path, tmp_path: Path) -> None:
    with open_states_job(data, tmp_path / "out", StatesSettings(target=str(folder), **SETTINGS)) as job:
        assert not job.write(alive=lambda: False).shards
        with open_states_job(data, tmp_path / "out", StatesSettings(target=str(folder), **SETTINGS)) as other:
            assert other.write() == job.write() == read_manifest(tmp_path / "out")


def test_a_shard_that_is_gone_is_written_again(copied: Path, stored: Path, data: Path, folder: Path) -> None:
    (copied / "states-00001.safetensors").unlink()
    times = {path.name: path.stat().st_mtime_ns for path in copied.glob("states-*")}
    write(data, copied, folder, encoding="float32")
    assert content(copied) == content(stored)
    assert all((copied / name).stat().st_mtime_ns == time for name, time in times.items())


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"encoding": "bf16"}, "encoding"), ({"encoding": "float32", "layers": (1,)}, "layers")],
)
def test_other_settings_do_not_go_on(
    changes: dict[str, Any], named: str, copied: Path, data: Path, folder: Path
) -> None:
    before = content(copied)
    with pytest.raises(DraftkitError, match=f"other settings:\n    {named}"):
        write(data, copied, folder, **changes)
    assert content(copied) == before


def test_a_folder_of_something_else_is_left_alone(data: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DraftkitError, match="has no states"):
        write(data, tmp_path, folder)
    assert content(tmp_path) == {"mine.txt": b"mine"}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_bit(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[-1000] ^= 1
    path.write_bytes(held)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(truncate, "is damaged"), (flip_bit, "is damaged"), (Path.unlink, "is missing")],
)
@pytest.mark.parametrize("verify", [False, True], ids=["first use", "at once"])
def test_damaged_shards_are_named(
    spoil: Any, message: str, verify: bool, copied: Path, data: Path, folder: Path
) -> None:
    spoil(copied / "states-00001.safetensors")

    def use() -> None:
        source = OfflineStates(copied, data=data, target=folder, aux_layers=None, verify=verify)
        assert not verify
        source.states_of([0], 64)  # in a shard that is whole
        source.states_of([4], 64)

    if spoil is flip_bit and not verify:  # of terabytes the checksums take hours: they are for who asks
        use()
        return
    with pytest.raises(DraftkitError, match=f"states-00001.safetensors {message}"):
        use()


def test_states_of_something_else_are_refused(stored: Path, data: Path, folder: Path, tmp_path: Path) -> None:
    other = pico.save_llama(tmp_path / "other", seed=1)
    changed = save_samples(tmp_path / "changed.jsonl", random_samples(LENGTHS[::-1]))
    for changes, message in (
        ({"target": other}, "by another target"),
        ({"data": changed}, "of other samples"),
        ({"aux_layers": AuxLayers((2, 3))}, r"layers \[3\] are not stored"),
    ):
        with pytest.raises(DraftkitError, match=message):
            OfflineStates(stored, **({"data": data, "target": folder, "aux_layers": None} | changes))
    source = OfflineStates(stored, data=data, target=folder, aux_layers=None)
    with pytest.raises(DraftkitError, match="sample 7 has no states"):
        source.states_of([7], 64)


def test_a_target_that_differs_in_a_single_byte_is_another(
    stored: Path, data: Path, folder: Path, tmp_path: Path
) -> None:
    changed = shutil.copytree(folder, tmp_path / "changed")
    file = changed / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DraftkitError, match="by another target"):
        OfflineStates(stored, data=data, target=changed, aux_layers=None)


def test_unfinished_states_are_refused(copied: Path, data: Path, folder: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    del manifest["shards"][1]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DraftkitError, match=r"states of \d of 7 samples"):
        OfflineStates(copied, data=data, target=folder, aux_layers=None)


@pytest.mark.parametrize("edit", [{"schema": 1}, {"encoding": "int4"}, {"num_documents": 3}, {"shards": [{}]}])
def test_a_manifest_that_says_nonsense_is_refused(
    edit: dict[str, object], copied: Path, data: Path, folder: Path
) -> None:
    path = copied / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(DraftkitError, match=r"manifest\.json"):
        OfflineStates(copied, data=data, target=folder, aux_layers=None)


def test_samples_with_states_that_are_not_finite_are_named(folder: Path, tmp_path: Path) -> None:
    pico.overflowing(pico.llama(), 5).save_pretrained(tmp_path / "overflowing")
    samples = random_samples((9, 8, 7))
    samples[1].tokens[3] = 5
    for i in (0, 2):
        samples[i].tokens[samples[i].tokens == 5] = 6
    data = save_samples(tmp_path / "data.jsonl", samples)
    with pytest.raises(DraftkitError, match=r"sample row-1: the target's hidden states are not finite"):
        write(data, tmp_path / "out", tmp_path / "overflowing")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "encoding"), [(torch.nan, "float32"), (torch.inf, "int8"), (3.4e38, "bf16")])
def test_states_that_cannot_be_stored_are_named(
    value: float, encoding: Encoding, data: Path, folder: Path, tmp_path: Path
) -> None:
    """Whoever computed them."""

    def spoilt(samples: Sequence[Sample]) -> Iterator[tuple[int, Tensor]]:
        for place, sample in enumerate(samples):
            states = torch.ones(len(sample), len(LAYERS) + 1, pico.HIDDEN)
            states[-1, 1, 5] = value if sample.id == "row-4" else 1
            yield place, states

    with open_states_job(data, tmp_path, StatesSettings(target=str(folder), encoding=encoding, **SETTINGS)) as job:
        samples = random_samples(LENGTHS)
        with pytest.raises(DraftkitError, match="sample row-4: its hidden states are not finite"):
            write_states(tmp_path / "out", job.manifest, samples, spoilt)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"manifest.json", "states-00000.safetensors"}


def test_samples_that_the_target_cannot_read_are_named(folder: Path, tmp_path: Path) -> None:
    samples = random_samples((9, 65))
    data = save_samples(tmp_path / "data.jsonl", samples)
    with pytest.raises(DraftkitError, match="sample row-1 has 65 tokens"):
        write(data, tmp_path / "out", folder)
    samples[1].tokens[7] = pico.VOCABULARY
    with pytest.raises(DraftkitError, match=f"sample row-1 has token {pico.VOCABULARY}"):
        write(save_samples(data, samples), tmp_path / "out", folder, tokens_per_row=128)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_keeps_the_shards_that_are_done(
    stored: Path, data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = write_module.write_shard

    def full(*arguments: Any) -> Manifest:
        if arguments[1] == 1:
            monkeypatch.setattr("draftkit.data.states.folder.write_safetensors", no_space)
        return real(*arguments)

    def no_space(path: Path, _entries: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(write_module, "write_shard", full)
        with pytest.raises(DraftkitError, match=r"states-00001\.safetensors failed: No space left"):
            write(data, tmp_path / "out", folder, encoding="float32")
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"manifest.json", "states-00000.safetensors"}
    monkeypatch.undo()
    write(data, tmp_path / "out", folder, encoding="float32")
    assert content(tmp_path / "out") == content(stored)


def test_a_disk_that_is_too_small_is_known_before(data: Path, folder: Path, tmp_path: Path) -> None:
    with open_states_job(data, tmp_path / "out", StatesSettings(target=str(folder), **SETTINGS)) as job:
        check_room(replace(job.plan, free_bytes=job.plan.bytes * 2), job.folder)
        tight = replace(job, plan=replace(job.plan, free_bytes=job.plan.bytes))
        with pytest.raises(DraftkitError, match="GB free"):
            tight.write()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command(draftkit: Command, data: Path, folder: Path, tmp_path: Path) -> None:
    command = ("data", "states", data, tmp_path / "out", "--target", folder, "--layers", "2,5", "--encoding", "int8")
    dry = draftkit(*command, "--dry-run", "--json")
    assert (dry.code, dry.err) == (0, "")
    assert not (tmp_path / "out").exists()
    planned = json.loads(dry.out)["plan"]
    assert (planned["tokens"], planned["bytes_per_token"]) == (sum(LENGTHS), 3 * (pico.HIDDEN + 4))
    ran = draftkit(*command)
    assert ran.code == 0
    assert ran.err.startswith(f"7 samples, 208 tokens in 1 shard, {3 * (pico.HIDDEN + 4)} bytes a token: ")
    assert draftkit(*command, "--json").code == 0  # nothing left to do
    assert draftkit("data", "states", data, tmp_path / "o", "--target", folder, "--layers", "2,x").code == 1
    assert draftkit("data", "states", data, tmp_path / "o", "--target", folder, "--layers", "2,9").code == 1


def test_a_target_that_transformers_does_not_load_is_one_for_vllm(
    draftkit: Command, data: Path, folder: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(folder, tmp_path / "target")
    config = json.loads((target / "config.json").read_text()) | {"quantization_config": {"quant_method": "of tomorrow"}}
    (target / "config.json").write_text(json.dumps(config))
    given = ("--target", target, "--data", data, "--out", tmp_path / "run", "--set", "device=cpu", "--dry-run")
    stored, online = (
        draftkit("data", "states", data, tmp_path / "out", "--target", target, "--dry-run"),
        draftkit("train", "--recipe", "eagle", *given),
    )
    for ran in (stored, online):
        assert (ran.code, "data states --vllm-python" in ran.err) == (1, True)
        assert "train --states-from vllm" in ran.err
    streamed = draftkit("train", "--recipe", "eagle", *given, "--states-from", "vllm", "--vllm-python", sys.executable)
    assert streamed.code == 0, streamed.err


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *TARGETS])
def test_the_final_norm_alone_is_the_targets(family: str, tmp_path: Path) -> None:
    """It makes the last state of the one before it."""
    model = random_model(family)
    model.save_pretrained(tmp_path)
    (sample,) = random_samples((20,))
    found = dict(TargetExtractor(model, (model.config.get_text_config().num_hidden_layers,), 64)([sample]))[0]
    norm = load_final_norm(tmp_path, torch.float32)
    torch.testing.assert_close(norm(found[:, 0]), found[:, 1])


@pytest.mark.parametrize("family", [*FAMILIES, *TARGETS])
def test_the_ends_alone_are_the_targets(family: str, tmp_path: Path) -> None:
    """With Gemma's scale of the embedding, Phi's bias of the head, and names that wrappers put before their own."""
    model = random_model(family)
    model.save_pretrained(tmp_path)
    embeddings = load_embeddings(tmp_path, device="cpu", dtype=torch.float32)
    tokens, states = torch.arange(9), torch.randn(9, pico.HIDDEN)
    assert torch.equal(embeddings.get_input_embeddings()(tokens), model.get_input_embeddings()(tokens))
    assert torch.equal(embeddings.get_output_embeddings()(states), model.get_output_embeddings()(states))
    assert embeddings.device == torch.device("cpu")


class StandIn:
    """Writes what vLLM would: the states after `layer_ids`, all before the final norm."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], folder: Path):
        self.extract = TargetExtractor(model, layers, 64)
        self.folder = folder

    def __call__(self, prompts: Sequence[PromptTokens]) -> list[Path]:
        samples = [Sample.of(str(i), prompt["tokens"], []) for i, prompt in enumerate(prompts)]
        for place, states in self.extract(samples):
            tokens = torch.tensor(prompts[place]["tokens"])
            save_file(
                {"token_ids": tokens, "hidden_states": states[:, :-1].contiguous()},
                self.folder / f"{place}.safetensors",
            )
        return [self.folder / f"{place}.safetensors" for place in range(len(prompts))]


@pytest.mark.parametrize("layers", [LAYERS, (5, 8, 2), ()])
def test_states_from_vllm_are_the_targets(layers: tuple[int, ...], folder: Path, tmp_path: Path) -> None:
    """Asked for each layer once and in order, the last state normed; scripts/check/vllm_states.py runs vLLM itself."""
    model, samples = pico.llama(), random_samples(LENGTHS)
    worker = StandIn(model, layer_ids(layers, pico.LAYERS), tmp_path)
    extractor = VllmExtractor(worker, layers, pico.LAYERS, load_final_norm(folder, torch.float32))
    expected = dict(TargetExtractor(model, layers, 64)(samples))
    for place, states in extractor(samples):
        torch.testing.assert_close(states, expected[place])
    assert not any(tmp_path.iterdir())


FAKE = """
import sys
sys.stdin.readline()
print("a long story", file=sys.stderr)
sys.exit("no such model")
"""


def test_a_vllm_that_fails_is_quoted(data: Path, folder: Path, tmp_path: Path) -> None:
    out, python = tmp_path / "out", tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{FAKE}")
    python.chmod(0o755)
    with pytest.raises(DraftkitError, match="vLLM has failed:\na long story\nno such model"):
        write(data, out, folder, vllm_python=str(python))
    with pytest.raises(DraftkitError, match="cannot be run"):
        write(data, out, folder, vllm_python=str(tmp_path / "nothing"))
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


FOR_VLLM = """
import json, os, sys
print(sys.stdin.readline(), file=sys.stderr)
sys.exit("GPU " + os.environ.get("CUDA_VISIBLE_DEVICES", "any"))
"""


@pytest.mark.parametrize(("device", "gpu", "trusted"), [("cuda:1", "1", True), (None, "any", False)])
def test_vllm_is_told_the_device_and_whom_to_trust(
    device: str | None,
    gpu: str,
    trusted: bool,
    data: Path,
    folder: Path,
    tmp_path: Path,
    draftkit: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{FOR_VLLM}")
    python.chmod(0o755)
    options = (*(("--device", device) if device else ()), *(("--trust-remote-code",) if trusted else ()))
    ran = draftkit("data", "states", data, tmp_path / "out", "--target", folder, "--vllm-python", python, *options)
    assert ran.code == 1
    assert f"GPU {gpu}" in ran.err
    assert f'"trust_remote_code": {str(trusted).lower()}' in ran.err


def test_a_row_is_short_on_a_cpu() -> None:
    on_cpu = StatesSettings(target="zoo:target", device="cpu")
    assert [on_cpu.row_tokens(longest) for longest in (10, 3000)] == [1024, 3000]
    assert replace(on_cpu, tokens_per_row=7).row_tokens(3000) == 7
    assert replace(on_cpu, vllm_python="python").row_tokens(3000) == 4096
