"""`draftkit calibrate` on records: the answer first, files where they help, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Command

from draftkit.requests import Request
from draftkit.results.cell import Heading
from draftkit.results.recorded import append_rounds
from draftkit.runtime.records import Generation, Round

pytestmark = pytest.mark.slow

K = 3
HEADING = Heading(
    target="t", draft="d", num_speculative_tokens=K, temperature=1.0, concurrency=1, draft_sampling="probabilistic"
)


def record(path: Path, scale: float = 3.0, prompts: int = 40, heading: Heading = HEADING, **changes: object) -> Path:
    """Rounds of a head whose logits are `scale` times too large."""
    generator = np.random.default_rng(0)
    generations, slices = [], {}
    for prompt in range(prompts):
        rounds = []
        for number in range(30):
            logits = generator.normal(0, 1, K)
            true = tuple(1 / (1 + np.exp(-logits)))
            accepted = int((generator.random(K) < true).cumprod().sum())
            said = tuple(1 / (1 + np.exp(-scale * logits)))
            one = Round(number, K, accepted, accepted + 1, true, (1,) * K, confidences=said, probabilities=true)
            rounds.append(replace(one, **changes))
        generations.append(Generation(Request(str(prompt), (1,), 99), rounds=rounds))
        slices[str(prompt)] = [f"category={'code' if prompt % 2 else 'prose'}"]
    append_rounds(path, heading, generations, slices)
    return path


def test_the_answer_first_and_files_that_help(draftkit: Command, tmp_path: Path) -> None:
    records, out = record(tmp_path / "r.jsonl"), tmp_path / "out"
    ran = draftkit("calibrate", records, "--out", out)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].startswith("d, K=3, T=1: its head says ")
    assert "temperatures help: the loss of a round falls by +" in lines[1]
    assert max(map(len, lines)) <= 200
    written = {path.name for path in out.iterdir()}
    assert written == {"calibration.html", "calibration.json", "d-k3-t1.sts.json"}
    temperatures = json.loads((out / "d-k3-t1.sts.json").read_text())["temperatures"]
    assert all(1.5 < one < 6 for one in temperatures[:2])
    page = (out / "calibration.html").read_text()
    assert "<svg" in page
    assert "category=code" in page


def test_json_is_the_whole(draftkit: Command, tmp_path: Path) -> None:
    ran = draftkit("calibrate", record(tmp_path / "r.jsonl"), "--json")
    (one,) = json.loads(ran.out)["calibrations"]
    assert one["estimate"] == "head"
    assert len(one["whole"]["cumulative"]) == len(one["whole"]["conditional"]) == K
    assert set(one["slices"]) == {"category=code", "category=prose"}
    assert one["scaling"]["helps"] is True
    assert one["scaling"]["missing_rounds"] == 0


def test_a_true_word_gets_no_file(draftkit: Command, tmp_path: Path) -> None:
    ran = draftkit("calibrate", record(tmp_path / "r.jsonl", scale=1.0), "--out", tmp_path / "out")
    assert "says what happens, as far as 40 prompts tell" in ran.out
    assert "would not help beyond chance" in ran.out
    assert not list((tmp_path / "out").glob("*.sts.json"))


def test_too_few_rounds_get_no_file(draftkit: Command, tmp_path: Path) -> None:
    ran = draftkit("calibrate", record(tmp_path / "r.jsonl", prompts=20), "--out", tmp_path / "out")
    assert "400 more rounds are needed" in ran.out
    assert not list((tmp_path / "out").glob("*.sts.json"))


def test_the_drafts_own_probability(draftkit: Command, tmp_path: Path) -> None:
    ran = draftkit("calibrate", record(tmp_path / "r.jsonl"), "--of", "draft")
    assert "its own probability says what happens" in ran.out
    without = record(tmp_path / "e.jsonl", confidences=())
    assert "its own probability says" in draftkit("calibrate", without).out
    refused = draftkit("calibrate", without, "--of", "head")
    assert (refused.code, "expected: rounds of a draft with a confidence head" in refused.err) == (1, True)


@pytest.mark.parametrize(
    ("heading", "changes", "said"),
    [
        (replace(HEADING, min_confidence=0.5), {}, "what was left out is not judged"),
        (HEADING, {"drafted": 2, "accepted": 0, "expected": (), "confidences": (0.5, 0.5), "probabilities": ()},
         "1,200 of 1,200 rounds drafted fewer than K"),
        (replace(HEADING, verification="coupled"), {}, "recorded with coupled verification"),
        (HEADING, {"drafted": 0, "accepted": 0, "expected": (), "confidences": (), "probabilities": ()},
         "no round in which anything was drafted"),
        (HEADING, {"confidences": (), "probabilities": ()}, "no draft of these records says"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused(
    draftkit: Command, tmp_path: Path, heading: Heading, changes: dict[str, object], said: str
) -> None:
    ran = draftkit("calibrate", record(tmp_path / "r.jsonl", heading=heading, **changes), "--out", tmp_path / "out")
    assert ran.code == 1
    assert said in ran.err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_left_alone(draftkit: Command, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert draftkit("calibrate", record(tmp_path / "r.jsonl"), "--out", tmp_path / "out").code == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['draftkit', 'calibrate', sys.argv[1]]\n"
        "from draftkit.cli import main\n"
        "try: main()\n"
        "except SystemExit as error: assert not error.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(record(tmp_path / "r.jsonl"))], check=True)
