"""The best checkpoint is that of the longest acceptance length, and the report says where the loss parts from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Command
from test_train import config, data, weights  # noqa: F401
from test_train import target as pico_folder  # noqa: F401

from draftkit import Interval
from draftkit.errors import FormatError, SourceError
from draftkit.report.page.training import comparison, training_figures, training_page
from draftkit.train import trainer
from draftkit.train.log import TrainingCurve, ValidatedStep, read_curve
from draftkit.train.run import train_draft
from draftkit.train.validation import Judged, SimulatedRound

torch.set_num_threads(1)
# By validation: drafts that stand in each of 60 rounds, and the loss, which goes on falling.
ACCEPTED = {2: 1, 4: 3, 6: 2, 8: 2}
LOSSES = {2: 2.0, 4: 1.5, 6: 1.2, 8: 1.0}
ALPHAS = {2: 0.5, 4: 0.5, 6: 0.5, 8: 0.5}


@pytest.fixture
def parting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance is longest at step 4, the loss lowest at step 8, whatever is trained."""
    calls: list[int] = []

    def judge(_recipe: object, _batch: object, numbers: list[int], *_: object) -> list[Judged]:
        accepted, alpha = (list(found.values())[len(calls) // rows] for found in (ACCEPTED, ALPHAS))
        return [Judged(number, [SimulatedRound(accepted, 4, 0)] * 20, 1, alpha, 0.0) for number in numbers]

    def loss(*_: object) -> float:
        calls.append(1)
        return list(LOSSES.values())[(len(calls) - 1) // rows]

    rows = 2  # of the samples held out
    monkeypatch.setattr(trainer, "judge", judge)
    monkeypatch.setattr(trainer, "held_out_loss", loss)


EVERY = {"validation.every": 2, "keep": 9, "log_every": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("save_every", "keep", "kept"), [(2, "best", 4), (8, "best", 4), (2, "last", 8)])
def test_the_longest_acceptance_is_kept_not_the_lowest_loss(
    save_every: int,
    keep: str,
    kept: int,
    parting: None,
    pico_folder: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Also where no checkpoint was due at its step."""
    more = EVERY | {"save_every": save_every, "validation.keep": keep}
    out = tmp_path / "run"
    trained = train_draft(config(pico_folder, data, out, **more))
    assert trained.draft is not None
    own, chosen = weights(trained.draft), weights(out / f"checkpoint-{kept}")
    for name, tensor in own.items():
        assert torch.equal(tensor, chosen[name].to(tensor.dtype))
    unlike = weights(out / f"checkpoint-{12 - kept}") if keep == "best" else weights(out / "checkpoint-4")
    assert any(not torch.equal(own[name], unlike[name].to(own[name].dtype)) for name in own)
    curve = read_curve(out)
    assert {found.step: found.loss for found in curve.steps} == LOSSES
    assert {found.step: round(found.length.mean) - 1 for found in curve.steps} == ACCEPTED
    assert (curve.longest.step, curve.lowest and curve.lowest.step) == (4, 8)
    assert "longest at step 4" in curve.summary
    assert "lowest at step 8" in curve.summary
    assert "they disagree, and the lowest loss would have cost 1.000." in curve.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alphas", "kept", "said"),
    [
        ({2: 0.1, 4: 0.3, 6: 0.3, 8: 0.2}, 6, "lowest at step 8, where the length is the same and the chance"),
        ({2: 0.3, 4: 0.3, 6: 0.3, 8: 0.3}, 8, "where the loss is lowest too: the two agree."),
    ],
)
def test_equal_lengths_are_told_apart_by_the_expected_acceptance_and_then_by_the_loss(
    alphas: dict[int, float],
    kept: int,
    said: str,
    parting: None,
    pico_folder: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As early on, when nothing is accepted; nor does a run end for want of patience while these two get better."""
    for step, alpha in alphas.items():
        monkeypatch.setitem(ACCEPTED, step, 0)
        monkeypatch.setitem(ALPHAS, step, alpha)
    out = tmp_path / "run"
    more = EVERY | {"save_every": 8, "validation.patience": 2}
    trained = train_draft(config(pico_folder, data, out, **more))
    assert trained.draft is not None
    own, chosen = weights(trained.draft), weights(out / f"checkpoint-{kept}")
    assert all(torch.equal(tensor, chosen[name].to(tensor.dtype)) for name, tensor in own.items())
    curve = read_curve(out)
    assert (len(curve.steps), curve.longest.step, curve.lowest and curve.lowest.step) == (4, kept, 8)
    assert f"longest at step {kept}, 1.000" in curve.summary
    assert said in curve.summary


@pytest.mark.slow
def test_validation_changes_nothing_of_the_training(pico_folder: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    """The held-out loss of a block recipe draws anchors, and leaves those of training as they were."""
    options = {"max_anchors": 4, "block_size": 4, "layers": [1, 3, 5], "num_layers": 1, "mask_token_id": 2}
    found = {}
    for every in (0, 2):
        run = config(pico_folder, data, tmp_path / f"run{every}", **{"validation.every": every})
        train_draft(replace(run, recipe="dflash", draft_vocab_size=0, options=options))
        found[every] = weights(tmp_path / f"run{every}" / "checkpoint-8")
    assert all(torch.equal(found[0][name], found[2][name]) for name in found[0])
    losses = [step.loss for step in read_curve(tmp_path / "run2").steps]
    assert len(losses) == 4
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0]


def curve(*steps: tuple[int, float, float | None]) -> TrainingCurve:
    found = (ValidatedStep(step, Interval(length, length - 0.1, length + 0.1), loss) for step, length, loss in steps)
    return TrainingCurve(Path("run"), tuple(found))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([(2, 2.0, 3.0), (4, 2.5, 2.0)], "where the loss is lowest too: the two agree."),
        ([(2, 2.5, 3.0), (4, 2.45, 2.0)], "would have cost 0.050; the intervals overlap."),
        ([(2, 2.5, 3.0), (4, 2.0, 2.0)], "would have cost 0.500."),
        ([(2, 2.5, None)], "did not record the loss"),
        ([(80, 1.0, 4.843), (880, 1.0, 4.074)], "longest at step 880, 1.000 [0.900, 1.100], where the loss is lowest"),
        ([(80, 1.0, 4.0), (880, 1.0, 4.0)], "longest at step 80, 1.000 [0.900, 1.100], where the loss is lowest too"),
    ],
)
def test_the_verdict(steps: list[tuple[int, float, float | None]], said: str) -> None:
    assert said in curve(*steps).summary


@pytest.mark.slow
def test_the_page_draws_both(draftkit: Command, parting: None, pico_folder: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "run"
    train_draft(config(pico_folder, data, out, **EVERY))
    ran = draftkit("report", out, "--out", tmp_path / "page.html", "--figures", tmp_path / "figures")
    assert ran.code == 0, ran.err
    assert "they disagree" in ran.err
    page = (tmp_path / "page.html").read_text()
    curve = read_curve(out)
    assert page == training_page([curve])
    assert [at.step for at in curve.logged] == [2, 4, 6, 8]
    assert all(at.learning_rate and at.tokens_per_second for at in curve.logged[:-1])
    figures = {"acceptance-by-step", "loss-by-step", "training-loss-by-step", "learning-rate-by-step", "speed-by-step"}
    assert page.count("<svg") == len(figures)
    assert "too few to tell drafts apart" in page  # two documents judged
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert {file.stem for file in (tmp_path / "figures").iterdir()} == figures
    length, loss = (figure.lines[-1].points for figure in [*training_figures([curve]).values()][:2])
    assert [(x, round(y) - 1) for x, y in length] == list(ACCEPTED.items())
    assert list(loss) == list(LOSSES.items())
    assert draftkit("report", out, tmp_path / "page.html", "--out", tmp_path / "two.html").code == 1


def test_runs_are_compared_by_what_they_found_and_by_the_settings_that_differ(
    draftkit: Command, tmp_path: Path
) -> None:
    for name, lr, length in (("slow", 1e-4, 1.2), ("fast", 1e-3, 2.0)):
        state = {"step": 4, "eval_acceptance_length": length, "eval_acceptance_length_documents": 12, "eval_loss": 2.0}
        state |= {"eval_acceptance_length_low": length - 0.1, "eval_acceptance_length_high": length + 0.1}
        state |= {"tokens": 2e6, "processor_seconds": 1800.0}
        log = [{"step": 2, "loss": 3.0, "learning_rate": lr, "tokens_per_second": 500.0}, state]
        folder = tmp_path / name / "checkpoint-4"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        settings = {"recipe": "eagle3", "target": "zoo:target", "data": "samples.jsonl", "out": name}
        (folder / "train.yaml").write_text(json.dumps(settings | {"optimization": {"lr": lr}}))
    ran = draftkit("report", tmp_path / "slow", tmp_path / "fast", "--out", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    assert "fast has the longest acceptance length, 2.000 [1.900, 2.100]; slow 1.200 [1.100, 1.300]" in ran.err
    assert ran.out == f"written: {tmp_path / 'page.html'}: 2 training runs\n"
    assert "the intervals are apart" in ran.err
    rows = dict(comparison([read_curve(tmp_path / name) for name in ("slow", "fast")]))
    assert rows["recipe"] == ["eagle3", "eagle3"]
    assert rows["optimization.lr"] == ["0.0001", "0.001"]
    assert rows["tokens a second"] == ["500", "500"]
    assert not {"out", "seed", "optimization.warmup"} & rows.keys()
    text = (tmp_path / "page.html").read_text()
    assert "optimization.lr" in text
    assert text.count("<svg") == 7
    figures = training_figures([read_curve(tmp_path / name) for name in ("slow", "fast")])
    assert [line.points for line in figures["acceptance-by-tokens"].lines] == [((2.0, 1.2),), ((2.0, 2.0),)]
    assert [line.points for line in figures["acceptance-by-processor-time"].lines] == [((0.5, 1.2),), ((0.5, 2.0),)]


def test_what_is_no_validated_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no checkpoint"):
        read_curve(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 2, "loss": 1}]}))
    with pytest.raises(FormatError, match=r"validation\.every"):
        read_curve(tmp_path)
