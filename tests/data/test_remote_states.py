"""States in a store: those of a folder, of which a reader fetches each shard once."""

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
from draftkit.data.states.offline import OfflineStates
from draftkit.data.states.shards import Part, read_manifest
from draftkit.data.states.write import StatesSettings, open_states_job
from draftkit.errors import DraftkitError, SourceError
from draftkit.io.store import Store
from draftkit.targets.states import FINAL, AuxLayers

assert FAMILIES
LAYERS = AuxLayers((2, 5, FINAL))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def written(data: Path, out: str, target: Path, encoding: Encoding = "float32", **more: Any) -> str:
    settings = StatesSettings(target=str(target), encoding=encoding, **SETTINGS, **more)
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


def test_each_shard_is_fetched_once(data: Path, folder: Path, tmp_path: Path) -> None:
    """Those alone that are read."""
    address = written(data, f"plain://{tmp_path}/states", folder)
    PlainStore.asked.clear()
    for _ in range(2):
        states = reader(address)
        for numbers in ([0, 1], [1], [0]):
            states.states_of(numbers, 300)
    assert [name for kind, name, _ in PlainStore.asked if kind == "read" and name != "manifest.json"] == [
        "states-00000.safetensors"
    ]


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


def test_the_next_command_names_addresses(draftkit: Command, data: Path, folder: Path) -> None:
    address = f"memory://{uuid4().hex}"
    Store(address).upload(data, "data.jsonl")
    samples, out = f"{address}/data.jsonl", f"{address}/states"
    ran = draftkit("data", "states", samples, out, "--target", folder, "--device", "cpu")
    expected = f"next: draftkit train --recipe RECIPE --target {folder} --data {samples} --states {out} --out RUN"
    assert ran.err.splitlines()[-1] == expected


def test_processes_share_a_store_by_parts(
    draftkit: Command, stored: Path, data: Path, folder: Path, tmp_path: Path
) -> None:
    """Each has a manifest of its own. What is gone is written again by the process whose part it is of; one that writes
    everything takes over."""
    out = tmp_path / "out"
    address = f"plain://{out}"
    command = ("data", "states", data, address, "--target", folder, "--encoding", "float32", "--device", "cpu")
    command = (*command, "--tokens-per-row", 64, "--shard-tokens", 100)
    refused = draftkit(*command, "--workers", 2)
    assert (refused.code, "2 workers cannot share" in refused.err, "--shard 0/2 to 1/2" in refused.err) == (
        1, True, True,
    )  # fmt: skip
    for wrong in ("2/2", "1", "a/b"):
        assert (draftkit(*command, "--shard", wrong).code, out.exists()) in {(1, False), (2, False)}
    first, second = (draftkit(*command, "--shard", f"{number}/2") for number in (1, 0))
    assert ("next: " in first.err, second.err.splitlines()[-1].startswith("next: draftkit train")) == (False, True)
    assert {path.name for path in out.iterdir()} == {
        "manifest-0-of-2.json", "manifest-1-of-2.json", *(path.name for path in stored.glob("states-*")),
    }  # fmt: skip
    assert read_manifest(address) == read_manifest(out) == read_manifest(stored)
    (out / "states-00001.safetensors").unlink()
    assert "0 tokens" in draftkit(*command, "--shard", "0/2", "--dry-run").out
    written(data, address, folder, part=Part(1, 2))
    assert reader(address, verify=True)
    with pytest.raises(DraftkitError, match="other settings"):
        written(data, address, folder, "bf16", part=Part(0, 3))
    written(data, address, folder)
    assert content(out) == content(stored)
