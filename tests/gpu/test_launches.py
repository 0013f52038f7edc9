"""The kernels that rounds launch are no more than benchmarks/data/launches.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.gpu.fake_cuda import fake_cuda
from fixtures.gpu.launch_counts import counts

pytest.importorskip("triton")

KNOWN = Path(__file__).parents[2] / "benchmarks/data/launches.json"


@pytest.mark.slow
def test_rounds_launch_no_more_than_they_did() -> None:
    with fake_cuda() as gpu:
        found = counts(gpu)
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    assert found.keys() == known.keys()
    more = {name: f"{known[name]} → {number}" for name, number in found.items() if number > known[name]}
    assert not more
    fewer = {name: f"{known[name]} → {number}" for name, number in found.items() if number < known[name]}
    assert not fewer, "write them down: python -m scripts.gpu.launches"
