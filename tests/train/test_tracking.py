"""What a run says while it trains, on the terminal and to trackers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftkit.errors import DraftkitError
from draftkit.loading import open_target
from draftkit.train import setup
from draftkit.train.config import TrainConfig, read_config
from draftkit.train.log import LogLines, Pace, said_of_judges, validated
from draftkit.train.setup import OneDevice, check_trackers, training_arguments

FLAGS = {"recipe": "eagle3", "target": "zoo:target", "data": "samples.jsonl", "out": "run"}


def test_one_tracker_is_taken_as_typed() -> None:
    assert read_config(None, ["report_to=tensorboard"], FLAGS).report_to == ("tensorboard",)
    assert read_config(None, ["report_to=[wandb, trackio]"], FLAGS).report_to == ("wandb", "trackio")
    assert read_config(None, ["report_to=wandb, trackio"], FLAGS).report_to == ("wandb", "trackio")


def test_a_missing_tracker_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftkit.train.setup.find_spec", lambda name: None)
    with pytest.raises(
        DraftkitError, match=r"report_to needs tensorboard and wandb\n  next: pip install tensorboard wandb"
    ):
        check_trackers(["tensorboard", "wandb"])
    check_trackers([])


def test_trackers_are_told_draftkits_settings(tmp_path: Path) -> None:
    data = tmp_path / "samples.jsonl"
    data.write_text("{}\n")
    config = TrainConfig(
        recipe="eagle3", target="zoo:target", data=str(data), out=str(tmp_path / "run"), report_to=("tensorboard",),
        options={"steps": 3},
    )  # fmt: skip
    told = training_arguments(config, open_target(config.target), "cpu").to_dict()
    assert (told["recipe"], told["options.steps"], told["target"]) == ("eagle3", 3, "zoo:target")
    assert told["optimization.lr"] == config.learning_rate
    assert len(str(told["data_sha256"])) == len(str(told["target_sha256"])) == 64
    assert "per_device_train_batch_size" not in told
    unheard = dataclasses.replace(config, report_to=())
    assert "per_device_train_batch_size" in training_arguments(unheard, open_target(unheard.target), "cpu").to_dict()


def lines(capsys: pytest.CaptureFixture[str], log: LogLines, step: int, **logs: Any) -> list[str]:
    state = SimpleNamespace(is_world_process_zero=True, global_step=step, max_steps=100)
    log.on_log(SimpleNamespace(), state, SimpleNamespace(), logs)  # type: ignore[arg-type]
    return capsys.readouterr().err.splitlines()


def test_a_line_says_loss_speed_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogLines(tokens=1000)
    clock = iter((100.0, 120.0))
    monkeypatch.setattr("draftkit.train.log.time.monotonic", lambda: next(clock))
    pace = Pace(tokens=1000, step=0).at(10)
    first = lines(capsys, log, 10, loss=2.5, alpha_1=0.4, alpha_2=0.3, learning_rate=1e-4, **pace)
    assert first[0] == "step 10/100: loss 2.5, alpha_1 0.4, 500 tokens/s, 0:03:00 left"
    assert first[1:] == ["  alpha_1: the chance that the target accepts the draft's first token"]
    assert len(lines(capsys, log, 20, loss=2.4, alpha_1=0.4)) == 1  # explained once
    assert lines(capsys, log, 20, total_flos=0.0, train_loss=2.45, epoch=1.0) == []  # the end of a run says nothing new


def test_no_bar_leaks_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Not even its first state, which a bar shows as it is made."""
    log, state = LogLines(1000), SimpleNamespace(is_world_process_zero=True, global_step=1, max_steps=2)
    for step in (log.on_train_begin, log.on_step_end, log.on_train_end):
        step(SimpleNamespace(), state, SimpleNamespace())  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_a_run_says_how_many_samples_judge_it() -> None:
    assert said_of_judges(12, 48) == "held out: 12 of 48 samples, by which the draft is judged"
    assert "held out: 6 of 48 samples, by which the draft is judged: too few" in said_of_judges(6, 48)


def test_a_validation_says_its_interval_and_on_how_many_documents(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "eval_acceptance_length": 2.345, "eval_acceptance_length_low": 2.1, "eval_acceptance_length_high": 2.6,
        "eval_acceptance_length_documents": 40.0, "eval_loss": 1.5,
    }  # fmt: skip
    (line,) = lines(capsys, LogLines(1000), 50, **found)
    assert line == "step 50/100: held out: acceptance length 2.345 [2.100, 2.600] on 40 documents, loss 1.5"
    alone = {"eval_acceptance_length": 2.345, "eval_acceptance_length_documents": 1.0}
    assert validated(alone) == "2.345 on 1 document"
    assert (
        validated({"eval_acceptance_length": float("nan"), "eval_acceptance_length_documents": 0.0})
        == "– on 0 documents"
    )


def test_any_tracker_of_transformers_is_known_and_no_other() -> None:
    with pytest.raises(DraftkitError, match=r"report_to tensorbord\n  expected: .*clearml.*comet_ml.*wandb"):
        check_trackers(["tensorbord"])
    with pytest.raises(DraftkitError, match=r"report_to needs comet_ml\n  next: pip install comet-ml"):
        check_trackers(["comet_ml"])


def test_the_first_process_alone_reads_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers hear of it alone, and a digest takes all weights."""
    monkeypatch.setattr(OneDevice, "process_index", 1)
    monkeypatch.setattr(setup, "told_trackers", lambda *_: pytest.fail("another process took digests"))
    config = TrainConfig(
        recipe="eagle3", target="zoo:target", data="none", out=str(tmp_path / "run"), report_to=("tensorboard",)
    )
    training_arguments(config, open_target(config.target), "cpu")
