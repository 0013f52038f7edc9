"""Beyond a draft's positions: nothing is drafted there, as in vLLM, and the rounds are counted and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fixtures.checkpoints.zoo_models import requests, zoo_drafter, zoo_target

from draftkit import zoo
from draftkit.checks.checkpoint import findings_of_draft
from draftkit.convert.unified import write_draft
from draftkit.engines.known import known, speaking_of
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.layout.positions import longest_sequence
from draftkit.layout.provenance import TRAINED_FACT, FactOrigin
from draftkit.layout.target import read_target_facts
from draftkit.loading import open_draft
from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target

K = 4
LIMITED = ("draft-model", "pard", "p-eagle", "dspark", "eagle3")


def limited(name: str, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> Drafter:
    drafter = zoo_drafter(name)
    monkeypatch.setattr(drafter, "max_positions", limit)
    return drafter


def generate(drafter: Drafter, slots: int = 1, **options: Any) -> list[Generation]:
    """In the way of vLLM's first model runner, unless another is asked for."""
    options = {"like": "vllm-v1"} | options
    engine = Engine(
        Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=K, num_slots=slots, **options
    )
    return engine.generate([replace(r, max_new_tokens=40, ignore_eos=True) for r in requests()[:slots]])


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_one_sequence_stops_drafting_where_a_whole_draft_does_not_fit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (free,) = generate(limited(name, None, monkeypatch))
    limit = len(free.request.prompt) + 24
    (stopped,) = generate(limited(name, limit, monkeypatch))
    assert stopped.tokens == free.tokens
    # What vLLM's model runner does, written out: a step reaches K tokens beyond the text, accepted or not.
    reach = len(stopped.request.prompt)
    for r in stopped.rounds:
        fits = reach + K <= limit
        assert r.beyond is not fits
        assert r.drafted == K
        assert fits or r.proposal == (0,) * K
        reach = r.position + K
    inside = [r for r in stopped.rounds if not r.beyond]
    assert 1 < len(inside) < len(stopped.rounds)
    assert inside == free.rounds[: len(inside)]  # up to there nothing is different
    assert all(r.accepted == 0 for r in stopped.rounds if r.beyond)  # token 0 is none of the text


@pytest.mark.slow
def test_a_long_sequence_stops_drafting_for_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    free = generate(limited("pard", None, monkeypatch), slots=3)
    longest = max(len(g.request.prompt) for g in free)
    stopped = generate(limited("pard", longest, monkeypatch), slots=3)
    assert [g.tokens for g in stopped] == [g.tokens for g in free]
    shared = min(len(g.rounds) for g in stopped)
    assert shared > 1
    assert all(r.beyond for g in stopped for r in g.rounds[:shared])


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_limit_when_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [replace(r, sampling=SamplingParameters(temperature=1.0, seed=i)) for i, r in enumerate(requests()[:2])]
    outputs = []
    for limit in (None, len(drawn[0].prompt) + 16):
        drafter = limited("draft-model", limit, monkeypatch)
        engine = Engine(
            Target(zoo_target()), drafter, num_speculative_tokens=K, num_slots=2, verification="coupled",
            draft_sampling=DraftSampling("probabilistic"), like="vllm-v1",
        )  # fmt: skip
        outputs.append([g.tokens for g in engine.generate(drawn)])
    assert outputs[0] == outputs[1]


def test_a_prompt_beyond_a_learned_position_table_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is not asked to take in what it has no positions for."""
    drafter = limited("draft-model", 8, monkeypatch)
    monkeypatch.setattr(drafter, "prefill", lambda *_: pytest.fail("the prompt does not fit"))
    monkeypatch.setattr(drafter, "propose", lambda *_: pytest.fail("nothing fits"))
    (generation,) = generate(drafter)
    assert all(r.beyond for r in generation.rounds)


ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 1024, "max_position_embeddings": 2048}, 1024),
        ({"max_position_embeddings": 64, "model_max_length": 128}, 128),
        ({"max_position_embeddings": 64, "rope_parameters": ROPE}, 256),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2}}, 128),
        ({"max_position_embeddings": 64, "rope_parameters": ROPE | {"rope_type": "yarn"}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": ROPE}}, 256),
        (
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 32,
                "rope_parameters": {"rope_type": "longrope"},
            },
            32,
        ),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
    ],
)
def test_the_length_is_the_one_that_vllm_derives(config: dict[str, object], length: int | None) -> None:
    assert longest_sequence(config) == length


# By the draft: what is told of one that ends at 64 tokens. vLLM's first runner does not draft beyond; its second one
# goes on, with positions that the draft has not where it does not stretch them, or serves no longer text.
TOLD = {
    "eagle": {"short-rope", "short-draft"}, "eagle3": {"short-rope", "short-draft"}, "mlp-speculator": set(),
    "draft-model": {"short-draft", "cut-target", "positions-beyond-draft"}, "pard": {"short-draft"},
    "p-eagle": {"short-draft"}, "dspark": {"positions-beyond-draft"},
}  # fmt: skip
ABOUT_LENGTH = {"short-rope", "short-draft", "cut-target", "positions-beyond-draft"}


@pytest.mark.parametrize("name", TOLD)
def test_short_drafts_are_told(name: str) -> None:
    facts = read_target_facts(zoo.path("target"), "zoo:target", None)
    assert facts.max_position_embeddings is not None
    with open_draft(f"zoo:{name}", "zoo:target") as draft:
        short = shortened(draft)
        assert short.spec.architecture.max_positions == (None if name == "mlp-speculator" else (64, "V1"))
        assert not {f.name for f in findings_of_draft(draft, facts)} & ABOUT_LENGTH
        found = {f.name: f for f in findings_of_draft(short, facts) if f.name in ABOUT_LENGTH}
    assert found.keys() == TOLD[name]
    for told in found.keys() - {"short-rope"}:
        assert "64" in found[told].message
        assert ("V1" if told == "short-draft" else "V2") in found[told].message
        assert found[told].severity == ("note" if name.startswith("eagle") else "warning")


def test_a_yarn_draft_cuts_the_target_of_the_release_that_does_not_stretch_it() -> None:
    facts = read_target_facts(zoo.path("target"), "zoo:target", None)
    yarn: dict[str, object] = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 32}
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        short = shortened(draft)
        architecture = short.spec.architecture.expect(EagleSpec)
        rope = replace(architecture.rope, scaling=yarn)
        stretched = replace(architecture, decoder=replace(architecture.decoder, rope=rope))
        short = replace(short, spec=replace(short.spec, architecture=stretched))
        (cut,) = (f for f in findings_of_draft(short, facts) if f.name == "cut-target")
        assert "yarn is not stretched" in cut.message
        assert cut.fix == f"--set max_position_embeddings={facts.max_position_embeddings}", "its table is long enough"
        newest, older = (release.number for release in known()["vLLM"])
        assert newest in cut.message
        with speaking_of(f"vllm=={older}"):
            assert "cut-target" not in {f.name for f in findings_of_draft(short, facts)}


@pytest.mark.parametrize(("trained", "told"), [(100, True), (1_000_000, False), (None, False)])
def test_a_target_that_takes_much_longer_text_than_a_draft_was_trained_on_is_told(
    trained: int | None, told: bool, draftkit: Command, tmp_path: Path
) -> None:
    noted = FactOrigin(name=TRAINED_FACT, value=str(trained), origin="stated", note="")
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        provenance = draft.provenance
        facts = (*provenance.facts, *([] if trained is None else [noted]))
        write_draft(tmp_path / "draft", replace(draft, provenance=replace(provenance, facts=facts)))
    for words in (
        ("inspect", tmp_path / "draft", "--target", "zoo:target"),
        ("convert", tmp_path / "draft", tmp_path / "out", "--to", "sglang", "--target", "zoo:target"),
    ):
        shown = draftkit(*words)
        assert shown.code == 0, shown.err
        said = "trained on samples of up to 100 tokens, and the target takes 2,048" in " ".join(shown.out.split())
        assert said == told


def shortened(draft: Draft) -> Draft:
    """With 64 positions, where it has any."""
    architecture = draft.spec.architecture
    if isinstance(architecture, CausalLMSpec):
        architecture = replace(architecture, config=architecture.config | {"max_position_embeddings": 64})
    elif isinstance(architecture, EagleSpec | DFlashSpec):
        rope = replace(architecture.decoder.rope, max_position_embeddings=64)
        architecture = replace(architecture, decoder=replace(architecture.decoder, rope=rope))
    return replace(draft, spec=replace(draft.spec, architecture=architecture))


def test_that_drafting_stops_is_told_of_vllms_first_runner() -> None:
    """`_input_fits_in_drafter` is in its `gpu_model_runner.py`; the second one drafts on."""
    with open_draft("zoo:dflash", "zoo:target") as draft:
        found = findings_of_draft(shortened(draft), read_target_facts(zoo.path("target"), "zoo:target", None))
    assert "V1" in next(f.message for f in found if f.name == "short-draft")


@pytest.mark.parametrize("name", ["dspark", "eagle3"])
def test_in_the_way_of_vllms_second_runner_no_draft_stops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (generation,) = generate(limited(name, 32, monkeypatch), like="vllm-v2")
    assert not any(r.beyond for r in generation.rounds)


def test_a_learned_table_of_positions_ends_in_either_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = limited("draft-model", 32, monkeypatch)
    assert not drafter.positions_end
    monkeypatch.setattr(drafter, "positions_end", True)
    (generation,) = generate(drafter, like="vllm-v2")
    assert {r.beyond for r in generation.rounds} == {False, True}
