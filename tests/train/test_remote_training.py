"""A run on samples and states in a store is that on a disk."""

# ruff: noqa: F401, F811
from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
import torch
from conftest import Command
from test_train import assert_same, config, data, settings, target, weights

from draftkit.io.store import Store
from draftkit.train.run import train_draft

torch.set_num_threads(1)


@pytest.mark.slow
def test_training_from_a_store_is_training_from_a_disk(
    target: Path, data: Path, tmp_path: Path, draftkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; the run that is saved names the address, and goes on from it."""
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path / "cache"))
    store = Store(f"memory://{uuid4().hex}")
    store.upload(data, "data.jsonl")
    runs = []
    for samples, states in ((data, tmp_path / "states"), (f"{store}/data.jsonl", f"{store}/states")):
        layers = ("--layers", "1,3,5", "--encoding", "float32", "--target", target, "--device", "cpu")
        assert draftkit("data", "states", samples, states, *layers).code == 0
        runs.append(tmp_path / f"run-{len(runs)}")
        more = {"states": states, "verify_states": True, "optimization.max_steps": 4}
        train_draft(config(target, samples, runs[-1], **more))
    assert_same(weights(runs[0] / "draft"), weights(runs[1] / "draft"))
    assert f"states: {store}/states" in (runs[1] / "draft/train.yaml").read_text()
    again = (*settings(target, f"{store}/data.jsonl", runs[1]), "--states", f"{store}/states")
    ran = draftkit("train", *again, "--set", "optimization.max_steps=6", "--set", "verify_states=false", "--resume")
    assert ran.code == 0, ran.err
