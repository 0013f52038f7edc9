"""What the doctor changes of Gemma-4's assistant, and defects that it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.gemma4_assistants import save_pair

from draftkit.doctor.experiments import all_experiments
from draftkit.doctor.measure import run
from draftkit.doctor.patient import Patient, Setup, changed
from draftkit.doctor.trial import Trial, with_facts
from draftkit.evaluate.prompts import Prompt
from draftkit.io.handles import memory_handle
from draftkit.layout import facts
from draftkit.loading import load_model, open_draft
from draftkit.requests import Request

CHANGES = {
    "draft-position": ["position=token"],
    "ordered-embedding": ["num_centroids=0, selected_centroids=0"],
    "hidden-state": ["hidden_state=before_norm"],
    "concatenation": ["concatenation=hidden_embedding"],
}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    pair = save_pair(tmp_path_factory.mktemp("pair"))
    pico.save_tokenizer(pair.folder)
    model, tokenizer = load_model(str(pair.folder), device="cpu", dtype=torch.float32)
    with open_draft(str(pair.assistant), str(pair.folder)) as draft:
        loaded = {name: memory_handle(name, handle.load(), draft.path) for name, handle in draft.tensors.items()}
        draft = replace(draft, tensors=loaded)
    prompts, requests = [Prompt("1", "all", ("abc",))], [Request("1", (1, 5, 6), 8)]
    return Patient("assistant", draft, draft, str(pair.folder), model, tokenizer, prompts, requests, 3)


@pytest.mark.slow
def test_each_fact_is_tried(patient: Patient) -> None:
    tried: dict[str, list[Trial]] = {one.name: list(one.trials(patient)) for one in all_experiments()}
    own = {name: [trial.change for trial in trials] for name, trials in tried.items() if name in CHANGES}
    assert own == CHANGES
    assert [name for name in ("norm-offset", "feedback", "first-embedding") if tried[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft-position", "hidden-state", "concatenation"])
def test_a_wrong_fact_is_undone(patient: Patient, name: str) -> None:
    key, _, value = CHANGES[name][0].partition("=")
    wrong = changed(patient.draft, facts.with_facts(patient.architecture, **{key: value}))
    (experiment,) = (one for one in all_experiments() if one.name == name)
    (remedy,) = experiment.trials(replace(patient, draft=wrong))
    sound, remedied, spoiled = (proposals(setup) for setup in (patient.setup(), remedy.setup(), patient.setup(wrong)))
    assert remedied == sound != spoiled


@pytest.mark.slow
def test_without_centroids_every_token_has_a_logit(patient: Patient) -> None:
    trial = with_facts(patient, "", num_centroids=0, selected_centroids=0)
    assert not trial.overrides  # it takes the tensors away too
    assert proposals(trial.setup()) != proposals(patient.setup())


def proposals(setup: Setup) -> list[tuple[int, ...]]:
    return [r.proposal for generation in run(setup, 3, [0]) for r in generation.rounds]
