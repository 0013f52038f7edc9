"""States in a store: those of a folder, of which a reader fetches what it reads, through a cache that stays small."""

# ruff: noqa: F401, F811
from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from conftest import Command
from fixtures.plain_store import PlainStore
from test_states import FAMILIES, LENGTHS, SETTINGS, content, data, folder, stored

from draftkit.data.states import ENCODINGS, Encoding
from draftkit.data.states.folder import folder_at
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.shards import read_manifest
from draftkit.data.states.write import StatesSettings, open_states_job
from draftkit.errors import DraftkitError, SourceError
from draftkit.io.cache import TOTAL
from draftkit.io.store import WRITER, Store
from draftkit.targets.states import FINAL, AuxLayers

assert FAMILIES
LAYERS = AuxLayers((2, 5, FINAL))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(data: Path, out: str, target: Path, encoding: Encoding = "float32") -> str:
    settings = StatesSettings(target=str(target), encoding=encoding, **SETTINGS)
    with open_states_job(data, out, settings) as job:
        assert job.plan.free_bytes is None
        job.write()
    return out


def reader(place: Any, **more: Any) -> OfflineStates:
    return OfflineStates(place, data=None, target=None, aux_layers=LAYERS, dtype=torch.float32, **more)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_states_of_a_store_are_those_of_a_folder(
    encoding: Encoding,
    data: Path,
    folder: Path,
    tmp_path: Path,
) -> None:
    address = written(data, f"memory://{uuid4().hex}", folder, encoding)
    store = Store(address)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in store.names():
        store.download(copy / name, name)
    assert sorted(path.name for path in copy.iterdir()) == [
        "manifest.json", "states-00000.safetensors", "states-00001.safetensors", "states-00002.safetensors",
    ]  # fmt: skip
    one, other = reader(address), reader(copy, verify=True)
    for numbers in ([0], [6, 1], [3, 2], list(range(len(LENGTHS)))):
        found, expected = one.states_of(numbers, 300), other.states_of(numbers, 300)
        assert torch.equal(found.last, expected.last)
        assert found.features is not None
        assert expected.features is not None
        assert torch.equal(found.features, expected.features)


def test_each_sample_is_fetched_once_while_it_is_in_the_cache(
    data: Path,
    folder: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but what is read, and the heads of shards."""
    address = written(data, f"plain://{tmp_path}/states", folder)
    manifest = read_manifest(address)
    states = reader(address)

    def fetched(numbers: list[int]) -> int:
        PlainStore.asked.clear()
        states.states_of(numbers, 300)
        return sum(size for kind, _, size in PlainStore.asked if kind == "read")

    def own(numbers: list[int]) -> int:
        return sum(LENGTHS[number] for number in numbers) * manifest.token_bytes

    fetched([1])  # the head of the first shard
    assert fetched([0]) == own([0])
    assert fetched([0, 1]) == 0
    limit = own([0, 1]) + 1  # bytes
    monkeypatch.setenv("DRAFTKIT_CACHE_GB", str(limit / 1e9))
    states = reader(address)
    everything = list(range(len(LENGTHS)))
    for numbers in (everything, everything[::-1]):
        for number in numbers:
            if LENGTHS[number] * manifest.token_bytes <= limit:
                states.states_of([number], 300)
                files = (path for path in cache.rglob("*") if path.is_file() and path.name != TOTAL)
                kept = sum(path.stat().st_size for path in files)
                assert kept <= limit
    with pytest.raises(DraftkitError, match="do not fit into the cache"):
        states.states_of([5], 300)


def test_what_is_wrong_with_a_store_is_said(data: Path, folder: Path, tmp_path: Path) -> None:
    address = written(data, f"plain://{tmp_path}/states", folder)
    shard = tmp_path / "states/states-00001.safetensors"
    whole = shard.read_bytes()
    reader(address, verify=True)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DraftkitError, match=rf"damaged\n.*{address}/states-00001"):
        reader(address, verify=True)
    shard.write_bytes(whole[:-1])
    with pytest.raises(DraftkitError, match="damaged"):
        reader(address).states_of([3], 300)
    shard.unlink()
    with pytest.raises(SourceError, match="is missing"):
        reader(address).states_of([3], 300)
    assert written(data, address, folder) == address  # what is missing is written again
    assert shard.read_bytes() == whole
    with pytest.raises(SourceError, match=r"manifest\.json is missing"):
        reader(f"plain://{tmp_path}/none")
    Store(f"plain://{tmp_path}/other").write("precious.txt", b"1")
    with pytest.raises(DraftkitError, match="has no states"):
        written(data, f"plain://{tmp_path}/other", folder)


@pytest.mark.parametrize("scheme", ["old", "looking"])
def test_a_store_without_conditional_puts_has_one_writer(
    scheme: str,
    draftkit: Command,
    stored: Path,
    data: Path,
    folder: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    address = f"{scheme}://{out}"
    command = ("data", "states", data, address, "--target", folder, "--encoding", "float32", "--device", "cpu")
    refused = draftkit(*command, "--workers", 2)
    assert (refused.code, "2 workers cannot share" in refused.err, "on condition" in refused.err) == (1, True, True)
    ran = draftkit(*command, "--tokens-per-row", 64, "--shard-tokens", 100)
    assert (ran.code, ran.out.startswith(f"written: {address}: ")) == (0, True), ran.err
    assert content(out) == content(stored)
    with folder_at(address).shared():
        second = draftkit(*command, "--tokens-per-row", 64, "--shard-tokens", 100)
    assert (second.code, f"{address}/{WRITER}" in second.err) == (1, True), second.err


def test_the_next_command_names_addresses(draftkit: Command, data: Path, folder: Path) -> None:
    address = f"memory://{uuid4().hex}"
    Store(address).upload(data, "data.jsonl")
    samples, out = f"{address}/data.jsonl", f"{address}/states"
    ran = draftkit("data", "states", samples, out, "--target", folder, "--device", "cpu")
    expected = f"next: draftkit train --recipe RECIPE --target {folder} --data {samples} --states {out} --out RUN"
    assert ran.err.splitlines()[-1] == expected


def test_two_jobs_share_a_store(stored: Path, data: Path, folder: Path) -> None:
    """A second one finds what is there."""
    address = f"memory://{uuid4().hex}"
    settings = StatesSettings(target=str(folder), encoding="float32", **SETTINGS)
    with open_states_job(data, address, settings) as one, open_states_job(data, address, settings) as other:
        assert one.write(alive=iter([True, False]).__next__).shards
        assert other.write() == read_manifest(address)
    store = Store(address)
    assert {name: store.read(name) for name in store.names()} == content(stored)
