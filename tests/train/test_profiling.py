"""`profile.steps` says where steps went, by parts that add up, and writes a trace; the run is not changed by it."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path

import pytest
import torch
from test_train import config, data, target, weights, whole  # noqa: F401

from draftkit.errors import DraftkitError
from draftkit.train import profiling
from draftkit.train.profiling import PARTS, TRACE_FILE, StepProfile, part
from draftkit.train.run import check_run, train_draft

torch.set_num_threads(1)


@pytest.mark.slow
def test_steps_are_profiled_after_the_first(
    whole: Path,  # noqa: F811
    target: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    train_draft(config(target, data, out, **{"profile.steps": 3}))
    said = capsys.readouterr().err
    total = re.search(r"where 3 steps went, ([\d,.]+) ms each:", said)
    assert total is not None
    spent = {name: float(ms.replace(",", "")) for name, ms in re.findall(r"  (\w+) +([\d,.]+) ms ", said)}
    assert list(spent) == list(PARTS)
    assert sum(spent.values()) == pytest.approx(float(total[1].replace(",", "")), abs=0.5)
    assert all(ms > 0 for ms in spent.values())
    assert all(len(line) <= 80 for line in said.splitlines() if " ms " in line)
    events = json.loads(gzip.decompress((out / TRACE_FILE).read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert [names.count(name) >= 3 for name in ("data", "target", "draft", "loss", "backward")] == [True] * 5
    one, other = weights(out / "draft"), weights(whole / "draft")
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert not profiling._running


def test_a_part_within_another_is_not_counted_there(tmp_path: Path) -> None:
    profile = StepProfile(1, tmp_path)
    profile._since = time.perf_counter()
    profiling._running.append(profile)
    try:
        with part("draft"):
            time.sleep(0.01)
            with part("loss"):
                time.sleep(0.05)
    finally:
        profiling._running.remove(profile)
    assert profile._seconds["loss"] >= 0.05
    assert 0.01 <= profile._seconds["draft"] < 0.05 + profile._seconds["loss"]


def test_memory_of_devices_is_that_of_its_parts(target: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    """One device has four numbers of four bytes for each weight; of eight each keeps an eighth, and what is whole."""
    plan = check_run(config(target, data, tmp_path / "run", **{"optimization.optimizer": "adamw"}))
    assert [device.ranks for device in plan.memory] == [1, 8]
    one, eight = plan.memory
    assert one.optimizer == 2 * one.gradients == 8 * eight.optimizer
    assert eight.gradients == one.gradients + one.gradients // 8
    held = one.states + one.logits + one.activations + one.target_activations
    assert one.total == one.target + one.draft + one.gradients + one.optimizer + held
    assert one.total - eight.total == pytest.approx(one.optimizer * 7 / 8 - 2 * (one.gradients // 8), abs=8)
    muon, *_ = check_run(config(target, data, tmp_path / "run")).memory
    assert one.gradients < muon.optimizer < one.optimizer  # one number less for each weight of a matrix
    with pytest.raises(DraftkitError):
        check_run(config(target, tmp_path / "none", tmp_path / "run"))
