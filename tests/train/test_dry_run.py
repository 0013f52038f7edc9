"""What a run takes, told before it is begun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.training.samples import samples

from draftkit.data.packing import pack
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.data.states.encoding import states_bytes
from draftkit.data.states.shards import read_manifest
from draftkit.report.terminal.data import run_size
from draftkit.train.config import TrainConfig, read_config
from draftkit.train.dry_run import RunSize, check_run, measure_step

torch.set_num_threads(1)
SAMPLES = samples(30)
TOKENS = sum(map(len, SAMPLES))
ROW = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pico.save_tokenizer(pico.save_llama(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    write_samples(path, SAMPLES, SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return path


def config(target: Path, data: Path, out: Path, **flags: object) -> TrainConfig:
    given = {"recipe": "eagle3", "target": str(target), "data": str(data), "out": str(out), **flags}
    return read_config(None, [f"tokens_per_row={ROW}", "validation.share=0", "device=cpu", "options.steps=3"], given)


def test_states_by_hand() -> None:
    assert states_bytes(10, 1000, states=4, size=8, encoding="bf16") == 1000 * 4 * 16 + 80
    assert states_bytes(10, 1000, states=4, size=8, encoding="int8") == 1000 * 4 * (8 + 4) + 80
    assert states_bytes(10, 1000, states=4, size=8, encoding="int8-channel") == 1000 * 4 * 8 + 10 * 4 * 8 * 4 + 80


@pytest.mark.slow
def test_stored_states_take_what_was_said(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    """Before they are stored, by the run and by the command that stores them; and afterwards."""
    out = tmp_path / "states"
    command = ("data", "states", data, out, "--target", target, "--device", "cpu", "--json")
    planned = json.loads(draftkit(*command, "--dry-run").out)["plan"]["bytes"]
    before = check_run(config(target, data, tmp_path / "run"))
    assert not out.exists()
    assert draftkit(*command).code == 0
    written = sum(shard.bytes for shard in read_manifest(out).shards)
    assert before.states_bytes <= planned <= written <= before.states_bytes + 4096
    after = check_run(config(target, data, tmp_path / "run", states=str(out)))
    assert (after.states_bytes, after.encoding) == (written, "bf16")


def test_the_size_of_a_run(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    run = config(target, data, tmp_path / "out")
    size = check_run(run)
    assert (size.samples, size.tokens, size.sample_bytes) == (30, TOKENS, data.stat().st_size)
    file = tmp_path / "run.yaml"
    file.write_text(run.to_yaml())
    ran = draftkit("train", "--config", file, "--dry-run")
    assert (ran.code, ran.out) == (0, run.to_yaml())
    assert f"samples: 30, {TOKENS:,} tokens" in ran.err
    assert f"trained parameters: {size.trained:,} of 16 bytes" in ran.err
    assert not (tmp_path / "out").exists()


def test_what_is_trained_is_shared_among_devices() -> None:
    size = RunSize(
        samples=1, tokens=1, sample_bytes=1, states_bytes=1, encoding="bf16", trained=10**9, ranks=8
    )  # fmt: skip
    *_, line = run_size(size)
    assert line.endswith("16.0 GB on a device, 2.0 GB on each of 8 that share them by FSDP")


def test_a_step_on_the_longest_row(target: Path, data: Path, tmp_path: Path, draftkit: Command) -> None:
    run = config(target, data, tmp_path / "out")
    step = measure_step(run)
    lengths = [len(sample) for sample in SAMPLES]
    assert step.tokens == max(sum(lengths[number] for number in row) for row in pack(lengths, ROW))
    assert step.seconds > 0
    assert step.peak_bytes > 16 * check_run(run).trained
    assert not (tmp_path / "out").exists()
    file = tmp_path / "run.yaml"
    file.write_text(run.to_yaml())
    ran = draftkit("train", "--config", file, "--dry-run-step")
    assert ran.code == 0
    assert re.fullmatch(rf"a step on {step.tokens} tokens: .* of memory resident at most, [\d,]+ tokens/s\n", ran.out)
    assert json.loads(draftkit("train", "--config", file, "--dry-run-step", "--json").out)["tokens"] == step.tokens
    assert not (tmp_path / "out").exists()


def test_a_step_that_the_run_could_not_take_is_refused(
    target: Path, data: Path, tmp_path: Path, draftkit: Command
) -> None:
    given = ("--recipe", "eagle3", "--target", target, "--data", data, "--out", tmp_path / "out")
    refused = draftkit("train", *given, "--set", "tokens_per_row=16", "--dry-run-step")
    assert (refused.code, "a row 16" in refused.err) == (1, True)
