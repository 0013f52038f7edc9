"""Training in two processes is training in one that accumulates: every recipe; and a stop signal stops both."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import pico
from fixtures.checkpoints.mtp_targets import save_with_head
from fixtures.training.samples import samples
from transformers import TrainerCallback, TrainerControl, TrainerState

from draftkit.convert.api import convert_checkpoint
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.train.config import read_config
from draftkit.train.recipes import recipe_names
from draftkit.train.run import train_draft

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WITHOUT_CHANCE: dict[str, dict[str, object]] = {
    # The processes draw numbers of their own, so that what is compared draws none. Other recipes have their defaults.
    "eagle": {"noise": 0.0},
    "eagle3": {"steps": 3},
    "p-eagle": {"steps": 3, "num_layers": 1, "drop": {"retention": 1.0}},
    "pard": {"steps": 3, "drop": {"retention": 1.0}},
    "dflash": {"block_size": 4, "max_anchors": 1000},
    "dspark": {"block_size": 4, "markov_rank": 8, "max_anchors": 1000},
    "dflash2": {"block_size": 4, "selector_rank": 8, "max_anchors": 1000},
    "mtp": {"steps": 2},
    "draft-model": {"hidden_size": 32, "num_heads": 4, "num_key_value_heads": 4},
}
STEPS = 3


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Targets without and with a head, a causal language model to make a PARD of, and samples."""
    folder = tmp_path_factory.mktemp("given")
    target = pico.save_tokenizer(pico.save_llama(folder / "target"))
    with_head = pico.save_tokenizer(save_with_head("glm4_moe", folder / "with-head").folder)
    source = pico.save_tokenizer(pico.save_llama(folder / "source", seed=1, num_hidden_layers=1))
    draft = convert_checkpoint(str(source), folder / "draft")
    write_samples(folder / "data.jsonl", samples(16), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    return {"target": str(target), "with_head": str(with_head), "draft": str(draft), "data": str(folder / "data.jsonl")}


def settings(recipe: str, given: dict[str, str], out: Path, **optimization: object) -> dict[str, Any]:
    return {
        "recipe": recipe, "target": given["with_head" if recipe == "mtp" else "target"], "data": given["data"],
        "out": str(out), "options": WITHOUT_CHANCE.get(recipe, {}), "draft": given["draft"] if recipe == "pard" else "",
        "tokens_per_row": 96, "log_every": 1, "device": "cpu",
        "optimization": {"max_steps": STEPS, "lr": 1e-3, **optimization}, "validation": {"share": 0.2, "k": 3},
    }  # fmt: skip


def history(out: Path) -> list[dict[str, float]]:
    last = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    log: list[dict[str, float]] = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return log


@pytest.fixture(scope="module")
def both(given: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of every recipe in two processes, and at last, in "signaled", one in which the second gets a signal
    before its fourth step. Started once, as imports take longest."""
    folder = tmp_path_factory.mktemp("both")
    runs = [settings(recipe, given, folder / recipe) for recipe in recipe_names()]
    signaled = settings("eagle3", given, folder / "signaled", max_steps=400)
    (folder / "runs.json").write_text(json.dumps([runs, signaled]))
    (folder / "work.py").write_text("""
import json, os, signal, sys, torch
from transformers import TrainerCallback
from draftkit.train.config import read_config
from draftkit.train.run import train_draft
torch.set_num_threads(1)
class Signal(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
runs, signaled = json.load(open(sys.argv[1]))
for settings in runs:
    train_draft(read_config(None, [], settings))
trained = train_draft(read_config(None, [], signaled), callbacks=(Signal(),))
assert trained.stopped_by == signal.SIGTERM
""")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [*LAUNCH, str(folder / "work.py"), str(folder / "runs.json")],
        env=environment, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert signal.SIGTERM.name not in ran.stderr
    return folder


@pytest.mark.long
def test_two_processes_are_one_that_accumulates(given: dict[str, str], both: Path, tmp_path: Path) -> None:
    """The norm of the averaged gradient and the loss of every step, and what the validation finds."""
    for recipe in recipe_names():
        train_draft(read_config(None, [], settings(recipe, given, tmp_path / recipe, accumulation=2)))
        one, two = history(tmp_path / recipe), history(both / recipe)
        assert len(one) == len(two) > STEPS
        for entry, other in zip(one, two, strict=True):
            for name in {"loss", "grad_norm", "eval_loss", "eval_acceptance_length"} & entry.keys():
                assert math.isclose(entry[name], other[name], rel_tol=1e-3), (recipe, entry["step"], name, entry, other)


@pytest.mark.long
def test_a_signal_to_one_process_stops_both_after_the_same_step(both: Path) -> None:
    """They would wait for each other without end."""
    assert [folder.name for folder in (both / "signaled").glob("checkpoint-*")] == ["checkpoint-4"]


class Ends(TrainerCallback):
    """Ends a run after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.long
def test_a_run_of_two_processes_goes_on_in_one_that_accumulates(
    given: dict[str, str], both: Path, tmp_path: Path
) -> None:
    """Where two left off after four steps: the same rows make the same steps."""
    shutil.copytree(both / "signaled", tmp_path / "two")
    for out, more in ((tmp_path / "two", {}), (tmp_path / "one", {"accumulation": 2})):
        run = read_config(None, [], settings("eagle3", given, out, max_steps=400, **more))
        train_draft(run, resume=True, callbacks=(Ends(7),))
    one, two = history(tmp_path / "one"), history(tmp_path / "two")
    assert len(one) == len(two) > 7
    for entry, other in zip(one, two, strict=True):
        for name in {"loss", "grad_norm", "eval_loss", "eval_acceptance_length"} & entry.keys():
            assert math.isclose(entry[name], other[name], rel_tol=1e-3), (entry["step"], name, entry, other)
