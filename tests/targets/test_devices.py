"""Which GPU a process computes on. No GPU is needed: torch.cuda is told to have two; only the order is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import Command
from fixtures.training.samples import samples
from transformers import AutoModelForCausalLM

from draftkit.checks.training_data import check_data
from draftkit.cli.options import settled_dtype
from draftkit.data.responses import Sampling, engine_responder
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.data.states.write import StatesSettings, open_states_job
from draftkit.doctor.diagnose import diagnose_draft
from draftkit.errors import DraftkitError
from draftkit.evaluate.certificate import certify_draft
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.loading import open_target
from draftkit.requests import SamplingParameters
from draftkit.results.settings import Settings
from draftkit.targets import tokens as stored_tokens
from draftkit.targets.devices import device_named, fast_dtype, use_device
from draftkit.train import setup
from draftkit.train.config import read_config
from draftkit.train.run import train_draft


class Gpus:
    """Two, and the current one."""

    def __init__(self) -> None:
        self.current = 0

    def make_current(self, device: str | int | torch.device) -> None:
        self.current = device if isinstance(device, int) else torch.device(device).index


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    monkeypatch.setattr(torch.cuda, "set_device", gpus.make_current)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    return gpus


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        (None, None, "cuda:0"), ("cuda", None, "cuda:0"), ("cuda:1", None, "cuda:1"), ("cpu", "1", "cpu"),
        (None, "1", "cuda:1"), ("cuda", "1", "cuda:1"),
    ],
)  # fmt: skip
def test_the_device_of_a_process(
    name: str | None, rank: str | None, expected: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert device_named(name) == expected
    assert gpus.current == 0
    use_device(device_named(name))
    assert gpus.current == (0 if expected == "cpu" else int(expected[-1]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:99", "device cuda:99: torch sees 2 CUDA devices\n.*cuda:0 to cuda:1"),
        ("cuda:", "device 'cuda:'\n.*cpu, cuda or cuda:N"),
        ("cuda:one", "device 'cuda:one'"),
        ("cudagraph", "device 'cudagraph'"),
        ("mps", "device 'mps'"),
    ],
)
def test_devices_that_there_are_not(name: str, message: str, gpus: Gpus) -> None:
    with pytest.raises(DraftkitError, match=message):
        device_named(name)


def test_processes_do_not_share_a_device(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(DraftkitError, match="cuda:2: torch sees 2 CUDA devices"):
        device_named(None)
    with pytest.raises(DraftkitError, match="'cuda:1' for several processes"):
        device_named("cuda:1")


def test_a_device_that_there_is_not_is_one_message(gpus: Gpus, draftkit: Command) -> None:
    shown = draftkit("eval", "--target", "zoo:target", "--draft", "zoo:eagle", "--device", "cuda:99")
    assert shown.code == 1
    assert "device cuda:99: torch sees 2 CUDA devices" in shown.err
    assert "Traceback" not in shown.err


class Loading(Exception):
    """A target would be loaded now."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    write_samples(path, samples(8), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return path


def train(target: Path, data: Path, device: str, **more: object) -> None:
    given = {"recipe": "eagle3", "target": str(target), "data": str(data), "out": str(data.parent / "run")}
    # Whether a GPU can compute in bfloat16 is asked of the GPU.
    given |= {"device": device, "validation": {"share": 0.2}, "optimization": {"precision": "float32"}}
    train_draft(read_config(None, [], given | more))


def states(target: Path, data: Path, device: str) -> None:
    settings = StatesSettings(target=str(target), layers=(1,), device=device)
    with open_states_job(data, data.parent / "states", settings) as job:
        job.write()


SAMPLING = Sampling(SamplingParameters(), 8, frozenset())


def certify(target: Path, data: Path, device: str) -> None:
    certify_draft("zoo:target", "zoo:eagle", Settings(device=device), engines=[OwnEngine()])


COMMANDS: dict[str, Callable[[Path, Path, str], object]] = {
    "eval": lambda _target, _data, device: evaluate_draft("zoo:target", ["zoo:eagle"], Settings(device=device)),
    "certify": certify,
    "doctor": lambda _target, _data, device: diagnose_draft("zoo:target", "zoo:eagle", device=device),
    "data regenerate": lambda target, _, device: engine_responder(str(target), SAMPLING, 1, device=device),
    "data check": lambda target, data, device: check_data(data, str(target), device=device),
    "data states": states,
    "train": train,
    "train --states": lambda target, data, device: train(target, data, device, states="states"),
}


@pytest.fixture
def loading_on(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPU that was the current one where a target's weights would have been read."""
    found = []

    def load(*_: object, **__: object) -> None:
        found.append(gpus.current)
        raise Loading

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(stored_tokens, "open_checkpoint", load)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_the_device_is_current_before_the_target_is_loaded(
    command: str, running_target: Path, data: Path, loading_on: list[int]
) -> None:
    with pytest.raises(Loading):
        COMMANDS[command](running_target, data, "cuda:1")
    assert loading_on == [1]


def test_each_process_of_torchrun_loads_the_target_on_its_own_device(
    running_target: Path, data: Path, loading_on: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    # The real ones wait for the other process.
    monkeypatch.setattr(setup, "training_arguments", lambda *_: SimpleNamespace(world_size=2, process_index=1))
    with pytest.raises(Loading):
        train(running_target, data, "")
    assert loading_on == [1]


def test_a_run_has_one_device(data: Path, gpus: Gpus) -> None:
    """Transformers by itself takes cuda:0 and splits batches among all that there are."""
    given = {"recipe": "eagle3", "target": "", "data": str(data), "out": str(data.parent), "device": "cuda:1"}
    config = read_config(None, ["optimization.precision=float32"], given)
    try:
        arguments = setup.training_arguments(config, open_target("zoo:target"), "cuda:1")
        assert gpus.current == 0
        use_device("cuda:1")
        assert arguments.device == torch.device("cuda:1")
        assert arguments.n_gpu == 1
        assert arguments.train_batch_size == 1
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ), reason="glibc's")
def test_memory_of_large_tensors_is_kept_for_the_next() -> None:
    """In a process of its own: where a heap cannot grow any more, as after thousands of tests, nothing is kept."""
    script = """
import resource, torch
from draftkit.targets.devices import tune_for_cpu
from transformers import LlamaConfig, LlamaForCausalLM
tune_for_cpu(LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1)))
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MB, dropped at once
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 8  # fetched anew it takes 32 pages of 2 MB, or 16,384 of 4 KB


@pytest.mark.parametrize(
    ("amx", "avx", "found"),
    [
        (True, True, ("bfloat16", "AMX")),
        (False, True, ("bfloat16", "AVX512_BF16")),
        (False, False, ("float32", "neither")),
    ],
)
def test_the_fast_dtype_of_a_cpu_and_why(
    amx: bool, avx: bool, found: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    name, why = found
    assert settled_dtype("auto", "cpu") == name
    said = capsys.readouterr().err
    assert name in said
    assert why in said
    assert settled_dtype(None, "cpu") is None
    assert fast_dtype("cuda:0")[0] == "bfloat16"
