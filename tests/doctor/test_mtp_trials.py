"""What the doctor changes of a target's own head, one by one; and a wrong fact, named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.mtp_targets import save_with_head
from rich.console import Console

from draftkit.doctor.diagnose import diagnose_draft
from draftkit.doctor.experiments import all_experiments
from draftkit.doctor.measure import run
from draftkit.doctor.patient import Patient, Setup, changed
from draftkit.doctor.trial import Trial
from draftkit.evaluate.prompts import Prompt
from draftkit.io.handles import memory_handle
from draftkit.io.settings import read_value
from draftkit.layout.facts import with_facts
from draftkit.loading import load_model, open_draft
from draftkit.report.terminal.diagnosis import show_diagnosis
from draftkit.requests import Request

FACTS = {
    "glm4_moe": {"feedback": "post_norm", "hidden_state": "before_norm", "zero_first_embedding": "false"},
    "qwen3_next": {"feedback": "pre_norm", "hidden_state": "before_norm", "zero_first_embedding": "true"},
}


@pytest.fixture(scope="module", params=FACTS)
def patient(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Patient:
    folder = save_with_head(request.param, tmp_path_factory.mktemp(request.param)).folder
    pico.save_tokenizer(folder)
    model, tokenizer = load_model(str(folder), device="cpu", dtype=torch.float32)
    with open_draft("mtp", str(folder)) as draft:
        loaded = {name: memory_handle(name, handle.load(), draft.path) for name, handle in draft.tensors.items()}
        draft = replace(draft, tensors=loaded)
    prompts, requests = [Prompt("1", "all", ("abc",))], [Request("1", (1, 5, 6), 8)]
    return Patient("mtp", draft, draft, str(folder), model, tokenizer, prompts, requests, 2)


def trials(name: str, patient: Patient) -> list[Trial]:
    (experiment,) = (one for one in all_experiments() if one.name == name)
    return list(experiment.trials(patient))


@pytest.mark.slow
def test_every_fact_of_the_table_is_tried(patient: Patient) -> None:
    kind = str(patient.model.config.model_type)
    tried = {
        name: [dict(trial.overrides) for trial in trials(name, patient)]
        for name in (
            "feedback", "hidden-state", "first-embedding", "concatenation", "normed-features", "rope-base",
            "rope-scaling",
        )
    }  # fmt: skip
    assert tried == {
        "feedback": [{"feedback": FACTS[kind]["feedback"]}],
        "hidden-state": [{"hidden_state": FACTS[kind]["hidden_state"]}],
        "first-embedding": [{"zero_first_embedding": FACTS[kind]["zero_first_embedding"]}],
        "concatenation": [{"concatenation": "hidden_embedding"}],
        "normed-features": [],
        "rope-base": [],  # its target's, in whose configuration it stands
        "rope-scaling": [],
    }


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["feedback", "hidden-state", "first-embedding", "concatenation"])
def test_a_wrong_fact_is_undone(patient: Patient, name: str) -> None:
    """The trial of a draft with the other value drafts what the sound one does."""
    (trial,) = trials(name, patient)
    wrong = changed(
        patient.draft,
        with_facts(patient.architecture, **{name: read_value(text) for name, text in trial.overrides.items()}),
    )
    (remedy,) = trials(name, replace(patient, draft=wrong))
    sound, remedied, spoiled = (proposals(setup) for setup in (patient.setup(), remedy.setup(), patient.setup(wrong)))
    assert remedied == sound
    if name in ("hidden-state", "concatenation"):  # the others may change nothing in so few steps
        assert spoiled != sound


@pytest.mark.slow
def test_norms_of_the_other_kind_are_put_right(patient: Patient) -> None:
    lower, higher = trials("norm-offset", patient)
    norms = {n: h.load() for n, h in patient.draft.tensors.items() if len(h.shape) == 1 and n.endswith("norm.weight")}
    wrong = changed(patient.draft, tensors={name: norm + 1 for name, norm in norms.items()})
    (remedy, _) = trials("norm-offset", replace(patient, draft=wrong))
    assert proposals(remedy.setup()) == proposals(patient.setup())
    assert (lower.change, higher.change) == ("norms -1", "norms +1")


def proposals(setup: Setup) -> list[tuple[int, ...]]:
    return [r.proposal for generation in run(setup, 2, [0]) for r in generation.rounds]


@pytest.mark.slow
def test_swapped_norms_are_put_right(patient: Patient) -> None:
    parts = patient.facts["parts"]
    assert isinstance(parts, dict)
    one, other = (
        next(name for name in patient.draft.tensors if name.endswith(f"{parts[part]}.weight"))
        for part in ("embedding_norm", "hidden_norm")
    )
    stored = patient.draft.tensors
    wrong = changed(patient.draft, tensors={one: stored[other].load(), other: stored[one].load()})
    (remedy,) = trials("swapped-norms", replace(patient, draft=wrong))
    assert proposals(remedy.setup()) == proposals(patient.setup())
    assert "were swapped: put the original head back" in remedy.advice


@pytest.mark.slow
def test_which_module_drafts_is_tried(tmp_path: Path, patient: Patient) -> None:
    assert trials("modules", patient) == []
    folder = save_with_head("glm4_moe", tmp_path, 2).folder
    with open_draft("mtp", str(folder)) as draft:
        several = replace(patient, draft=draft)
        (trial,) = trials("modules", several)
    assert trial.overrides == {"modules": "first"}


@pytest.mark.slow
def test_a_diagnosis_of_a_targets_own_head_is_short(monkeypatch: pytest.MonkeyPatch, patient: Patient) -> None:
    """The target's tensors lie beside the head's and are not shown one by one; one prompt is enough to begin with."""
    chosen = [experiment for experiment in all_experiments() if experiment.name == "feedback"]
    monkeypatch.setattr("draftkit.doctor.diagnose.all_experiments", lambda: chosen)
    diagnosis = diagnose_draft(patient.target_source, "mtp", limit=1, max_new_tokens=4, device="cpu", dtype="float32")
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show_diagnosis(console, diagnosis.to_dict())
    shown = console.export_text()
    assert "more" in shown
    assert shown.count("the target's own") < 10 < len(diagnosis.tensors)
