"""States that a worker computes while training uses them up: the same draft as from stored ones, whoever is killed."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.fuzzing.killed import killed_at_rename
from fixtures.training.samples import samples
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.states.online import load_final_norm
from draftkit.data.states.shards import SCHEMA, Manifest, sampled_sha256
from draftkit.data.states.stream import (
    ATTEMPTS,
    DONE,
    ROWS,
    WANTED,
    StreamedStates,
    begin_stream,
    finish_stream,
    local_worker,
    run_worker,
    serve,
)
from draftkit.data.states.vllm import VllmExtractor, layer_ids
from draftkit.data.states.write import TargetExtractor, write_states
from draftkit.errors import DraftkitError, TargetError
from draftkit.layout.digest import weights_sha256
from draftkit.loading import open_target
from draftkit.targets.states import FINAL, AuxLayers
from draftkit.train import streaming
from draftkit.train.config import TrainConfig, read_config
from draftkit.train.dry_run import check_run
from draftkit.train.run import Trained, train_draft
from draftkit.train.streaming import open_stream, stream_manifest

FAKE = Path(__file__).parents[1] / "fixtures/engines/fake_vllm"
LAYERS = (1, 3, 5)
SAMPLES = samples(40)
STEPS = 12
KILLED = 7  # before this step
LEFT = [DONE, "manifest.json", "worker.log"]
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pico.save_tokenizer(pico.save_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    write_samples(path, SAMPLES, SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has a fake vLLM, which computes states with transformers."""
    path = tmp_path_factory.mktemp("vllm") / "python"
    environment = f"PYTHONPATH={FAKE} FAKE_VLLM_JOURNAL={path.parent / 'journal'} OMP_NUM_THREADS=1"
    path.write_text(f'#!/bin/sh\nexec env {environment} {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def manifest(target: Path) -> Manifest:
    return Manifest(
        schema=SCHEMA, target="pico", target_revision=None, target_sha256=sampled_sha256(target),
        engine="vllm", dtype="float32", data="data", data_sha256="0", num_documents=len(SAMPLES),
        num_tokens=sum(map(len, SAMPLES)), layers=LAYERS, hidden_size=pico.HIDDEN, encoding="float32", shard_tokens=64,
    )  # fmt: skip


def extractor() -> TargetExtractor:
    return TargetExtractor(pico.llama(num_hidden_layers=6), LAYERS, 64)


@contextmanager
def serving(folder: Path, extract: Any, rows_together: int = 1) -> Iterator[None]:
    stop = Event()
    worker = Thread(target=serve, args=(folder, extract, lambda: not stop.is_set(), rows_together))
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


def stream(folder: Path, manifest: Manifest, **more: Any) -> StreamedStates:
    begin_stream(folder, manifest)
    return StreamedStates(folder, manifest, SAMPLES, AuxLayers((*LAYERS, FINAL)), dtype=torch.float32, **more)


def content(folder: Path) -> list[str]:
    return sorted(path.name for name in (WANTED, ROWS) for path in (folder / name).iterdir())


def test_workers_share_rows_and_take_several_in_one_call(manifest: Manifest, tmp_path: Path) -> None:
    """Each row once, whoever computes it; one that fails does not fail those that were computed with it."""
    rows, calls = [[number] for number in range(6)], list[list[tuple[int, ...]]]()

    def noted() -> Callable[[Sequence[Sample]], Iterator[tuple[int, Tensor]]]:
        own = extractor()  # a worker's, as no two threads may use one

        def extract(samples: Sequence[Sample]) -> Iterator[tuple[int, Tensor]]:
            calls.append([tuple(sample.tokens.tolist()) for sample in samples])
            return own(samples)

        return extract

    streamed = stream(tmp_path, manifest)
    for numbers in rows:
        streamed.announce(numbers)
    with serving(tmp_path, noted(), 2), serving(tmp_path, noted(), 3):
        found = [streamed.states_of(numbers, 80) for numbers in rows]
    computed = [tokens for call in calls for tokens in call]
    assert sorted(computed) == sorted(tuple(SAMPLES[number].tokens.tolist()) for number in range(6))
    assert len(calls) < 6
    for number, states in enumerate(found):
        ((_, expected),) = extractor()([SAMPLES[number]])
        torch.testing.assert_close(states.last[0, : len(expected)], expected[:, -1], rtol=1e-4, atol=1e-4)
    assert not (tmp_path / ".locks").exists()


def test_rows_are_those_of_the_extractor_and_are_used_up(manifest: Manifest, tmp_path: Path) -> None:
    """A worker that ends and one that begins make no difference, nor does a trainer that begins again."""
    rows, extract = [[0, 3], [5], [2, 1]], extractor()
    streamed = stream(tmp_path, manifest)
    for numbers in rows:
        streamed.announce(numbers)
    with serving(tmp_path, extract):
        found = [streamed.states_of(rows[0], 80)]
    streamed = stream(tmp_path, manifest)
    streamed.announce(rows[1])
    with serving(tmp_path, extract):
        found += [streamed.states_of(numbers, 80) for numbers in rows[1:]]
    for numbers, states in zip(rows, found, strict=True):
        expected = torch.cat([s for _, s in sorted(extract([SAMPLES[n] for n in numbers]), key=lambda pair: pair[0])])
        assert torch.equal(states.features[0, : len(expected)], expected.flatten(1))
        assert torch.equal(states.last[0, : len(expected)], expected[:, -1])
        assert not states.last[0, len(expected) :].any()
    assert content(tmp_path) == []
    finish_stream(tmp_path)
    assert serve(tmp_path, extract) == 0


def test_states_of_another_run_go(manifest: Manifest, tmp_path: Path) -> None:
    streamed = stream(tmp_path, manifest)
    streamed.announce([1])
    with serving(tmp_path, extractor()):
        while not list((tmp_path / ROWS).iterdir()):
            time.sleep(0.01)
    stream(tmp_path, manifest)
    assert len(list((tmp_path / ROWS).iterdir())) == 1  # the same run goes on with it
    stream(tmp_path, replace(manifest, encoding="bf16"))
    assert content(tmp_path) == []
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DraftkitError, match="something else"):
        stream(tmp_path, manifest)


def test_a_run_that_is_killed_in_its_first_write_goes_on(manifest: Manifest, tmp_path: Path) -> None:
    assert killed_at_rename(0, lambda: begin_stream(tmp_path / "stream", manifest))
    stream(tmp_path / "stream", manifest)
    assert content(tmp_path / "stream") == []


def test_what_the_worker_cannot_compute_is_said_to_the_trainer(manifest: Manifest, tmp_path: Path) -> None:
    def broken(wanted: Any) -> Iterator[tuple[int, Tensor]]:
        yield 0, torch.full((len(wanted[0]), len(LAYERS) + 1, pico.HIDDEN), torch.nan)

    streamed = stream(tmp_path, manifest)
    with serving(tmp_path, broken), pytest.raises(DraftkitError, match="hidden states are not finite"):
        streamed.states_of([0], 64)
    with serving(tmp_path, extractor()):  # another run may do better
        assert stream(tmp_path, manifest).states_of([0], 64).last.any()


def test_a_worker_of_another_target_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    stream(tmp_path / "stream", manifest)
    other = pico.save_llama(tmp_path / "other", seed=1, num_hidden_layers=6)
    with pytest.raises(TargetError, match="another target"):
        run_worker(tmp_path / "stream", str(other), python=sys.executable)


def test_a_worker_that_keeps_ending_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no such model\nexit 4\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with local_worker(tmp_path, "T", "python", tensor_parallel=1, device=None) as worker:
        for _ in range(ATTEMPTS - 1):
            worker.process.wait()
            worker.check()
        worker.process.wait()
        with pytest.raises(DraftkitError, match=r"exit code 4:(\nno such model){3}"):
            worker.check()


def settings() -> list[str]:
    given = {
        "optimization.max_steps": STEPS, "optimization.accumulation": 2, "optimization.lr": "1e-3",
        "tokens_per_row": 128, "draft_vocab_size": 64, "options.steps": 2, "options.layers": "[1, 3, 5]",
        "save_every": 4, "log_every": 1, "validation.share": 0.2, "validation.every": 4, "device": "cpu",
    }  # fmt: skip
    return [f"{name}={value}" for name, value in given.items()]


def streamed_config(target: Path, data: Path, out: Path, python: object) -> TrainConfig:
    flags = {"recipe": "eagle3", "target": str(target), "data": str(data), "out": str(out)}
    stream = {"python": str(python), "dtype": "float32", "ahead": 3}
    return read_config(None, settings(), flags | {"stream": stream})


@pytest.fixture(scope="module")
def extract(target: Path, tmp_path_factory: pytest.TempPathFactory) -> VllmExtractor:
    """The states that the fake vLLM gives, without its process."""
    folder = str(tmp_path_factory.mktemp("extraction"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAKE)
        extraction = importlib.import_module("extraction").Extraction(
            {
                "model": str(target),
                "dtype": "float32",
                "kv_transfer_config": {"kv_connector_extra_config": {"shared_storage_path": folder}},
                "speculative_config": {
                    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids(LAYERS, 6)}}
                },
            }
        )
    norm = load_final_norm(target, torch.float32)
    return VllmExtractor(lambda prompts: [Path(extraction(asked["tokens"])) for asked in prompts], LAYERS, 6, norm)


@pytest.fixture(scope="module")
def stored(target: Path, data: Path, extract: VllmExtractor, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained on states from files."""
    folder = tmp_path_factory.mktemp("stored")
    config = streamed_config(target, data, folder / "out", "")
    wanted = replace(manifest_of(config), target_sha256=weights_sha256(target))
    write_states(folder / "states", wanted, SAMPLES, extract)
    return train_draft(replace(config, stream=None, states=str(folder / "states")))


def manifest_of(config: TrainConfig) -> Manifest:
    assert config.stream is not None
    return stream_manifest(config, config.stream, open_target(config.target), AuxLayers(LAYERS), SAMPLES)


@pytest.mark.slow
def test_the_draft_is_that_of_stored_states(
    target: Path, data: Path, extract: VllmExtractor, stored: Trained, tmp_path: Path
) -> None:
    """With two epochs, accumulation and validations in between; the worker is started elsewhere."""
    config = streamed_config(target, data, tmp_path / "streamed", "")
    begin_stream(tmp_path / "streamed" / "stream", manifest_of(config))
    with serving(tmp_path / "streamed" / "stream", extract):
        trained = train_draft(config)
    assert trained.metrics["eval_acceptance_length"] == stored.metrics["eval_acceptance_length"]
    assert_same(stored.draft, trained.draft)


def test_the_first_process_alone_reads_weights_and_samples(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others read in the folder whose states are wanted."""
    config = streamed_config(target, data, tmp_path, "")
    assert config.stream is not None
    wanted = manifest_of(config)

    def opened() -> AbstractContextManager[StreamedStates]:
        assert config.stream is not None
        return open_stream(config, config.stream, open_target(config.target), AuxLayers(LAYERS), SAMPLES)

    monkeypatch.setenv("RANK", "0")
    with opened():
        monkeypatch.setenv("RANK", "1")
        for digest in ("samples_sha256", "sampled_sha256"):
            monkeypatch.setattr(streaming, digest, lambda *_: pytest.fail("read once more"))
        with opened() as streamed:
            assert streamed._manifest == wanted


@pytest.mark.long
def test_two_processes_share_a_worker(target: Path, data: Path, python: Path, tmp_path: Path) -> None:
    """Each reads rows of its own, which the worker of the first one computes."""
    config = streamed_config(target, data, tmp_path / "out", python)
    config = replace(config, optimization=replace(config.optimization, max_steps=2))
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*launch, "-m", "draftkit", "train", "--config", str(tmp_path / "run.yaml")],
        env=environment, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "out" / "draft").is_dir()
    assert left_in(tmp_path / "out") == LEFT


def left_in(out: Path) -> list[str]:
    """What a finished run leaves where states were."""
    return sorted(path.name for path in (out / "stream").iterdir())


def assert_same(*drafts: Path | None) -> None:
    expected, found = (load_file(Path(draft or "", "model.safetensors")) for draft in drafts)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def workers(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if "stream" in child.cmdline()]


class Kill(TrainerCallback):
    """Ends the process at once."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


class Disturbed(TrainerCallback):
    """Counts what waits in the folder, and kills the worker once, with all of its processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.most = 0
        self.killed = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.most = max(self.most, len(list((self.folder / WANTED).glob("*.json"))))
        if state.global_step == KILLED:
            for worker in workers(psutil.Process()):
                worker.kill()
                self.killed += 1


@pytest.mark.long
def test_the_draft_is_that_of_stored_states_whoever_is_killed(
    target: Path, data: Path, python: Path, stored: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "streamed"
    config = streamed_config(target, data, out, python)
    check_run(config)
    assert not out.exists()
    forked = get_context("fork").Process(target=train_draft, args=(config,), kwargs={"callbacks": (Kill(),)})
    forked.start()  # a new interpreter would import everything anew
    forked.join(300)
    assert forked.exitcode == -signal.SIGKILL
    assert (out / "checkpoint-4").exists()
    disturbed = Disturbed(out / "stream")
    train_draft(config, resume=True, callbacks=(disturbed,))
    assert_same(stored.draft, out / "draft")
    assert disturbed.killed == 1
    assert 0 < disturbed.most <= 2 * (3 + 2)
    assert left_in(out) == LEFT
    assert not workers(psutil.Process())
