"""`doctor --context`: what a target makes of a text is computed once, and the window that mends a draft is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.drawn_afar import drawn_afar

from draftkit.doctor.diagnose import Diagnosis
from draftkit.doctor.lengths import AtContext, Compared, _over_contexts, length_trials
from draftkit.doctor.measure import Tried, run
from draftkit.doctor.patient import Patient, Setup
from draftkit.doctor.replay import record, replay
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.layout.facts import with_facts
from draftkit.layout.provenance import TRAINED_FACT, FactOrigin
from draftkit.loading import load_drafter, open_draft, open_target
from draftkit.requests import Request, SamplingParameters
from draftkit.results.cell import Interval
from draftkit.results.settings import Settings
from draftkit.targets.target import Target


@contextmanager
def patient(name: str, prompts: int, context: int, tokens: int) -> Iterator[Patient]:
    """A draft of the zoo, and prompts behind other text."""
    target = open_target("zoo:target")
    model = target.load(device="cpu", dtype=torch.float32)
    asked = load_prompt_set("zoo", prompts).prompts
    texts = Conversations(asked, target.tokenizer, Settings(context=context)).first_requests
    requests = [Request(r.id, r.prompt, tokens, SamplingParameters(0.5, seed=i)) for i, r in enumerate(texts)]
    with open_draft(f"zoo:{name}", "zoo:target") as draft:
        yield Patient(name, draft, draft, "zoo:target", model, target.tokenizer, asked, requests, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash", "draft-model"])
def test_rounds_of_a_recorded_text_are_those_of_the_target(name: str) -> None:
    """A chain, a block over the target's states, and a draft that reads none: what is drafted, and what stands."""
    with patient(name, 2, 90, 12) as of:
        drafter = load_drafter(of.draft, of.model, of.tokenizer)
        decoded = run(Setup(Target(of.model, drafter.aux_layers), drafter, of.requests), of.k, range(2))
        replayed = replay(of.model, drafter, of.k, record(of.model, drafter.aux_layers, of.requests, of.k))
    for one, other in zip(decoded, replayed, strict=True):
        assert one.tokens == other.tokens
        assert [(r.proposal, r.accepted) for r in one.rounds] == [(r.proposal, r.accepted) for r in other.rounds]
        for mine, theirs in zip(one.rounds, other.rounds, strict=True):
            known = mine.accepted + 1  # what follows a draft that fell is asked by nobody
            assert mine.expected[:known] == pytest.approx(theirs.expected[:known], abs=1e-4)


def test_changes_are_those_that_the_draft_has_a_use_for() -> None:
    """Windows narrower than the context and the draft's own; stretched rope; clipped positions."""
    with patient("eagle3", 1, 0, 4) as of:
        tried = {trial.change: trial.overrides for _, trial in length_trials(of, 640)}
        assert tried["a window of 512"] == {"sliding_window": "512", "sink_tokens": "0"}
        assert tried["a window of 64 and the first 4"] == {"sliding_window": "64", "sink_tokens": "4"}
        assert tried["positions clipped at 160"] == {}
        assert json.loads(tried["YaRN × 4"]["rope_scaling"])["original_max_position_embeddings"] == 160
        assert not any("1,024" in change or "limit" in change for change in tried)
        noted = FactOrigin(name=TRAINED_FACT, value="80", origin="stated", note="the longest sample of its training")
        told = replace(of.draft.provenance, facts=(noted,))
        of_short_samples = replace(of, draft=replace(of.draft, provenance=told))
        assert "YaRN × 8" in {trial.change for _, trial in length_trials(of_short_samples, 640)}
        narrow = with_facts(of.architecture, sliding_window=128)
        narrowed = replace(of, draft=replace(of.draft, spec=replace(of.draft.spec, architecture=narrow)))
        windows = [trial.change for name, trial in length_trials(narrowed, 640) if name == "window"]
        assert windows == ["a window of 64", "a window of 64 and the first 4"]
        beyond = [trial.overrides for name, trial in length_trials(of, 4096) if name == "own-limit"]
        assert beyond == [{"max_position_embeddings": "8192"}]
    with patient("mlp-speculator", 1, 0, 4) as of:
        assert not length_trials(of, 640)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft-model", "pard", "dflash"])
def test_every_change_of_a_kind_of_draft_runs(name: str) -> None:
    """Also of a model of transformers' own, which has no window by its class and names its positions."""
    with patient(name, 1, 90, 4) as of:
        drafter = load_drafter(of.draft, of.model, of.tokenizer)
        recordings = record(of.model, drafter.aux_layers, of.requests, of.k)
        trials = length_trials(of, 90)
        assert {"window", "rope-scaling-at-length", "positions"} >= {name for name, _ in trials} >= {"positions"}
        for _, trial in trials:
            (replayed,) = replay(of.model, trial.setup().drafter, of.k, recordings)
            assert replayed.rounds


def tried(change: str, mean: float, *, helps: bool = False, recommended: bool = False) -> Tried:
    gain = Interval(mean, mean - 0.05, mean + 0.05, 8)
    return Tried("window", change, 1.5, 1.5 + mean, gain, helps, helps, "command", "", recommended)


def test_a_change_is_told_at_the_longest_context_at_which_it_helps() -> None:
    """What is recommended there is the advice, with what it costs elsewhere."""
    short = Compared([], [tried("wide", -0.01), tried("narrow", -0.2)], [], {})
    middle = [tried("wide", 0.1), tried("narrow", 0.3, helps=True, recommended=True)]
    long = [tried("wide", 0.5, helps=True, recommended=True), tried("narrow", 0.45, helps=True)]
    found = tuple(_over_contexts({0: short, 512: Compared([], middle, [], {}), 1024: Compared([], long, [], {})}))
    assert [(t.change, t.gain.mean, t.recommended) for t in found] == [("wide", 0.5, True), ("narrow", 0.45, False)]
    assert [at.context for at in found[0].by_context] == [0, 512, 1024]
    lengths = tuple(AtContext(context, context, Interval(1.5, 1.4, 1.6, 8)) for context in (0, 512, 1024))
    diagnosis = Diagnosis("target", "draft", "eagle3", lengths[0].length, None, (), (), found, {}, {}, lengths)
    (cause,) = diagnosis.causes
    assert cause.message == "wide at 1,024, and as they are -0.01, at 512 +0.10"  # both from a look
    assert diagnosis.to_dict()["causes"][0]["gain"]["mean"] == 0.5


@pytest.mark.long
def test_the_window_beyond_which_keys_do_harm_is_named(draftkit: Command, tmp_path: Path) -> None:
    """Within a factor of two; what the doctor prints makes the draft that accepts more. A sound one gets no advice."""
    from draftkit.convert.unified import write_draft

    with open_draft("zoo:eagle3", "zoo:target") as draft:
        write_draft(tmp_path / "far", drawn_afar(draft, 128))
    asked = "--context", "640", "--limit", "16", "--max-new-tokens", "32"
    ran = draftkit("doctor", "--target", "zoo:target", "--draft", tmp_path / "far", *asked, "--json")
    assert ran.code == 0, ran.err
    assert ran.err.startswith("plan: 16 prompts as they are, at 640; ")
    found = json.loads(ran.out)
    assert found["causes"][0]["name"] == "window"
    (mended,) = (t for t in found["tried"] if t["recommended"] and t["experiment"] == "window")
    window = int(mended["command"].partition("sliding_window=")[2].split()[0])
    assert 64 <= window <= 256
    sound = draftkit("doctor", "--target", "zoo:target", "--draft", "zoo:eagle3", *asked, "--json")
    assert not any(t["helps"] for t in json.loads(sound.out)["tried"])


def test_a_draft_without_attention_has_nothing_to_try(draftkit: Command) -> None:
    ran = draftkit(
        "doctor", "--target", "zoo:target", "--draft", "zoo:mlp-speculator", "--context", "64", "--limit", "4"
    )
    assert ran.code == 1
    assert "no attention and no positions of its own" in ran.err
    beyond = draftkit("doctor", "--target", "zoo:target", "--draft", "zoo:eagle3", "--context", "4k", "--limit", "4")
    assert beyond.code == 1
    assert "of --context 4096" in beyond.err
