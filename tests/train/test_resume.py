"""`--resume` goes on with the run that a folder is of, and with no other."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.training.samples import samples
from test_train import assert_same, config, data, settings, target, weights, whole  # noqa: F401

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.errors import DraftkitError
from draftkit.train.checkpoint import FREE, INPUTS_FILE, rows_of_process
from draftkit.train.config import TrainConfig
from draftkit.train.dry_run import check_run
from draftkit.train.run import train_draft
from draftkit.train.settings import LoraSettings, StreamSettings

torch.set_num_threads(1)


@pytest.fixture
def begun(whole: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A copy of a whole run as it was before its last checkpoint."""
    out = tmp_path / "run"
    shutil.copytree(whole / "checkpoint-4", out / "checkpoint-4")
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"options.loss": "ce"}, "options.loss: kl, now ce"),
        ({"options.steps": 4}, "options.steps: 3, now 4"),
        ({"options.layers": "[1, 3, 4]"}, "options.layers: [1, 3, 5], now [1, 3, 4]"),
        ({"draft_vocab_size": 32}, "draft_vocab_size: 64, now 32"),
        ({"optimization.lr": 2e-3, "optimization.beta2": 0.9}, "optimization.beta2: 0.95, now 0.9"),
        ({"optimization.accumulation": 2}, "optimization.accumulation: 1, now 2"),
        ({"tokens_per_row": 256}, "tokens_per_row: 128, now 256"),
        ({"seed": 1}, "seed: 0, now 1"),
        ({"lora": "{r: 4}"}, "lora.r: none, now 4"),
        ({"validation.share": 0.3}, "validation.share: 0.2, now 0.3"),
        ({"optimization.max_steps": 2}, "optimization.max_steps: 4 are done, now 2"),
        ({"optimization.max_steps": 0, "optimization.epochs": 0.25}, "are done, now 0.25"),
    ],
)
def test_another_setting_is_refused(
    more: dict[str, object],
    said: str,
    begun: Path,
    target: Path,  # noqa: F811
    data: Path,  # noqa: F811
    draftkit: Command,
) -> None:
    refused = draftkit("train", *settings(target, data, begun, **more), "--resume")
    assert refused.code == 1
    assert "the run was begun with other settings" in refused.err
    assert said in refused.err
    if "optimization.lr" in more:  # every difference at once
        assert "optimization.lr: 0.001, now 0.002" in refused.err
    assert [path.name for path in begun.iterdir()] == ["checkpoint-4"]


def other_weights(given: TrainConfig, folder: Path) -> TrainConfig:
    """The target's folder is replaced: its name stays."""
    kept = folder / "target"
    shutil.copytree(given.target, kept)
    pico.save_llama(kept, num_hidden_layers=6, seed=1)
    return dataclasses.replace(given, target=str(kept))


def other_samples(given: TrainConfig, folder: Path) -> TrainConfig:
    write_samples(folder / "data.jsonl", samples(40)[::-1], SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return dataclasses.replace(given, data=str(folder / "data.jsonl"))


def other_judges(given: TrainConfig, folder: Path) -> TrainConfig:
    return dataclasses.replace(given, validation=dataclasses.replace(given.validation, samples=given.data))


def a_draft(given: TrainConfig, folder: Path) -> TrainConfig:
    return dataclasses.replace(given, draft=str(Path(given.out) / "checkpoint-4"))


def another_recipe(given: TrainConfig, folder: Path) -> TrainConfig:
    return dataclasses.replace(given, recipe="p-eagle", options={"layers": [1, 3, 5]})


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (other_weights, "target"), (other_samples, "data"), (other_judges, "validation.samples"), (a_draft, "draft"),
        (another_recipe, "recipe"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("run", [check_run, train_draft])
def test_what_settings_name_has_to_be_the_same(
    run: Callable[..., object],
    other: Callable[[TrainConfig, Path], TrainConfig],
    name: str,
    begun: Path,
    target: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """By what is in it, with the beginnings of both digests in the message."""
    with pytest.raises(
        DraftkitError, match=rf"begun with other settings:\n    (.*\n    )*{name}: .*, now .+"
    ) as refused:
        run(other(config(target, data, begun), tmp_path), resume=True)
    lines = [line for line in str(refused.value).splitlines() if f" {name}: " in line]
    assert len(lines) == 1
    if name in ("target", "data"):
        assert lines[0].count("…)") == 2
    assert [path.name for path in begun.iterdir()] == ["checkpoint-4"]


def by(rows: int, begun: Path) -> None:
    """The checkpoint as if steps of the run had so many rows, of as many processes."""
    inputs = begun / "checkpoint-4" / INPUTS_FILE
    inputs.write_text(json.dumps(json.loads(inputs.read_text()) | {"rows_per_step": rows}))


def test_another_number_of_processes_keeps_the_rows_of_a_step(
    begun: Path,
    target: Path,  # noqa: F811
    data: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One process goes on where two were, with the same settings or with the accumulation that this takes."""
    by(2, begun)
    check_run(config(target, data, begun), resume=True)
    assert "goes on from checkpoint-4; 1 process, 2 rows a step each\n" in capsys.readouterr().err
    check_run(config(target, data, begun, **{"optimization.accumulation": 2}), resume=True)
    assert "\n  optimization.accumulation 1, now 2\n" in capsys.readouterr().err
    with pytest.raises(DraftkitError, match=r"optimization.accumulation: 1, now 3\n    rows_per_step: 2, now 3\n"):
        check_run(config(target, data, begun, **{"optimization.accumulation": 3}), resume=True)


def test_rows_that_processes_cannot_share_are_refused(begun: Path, target: Path, data: Path) -> None:  # noqa: F811
    by(3, begun)
    given = config(target, data, begun)
    assert rows_of_process(begun / "checkpoint-4", given, 3) == 1
    with pytest.raises(DraftkitError, match="a step of the run has 3 rows, which 2 processes cannot share equally"):
        rows_of_process(begun / "checkpoint-4", given, 2)


@pytest.mark.slow
def test_what_is_moved_is_the_same(whole: Path, begun: Path, target: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    """More steps, other checkpoints and other lines of the log, from there on."""
    shutil.copytree(target, tmp_path / "target")
    shutil.copy(data, tmp_path / "samples.jsonl")
    more = {"optimization.max_steps": 11, "save_every": 3, "keep": 0, "log_every": 4, "validation.every": 5}
    train_draft(config(tmp_path / "target", tmp_path / "samples.jsonl", begun, **more), resume=True)
    steps = {"checkpoint-4", "checkpoint-5", "checkpoint-6", "checkpoint-9", "checkpoint-10", "checkpoint-11"}
    assert {path.name for path in begun.glob("checkpoint-*")} >= steps - {"checkpoint-5", "checkpoint-10"}
    assert {path.name for path in begun.glob("checkpoint-*")} <= steps  # those at 5 and 10 where they are the best
    log = json.loads((begun / "checkpoint-11" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 8]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [5, 10, 11]
    spent = [entry["processor_seconds"] for entry in log]
    assert spent == sorted(spent)  # of both parts
    assert [entry["tokens"] / entry["step"] for entry in log] == pytest.approx([log[0]["tokens"]] * len(log), abs=1)


@pytest.mark.slow
def test_a_run_with_all_of_its_steps_takes_none_more(whole: Path, target: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    """As when it was killed after the last checkpoint, and before the draft was written."""
    out = tmp_path / "run"
    shutil.copytree(whole / "checkpoint-8", out / "checkpoint-8")
    train_draft(config(target, data, out), resume=True)
    assert {path.name for path in out.iterdir()} == {"checkpoint-8", "draft"}
    again, before = weights(out / "draft"), weights(whole / "draft")
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_what_may_change_is_a_setting() -> None:
    given = TrainConfig(recipe="eagle3", target="t", data="d", out="o", lora=LoraSettings(), stream=StreamSettings())
    assert given.by_name().keys() >= FREE
