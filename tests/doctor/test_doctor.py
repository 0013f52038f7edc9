"""The doctor names the defect that was put into a sound draft, and finds nothing in sound ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.targets import save_target
from fixtures.patients import pico_draft, pico_patient
from rich.console import Console

from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import findings
from draftkit.convert.unified import write_draft
from draftkit.doctor.diagnose import Diagnosis, audit, classify, diagnose_draft
from draftkit.doctor.experiments import all_experiments
from draftkit.doctor.experiments.weights import find_rotation, rotate_blocks
from draftkit.doctor.measure import Tried, compare
from draftkit.doctor.patient import changed, runnable, target_ids, with_target_ids
from draftkit.doctor.trial import Trial, as_override
from draftkit.errors import DraftkitError
from draftkit.finding import Finding
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import Draft
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.report.terminal.diagnosis import show_diagnosis
from draftkit.requests import Request
from draftkit.results.statistics import gain
from draftkit.runtime.records import Generation, Round


def spoiled(folder: Path, name: str, **facts: Any) -> str:
    """A draft of the zoo with other facts."""
    with open_draft(f"zoo:{name}", "zoo:target") as draft:
        write_draft(folder, changed(draft, replace(draft.spec.architecture, **facts)))
    return str(folder)


def diagnosed(draft: str, monkeypatch: pytest.MonkeyPatch, *names: str, limit: int = 8) -> Any:
    """A diagnosis with these experiments only, which keeps it short."""
    chosen = tuple(experiment for experiment in all_experiments() if experiment.name in names)
    monkeypatch.setattr("draftkit.doctor.diagnose.all_experiments", lambda: chosen)
    return diagnose_draft("zoo:target", draft, limit=limit, max_new_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "facts", "cause", "others"),
    [
        ("eagle3", {"concatenation": "hidden_embedding"}, "concatenation", ["feedback"]),
        ("eagle", {"concatenation": "hidden_embedding"}, "concatenation", ["embedding"]),
    ],
)
def test_an_injected_defect_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, facts: dict[str, Any], cause: str, others: list[str]
) -> None:
    diagnosis = diagnosed(spoiled(tmp_path / "draft", name, **facts), monkeypatch, cause, *others)
    assert diagnosis.causes[0].name == cause
    best = diagnosis.recommended[0]
    assert best.gain.low > 0
    assert best.confirmed


def weighed(monkeypatch: pytest.MonkeyPatch, **gains: float | tuple[float, float]) -> tuple[Tried, ...]:
    """What comes of changes that add these tokens a round to the mean of every prompt, or to those of every other
    four; the prompts differ much by themselves."""

    def run(gain: float | tuple[float, float], k: int, numbers: list[int]) -> list[Generation]:
        added = gain if isinstance(gain, tuple) else (gain, gain)
        means = [0.2 + 0.3 * (n % 3) + added[n // 4 % 2] for n in numbers]
        return [Generation(Request("x", (1,), 100), rounds=[Round(1, 3, 0, 1, (mean, 0.0, 0.0))] * 5) for mean in means]

    monkeypatch.setattr("draftkit.doctor.measure.run", run)
    patient: Any = SimpleNamespace(requests=range(16), k=3, setup=lambda: 0.0, source="draft", target_source="target")
    trials = [("mask", Trial(name, lambda gain=gain: gain, {"mask": name}, "")) for name, gain in gains.items()]
    _, tried = compare(patient, trials)
    return tried


def test_of_changes_that_measure_alike_the_likeliest_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best by less than noise or a margin is not better; one that is worse by more is no rival."""
    tried = weighed(monkeypatch, likely=0.1, best=0.11, alike=0.105, worse=0.05, harmful=-0.1)
    (recommended,) = (t for t in tried if t.recommended)
    assert (recommended.change, recommended.alike) == ("likely", ("best", "alike"))
    assert [t.change for t in tried if t.helps] == ["best", "alike", "likely"]
    assert [t.change for t in tried if t.confirmed] == ["best", "alike", "likely"]


def test_a_change_that_is_better_is_recommended_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (recommended,) = (t for t in weighed(monkeypatch, likely=0.1, best=0.2) if t.recommended)
    assert (recommended.change, recommended.alike) == ("best", ())


def test_a_likely_change_is_not_recommended_at_the_cost_of_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance does not tell them apart, yet what is likely gains less by more than anybody would give away."""
    (recommended,) = (t for t in weighed(monkeypatch, likely=(0.3, 0.25), best=(0.5, 0.2)) if t.recommended)
    assert (recommended.change, recommended.alike) == ("best", ("likely",))


def test_rivals_without_end_are_named_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may keep hundreds of tokens for later, whose rows nothing has trained."""
    tried = weighed(monkeypatch, **{f"reserved_{n}": 0.2 for n in range(50)})
    (recommended,) = (t for t in tried if t.recommended)
    assert recommended.change == "reserved_0"
    assert len(recommended.alike) == 49
    assert sum(t.confirmed for t in tried) == 4
    cause = found_by_trials(tried).causes[0]
    assert "reserved_5; 44 more" in cause.message
    assert cause.fix.endswith("--set mask=reserved_0")


def found_by_trials(tried: tuple[Tried, ...], *findings: Finding) -> Diagnosis:
    return Diagnosis("target", "draft", "eagle3", None, None, findings, (), tried, {}, {})


def test_a_remedy_that_was_measured_in_vain_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Finding("layer-ids", "warning", "moved by one", fix="--set mask=as-usual")
    (cause,) = found_by_trials(weighed(monkeypatch, **{"as-usual": 0.001}), moved).causes
    assert cause.message == "moved by one; measured, as-usual does not help (1.43 → 1.43)"
    assert "--set" not in cause.fix
    (cause,) = found_by_trials(weighed(monkeypatch, **{"as-usual": 0.2}), moved).causes
    assert (cause.name, cause.fix) == ("mask", "draftkit convert draft OUT --target target --set mask=as-usual")


@pytest.mark.slow
def test_nothing_is_recommended_for_a_sound_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = diagnosed("zoo:eagle3", monkeypatch, "concatenation", "feedback")
    assert diagnosis.recommended == ()
    assert {tried.experiment for tried in diagnosis.tried} == {"concatenation", "feedback"}
    assert "mask-token" not in diagnosis.not_applicable  # it was not among the chosen
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show_diagnosis(console, diagnosis.to_dict())
    shown = console.export_text()
    assert shown.startswith("zoo:eagle3: nothing found: no known defect")
    assert shown.count("acceptance length 2.") == 1  # the one that all gains are against
    assert "→" not in shown


@pytest.mark.slow
def test_so_few_prompts_recommend_nothing_and_print_no_nan(
    draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two prompts every gain is on all of them, by chance or not."""
    broken = spoiled(tmp_path / "draft", "eagle3", norm_before_residual=True)
    chosen = [one for one in all_experiments() if one.name in ("norm-before-residual", "template")]
    monkeypatch.setattr("draftkit.doctor.diagnose.all_experiments", lambda: chosen)
    ran = draftkit("doctor", "--target", "zoo:target", "--draft", broken, "--limit", 4, "--max-new-tokens", 4)
    assert ran.code == 0
    assert "cannot be told of so few prompts: --limit 8 or more" in ran.out
    assert "helps" not in ran.out.replace("a change helps", "")
    assert "nan" not in ran.out
    assert ran.err.endswith(f"next: draftkit eval --target zoo:target --draft {broken}\n")


@pytest.mark.slow
def test_the_verdict_comes_first_with_its_gain_and_command(
    draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = spoiled(tmp_path / "draft", "eagle3", norm_before_residual=True)
    chosen = [one for one in all_experiments() if one.name == "norm-before-residual"]
    monkeypatch.setattr("draftkit.doctor.diagnose.all_experiments", lambda: chosen)
    ran = draftkit("doctor", "--target", "zoo:target", "--draft", broken, "--limit", 8, "--max-new-tokens", 12)
    first, second, *_ = ran.out.splitlines()
    assert first.startswith("1. norm-before-residual: norm_before_residual=false: +")
    assert first.endswith("] tokens a round")
    assert second.endswith("--set norm_before_residual=false")
    assert ran.err.endswith("next: draftkit eval --target zoo:target --draft OUT\n")


@pytest.mark.slow
def test_a_map_of_ids_taken_for_offsets_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        write_draft(tmp_path / "draft", changed(draft, tensors={"d2t": target_ids(draft)}))
    diagnosis = diagnosed(str(tmp_path / "draft"), monkeypatch, "d2t", limit=4)
    assert diagnosis.causes[0].name == "broken-d2t"
    assert diagnosis.tried[0].after > diagnosis.tried[0].before


def test_ngram_lookup_has_nothing_to_examine() -> None:
    with pytest.raises(DraftkitError, match="no checkpoint"):
        diagnose_draft("zoo:target", "ngram")


def test_a_target_that_is_not_run_leaves_the_tables_and_facts(tmp_path: Path, draftkit: Command) -> None:
    """What is wrong with the draft by itself is found; what only decoding shows is said to be missing."""
    target = save_target("falcon", tmp_path / "target")
    tensors = pico.eagle3_tensors()
    tensors["fc.weight"][3, 5] = torch.nan
    draft = pico.write_checkpoint(tmp_path / "draft", pico.eagle3_config(), tensors)
    asked = ("doctor", "--target", target, "--draft", draft, "--dataset", "zoo", "--limit", 4, "--device", "cpu")
    ran = draftkit(*asked, "--json")
    assert ran.code == 0, ran.err
    diagnosis = json.loads(ran.out)
    assert (diagnosis["length"], diagnosis["decay"], diagnosis["tried"]) == (None, None, [])
    assert diagnosis["causes"][0]["name"] == "not-finite"
    (unmeasured,) = (cause for cause in diagnosis["causes"] if cause["name"] == "not-measured")
    assert "FalconForCausalLM does not attend" in unmeasured["what"]
    assert unmeasured["remedy"].startswith("draftkit eval with --engine vllm")
    assert {tensor["name"] for tensor in diagnosis["tensors"] if not tensor["finite"]} == {"fc.weight"}
    shown = draftkit(*asked)
    assert shown.code == 0
    assert "not measured" in shown.out


def test_every_experiment_says_what_it_needs() -> None:
    experiments = all_experiments()
    assert len(experiments) == 37
    assert all(experiment.needs for experiment in experiments)
    assert len({experiment.name for experiment in experiments}) == len(experiments)


def test_a_language_model_is_rotated_as_its_facts_say() -> None:
    model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    with open_draft("zoo:draft-model", "zoo:target") as draft:
        other = changed(draft, with_facts(draft.spec.architecture, rope_theta=500_000.0))
        own, rotated = (load_drafter(d, model, tokenizer).module for d in (draft, other))
    frequencies = [m.get_decoder().rotary_emb.inv_freq for m in (own, rotated)]  # type: ignore[union-attr, operator]
    exponents = torch.arange(len(frequencies[1])) / len(frequencies[1])
    torch.testing.assert_close(frequencies[1], 500_000.0**-exponents)
    assert not torch.equal(*frequencies)


def eagle3_draft(folder: Path) -> Draft:
    return pico_draft(folder, pico.eagle3_config(), pico.eagle3_tensors())


def test_audit_tells_faulty_tensors(tmp_path: Path) -> None:
    draft = eagle3_draft(tmp_path)
    broken = {
        "norm.weight": torch.full((64,), 1e-6),
        "fc.weight": torch.cat([torch.zeros(64, 64), torch.randn(64, 128)], dim=1),
        "layers.0.mlp.up_proj.weight": torch.zeros(96, 64),
        "layers.0.mlp.down_proj.weight": torch.full((64, 96), float("nan")),
        "lm_head.weight": torch.randn(128, 64) * 0.02,
    }
    patient = pico_patient(tmp_path, changed(draft, tensors=broken))
    found = findings(Evidence.of_draft(patient.original), "tensors")
    assert {finding.name: finding.message.split(":")[0] for finding in found} == {
        "not-finite": "layers.0.mlp.down_proj.weight",
        "zero-up-proj": "layers.0.mlp.up_proj.weight",
        "norm-weights": "norm.weight",
        "unread-layers": "fc.weight",
        "random-head": "lm_head.weight",
    }
    by_name = {tensor.name: tensor for tensor in audit(patient, None, found)}
    assert by_name["embed_tokens.weight"].use == "shared"
    assert not by_name["layers.0.mlp.down_proj.weight"].finite
    assert by_name["layers.0.self_attn.q_proj.weight"].plausible


def generations(*lengths: tuple[int, list[int]], k: int = 3) -> list[Generation]:
    """Answers to prompts of a length, whose rounds accepted these numbers of drafts."""
    made = []
    for prompt, accepted in lengths:
        rounds = [Round(prompt + i, k, a, a + 1, tuple(float(p < a) for p in range(k))) for i, a in enumerate(accepted)]
        made.append(Generation(Request("x", (1,) * prompt, 100), rounds=rounds))
    return made


@pytest.mark.parametrize(
    ("answers", "pattern"),
    [
        ([(5, [0] * 9 + [3])] * 4, "first token"),
        ([(5, [1] * 9 + [3])] * 4, "second token"),
        ([(5, [3] * 10)] * 4 + [(50, [1] * 10)] * 4, "length of the prompt"),
        ([(5, [3] * 10 + [1] * 10)] * 4, "over an answer"),
    ],
)
def test_decay_is_named(answers: list[tuple[int, list[int]]], pattern: str) -> None:
    assert pattern in " ".join(classify(generations(*answers), 3).patterns)


def test_steady_acceptance_has_no_pattern() -> None:
    decay = classify(generations(*[(length, [3, 2, 3, 1] * 5) for length in (5, 9, 40, 50)]), 3)
    assert decay.patterns == ()
    assert decay.rates == pytest.approx((1.0, 0.75, 2 / 3))


def test_gain_is_paired() -> None:
    """Prompts that differ much and a change that helps all of them alike: the interval is about the change alone."""
    interval = gain([(4.0 * n, 10) for n in range(8)], [(4.0 * n + 1, 10) for n in range(8)], comparisons=20)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.1, 0.1, 0.1))


def test_more_comparisons_widen_the_interval() -> None:
    before, after = [(0.0, 10)] * 8, [(float(n), 10) for n in range(8)]
    alone, among = gain(before, after, 1), gain(before, after, 50)
    assert among.low < alone.low < alone.high < among.high


def test_a_rotation_is_found_and_undone() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(400, 16, generator=generator)
    rotation, _ = torch.linalg.qr(torch.randn(16, 16, generator=generator))
    rotated = table @ rotation + 0.05 * torch.randn(400, 16, generator=generator)
    found = find_rotation(table, rotated)
    assert found is not None
    torch.testing.assert_close(found, rotation, atol=0.05, rtol=0)
    fc, states = torch.randn(8, 48, generator=generator), torch.randn(5, 48, generator=generator)
    seen = torch.cat([state @ rotation for state in states.split(16, dim=1)], dim=1)
    torch.testing.assert_close(seen @ rotate_blocks(fc, rotation).T, states @ fc.T)


def test_no_rotation_between_equal_or_unrelated_tables() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(400, 16, generator=generator)
    assert find_rotation(table, table) is None
    assert find_rotation(table, torch.randn(400, 16, generator=generator)) is None
    assert find_rotation(table[:20], table[:20].flip(1)) is None


def test_a_map_outside_the_vocabulary_is_brought_inside(tmp_path: Path) -> None:
    draft = eagle3_draft(tmp_path)
    assert runnable(draft) is draft
    far = with_target_ids(draft, target_ids(draft) + 1000)
    assert int(target_ids(runnable(far)).max()) == pico.VOCABULARY - 1


def test_a_changed_draft_has_the_tensors_of_its_facts(tmp_path: Path) -> None:
    draft = eagle3_draft(tmp_path)
    eagle: Any = draft.spec.architecture
    other = changed(draft, replace(eagle, final_norm=False, fusion_bias=True))
    assert "norm.weight" not in other.tensors
    assert not other.tensors["fc.bias"].load().any()


@pytest.mark.parametrize(
    ("value", "text"),
    [((1, 2), "1,2"), (1e6, "1e+06"), (True, "true"), (None, "null"), ("post_norm", "post_norm"), (7, "7")],
)
def test_facts_as_overrides(value: object, text: str) -> None:
    assert as_override(value) == text
