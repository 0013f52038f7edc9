"""The verdict of a gate: what it says of pairs of results, how often it is wrong, and what it refuses to compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from draftkit.errors import DraftkitError
from draftkit.results.cell import Cell, Interval, MeasuredTree, PromptRecord
from draftkit.results.gate import judgements, paired_sums, ratio_of, sums_of
from draftkit.results.matching import gate_results, matched
from draftkit.results.record import Result
from draftkit.results.statistics import Sums
from scripts.check.gate import false_alarms, seen_losses

MADE: dict[str, Any] = {"hardware": "a CPU", "device": "cpu", "dtype": "float32", "dataset": {"thinking": None}}


def records(sums: Sums) -> tuple[PromptRecord, ...]:
    return tuple(PromptRecord(f"p{i}", rounds, int(accepted), 40) for i, (accepted, rounds) in enumerate(sums))


def result(sums: Sums, *others: Cell, made: dict[str, Any] | None = None, **changes: Any) -> Result:
    """One cell of these prompts, and others beside it."""
    cell = Cell(
        target="t", draft="d", num_speculative_tokens=4, temperature=0.0, concurrency=1, draft_sampling="greedy",
        prompts_sha256="p" * 64, template_sha256="t" * 64, target_sha256="w" * 64, max_new_tokens=40,
        acceptance_length=Interval(2.0, None, None), by_prompt=records(sums),
    )  # fmt: skip
    return Result((replace(cell, **changes), *others), MADE | (made or {}), path="r.json")


def prompts(count: int = 40, share: float = 1.0, seed: int = 0) -> Sums:
    """Prompts of which each accepts about so many times what another draft does."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        rounds, rate = drawn.randrange(15, 40), drawn.uniform(0.8, 2.4)
        found.append((round(rate * rounds * share), rounds))
    return found


def test_an_unchanged_draft_is_not_worse() -> None:
    gate = gate_results(result(prompts()), result(prompts()))
    assert (gate.verdict, gate.exit_code()) == ("not worse", 0)
    assert gate.cells[0].judgement.ratio == Interval(1.0, 1.0, 1.0, 40)
    assert gate.cells[0].judgement.more_prompts is None


def test_a_draft_that_lost_a_tenth_is_worse() -> None:
    gate = gate_results(result(prompts(share=0.85)), result(prompts()))
    (cell,) = gate.cells
    assert (gate.verdict, gate.exit_code(), gate.exit_code("pass")) == ("worse", 3, 3)
    assert cell.new < cell.old
    assert cell.judgement.p_worse < 0.001


def test_a_loss_within_the_tolerance_is_not_worse() -> None:
    assert gate_results(result(prompts(share=0.97)), result(prompts()), tolerance=0.1).verdict == "not worse"


def test_what_cannot_be_told_says_how_many_prompts_would() -> None:
    gate = gate_results(result(prompts(12, seed=1)), result(prompts(12, seed=2)))
    (cell,) = gate.cells
    assert gate.verdict == "cannot tell"
    assert [gate.exit_code(one) for one in ("report", "pass", "fail")] == [4, 0, 3]
    assert cell.judgement.more_prompts is None or cell.judgement.more_prompts > 0
    assert "would" in cell.sentence


@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_fewer_than_ten_prompts_tell_nothing(count: int) -> None:
    new = result(prompts(count, share=0.5) or [(0, 0)])
    (one,) = judgements([ratio_of(sums_of(new.cells[0]), prompts(count))], [count], 0.02)
    assert one.verdict == "cannot tell"
    assert one.more_prompts is not None
    assert one.more_prompts >= 10 - count


def test_prompts_without_a_draft_are_left_out_on_both_sides_and_counted() -> None:
    sums = prompts(20)
    gate = gate_results(result([(0, 0), *sums[1:]]), result(sums))
    assert (gate.cells[0].prompts, gate.cells[0].left_out) == (19, 1)
    assert gate.cells[0].old == gate.cells[0].new


def test_turns_of_one_conversation_are_one_prompt() -> None:
    turns = tuple(PromptRecord(name, 10, 5, 20) for name in ("a", "a/2", "a/3", "b", "c/2"))
    new = replace(result([]).cells[0], by_prompt=turns)
    assert sums_of(new) == [(15, 30), (5, 10), (5, 10)]
    assert paired_sums(new, new)[0] == sums_of(new)


def test_rounds_without_a_draft_do_not_count() -> None:
    record = PromptRecord("a", 10, 6, 20, drafts=3)
    assert sums_of(replace(result([]).cells[0], by_prompt=(record,))) == [(6, 3)]


def test_each_confidence_is_a_setting_of_its_own() -> None:
    plain = result(prompts()).cells[0]
    several = replace(result([]), cells=(plain, replace(plain, min_confidence=0.5)))
    found = gate_results(several, several).cells
    assert [cell.draft_confidence for cell in found] == [None, 0.5]
    assert found[1].name == f"{found[0].name.replace('K = 4', 'K = 4, draft_confidence 0.5')}"


def test_the_worst_setting_decides_and_several_share_the_chance() -> None:
    old, new = prompts(14, seed=3), prompts(14, share=0.93, seed=3)
    noisy = [(accepted + (-1) ** i * 4, rounds) for i, (accepted, rounds) in enumerate(new)]
    alone = judgements([ratio_of(noisy, old)], [14], 0.02)[0]
    together = judgements([ratio_of(noisy, old)] + [ratio_of(old, old)] * 9, [14] * 10, 0.02)[0]
    assert together.p_worse == pytest.approx(min(1.0, 10 * alone.p_worse))
    assert together.seen >= alone.seen


REFUSED: dict[str, dict[str, Any]] = {
    "K 6 against 4": {"num_speculative_tokens": 6},
    "T 1.0 against 0.0": {"temperature": 1.0},
    "draft sampling": {"draft_sampling": "probabilistic"},
    "context 1024 against None": {"context": 1024},
    "tree 3x2 against None": {"tree": MeasuredTree("static", "3x2", 9, 2, "")},
    "prompts": {"prompts_sha256": "q" * 64},
    "chat template": {"template_sha256": "u" * 64},
    "target weights": {"target_sha256": "x" * 64},
    "max_new_tokens 20 against 40": {"max_new_tokens": 20},
    "verification": {"verification": "block"},
    "target u against t": {"target": "u", "target_sha256": None},
    "way of counting": {"estimated": True},
    "no counts by prompt": {"by_prompt": None},
    "had a draft": {"num_drafts": 7},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_differs_is_refused_by_its_name(what: str) -> None:
    old = result(prompts(), verification="rejection")
    changed = result(prompts(), **({"verification": "rejection"} | REFUSED[what]))
    with pytest.raises(DraftkitError, match=what):
        matched(changed, old)


@pytest.mark.parametrize(("name", "value"), [("thinking", True), ("turns", "all")])
def test_other_ways_of_asking_are_refused_by_their_names(name: str, value: object) -> None:
    old = result(prompts(), made={"dataset": {"thinking": None, "turns": "first"}})
    new = result(prompts(), made={"dataset": {"thinking": None, "turns": "first"} | {name: value}})
    with pytest.raises(DraftkitError, match=name):
        matched(new, old)


def test_cuts_matter_only_where_tokens_are_drawn() -> None:
    greedy, drawn = (result(prompts(), temperature=t, top_p=0.9) for t in (0.0, 1.0))
    assert matched(greedy, result(prompts(), top_p=1.0))[0]
    with pytest.raises(DraftkitError, match="top_p"):
        matched(drawn, result(prompts(), temperature=1.0, top_p=1.0))


@pytest.mark.parametrize("accepted", [[0] * 39 + [20], [0] * 40, [1] * 10 + [0] * 30])
def test_a_dead_reference_is_refused(accepted: Sequence[int]) -> None:
    """The last one is a reference that a well-known project recorded: 1.0097."""
    dead = result([(one, 30) for one in accepted])
    with pytest.raises(DraftkitError, match="does nothing"):
        matched(result(prompts()), dead)


def test_settings_are_matched_and_those_of_one_side_named() -> None:
    one, two = (result(prompts(), num_speculative_tokens=k).cells[0] for k in (2, 8))
    old, new = result(prompts(), one), result(prompts(), two)
    pairs, notes = matched(new, old)
    assert [(a.num_speculative_tokens, b.num_speculative_tokens) for a, b in pairs] == [(4, 4)]
    assert "K=2" in notes[0]


def test_drafts_go_by_their_names_unless_there_is_one() -> None:
    other = replace(result(prompts()).cells[0], draft="e")
    assert matched(result(prompts(), draft="new"), result(prompts()))[0]
    pairs, _ = matched(result(prompts(), other), result(prompts(), other))
    assert [(a.draft, b.draft) for a, b in pairs] == [("d", "d"), ("e", "e")]
    with pytest.raises(DraftkitError, match="draft"):
        matched(result(prompts(), draft="new"), result(prompts(), other))


def test_of_several_batches_the_same_one_is_compared() -> None:
    wide = replace(result(prompts()).cells[0], concurrency=8)
    pairs, _ = matched(result(prompts(), wide), result(prompts(), wide))
    assert [(a.concurrency, b.concurrency) for a, b in pairs] == [(1, 1), (8, 8)]
    pairs, _ = matched(result(prompts(), concurrency=4), result(prompts()))
    assert len(pairs) == 1


def test_what_is_not_said_is_noted() -> None:
    _, notes = matched(result(prompts(), target_sha256=None), result(prompts()))
    assert "target weights" in notes[0]


def test_greedy_text_repeats_on_one_machine_alone() -> None:
    here, there = result(prompts()), result(prompts(), made={"hardware": "another"})
    assert "cannot fail by chance" in gate_results(here, here).nightly
    assert "by chance;" in gate_results(there, here).nightly
    drawn = result(prompts(), temperature=1.0)
    assert "of 30 runs" in gate_results(drawn, drawn).nightly


@pytest.mark.long
def test_false_alarms_are_as_rare_as_said_and_losses_seen_as_often() -> None:
    """`python -m scripts.check.gate` is the long table."""
    assert false_alarms(20, 300) <= 0.09
    measured, printed = seen_losses(40, 0.05, 200)
    assert measured == pytest.approx(printed, abs=0.12)


@pytest.mark.long
@pytest.mark.parametrize("count", [10, 20, 40, 80])
def test_false_alarms_are_as_rare_as_said(count: int) -> None:
    """32 of 400, or within three standard errors of 5 % in 1,000."""
    assert false_alarms(count, 1000) <= 0.05 + 3 * (0.05 * 0.95 / 1000) ** 0.5


@pytest.mark.long
@pytest.mark.parametrize("count", [20, 40, 80])
@pytest.mark.parametrize("loss", [0.02, 0.05, 0.1])
def test_the_power_that_is_printed_is_that_which_is_had(count: int, loss: float) -> None:
    measured, printed = seen_losses(count, loss, 400)
    assert measured == pytest.approx(printed, abs=0.08)
