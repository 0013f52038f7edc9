"""A run on samples in Arrow is that on JSONL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train import config, data, target, weights, whole  # noqa: F401

from draftkit.data.sample_files import read_origin, read_samples, write_samples
from draftkit.errors import DraftkitError
from draftkit.train import setup
from draftkit.train.dry_run import check_run
from draftkit.train.run import train_draft

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data.arrow", "folder"])
def test_training_is_that_on_jsonl(form: str, whole: Path, target: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    """Bit for bit; and a run that was begun with one form goes on with it alone."""
    write_samples(tmp_path / form, read_samples(data), read_origin(data))
    out = tmp_path / "run"
    train_draft(config(target, tmp_path / form, out))
    one, other = weights(out / "draft"), weights(whole / "draft")
    assert all(torch.equal(one[name], other[name]) for name in other)
    with pytest.raises(DraftkitError, match=r"\n    data: "):
        check_run(config(target, data, out), resume=True)


def test_many_samples_in_jsonl_are_said_to_cost(
    target: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(setup, "MANY", 10)
    write_samples(tmp_path / "data.arrow", read_samples(data), read_origin(data))
    for path, said in ((data, True), (tmp_path / "data.arrow", False)):
        check_run(config(target, path, tmp_path / "run"))
        assert ("samples were parsed from JSONL: " in capsys.readouterr().err) is said
