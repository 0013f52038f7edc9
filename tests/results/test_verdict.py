"""What a measurement says to do: by what is paid for beyond chance, and in the same words everywhere."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.report_results import full_result, old_result
from rich.console import Console

from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import findings
from draftkit.report.card.card import with_sure_speeds
from draftkit.report.page.series import join
from draftkit.report.terminal.tables import show_evaluation
from draftkit.results.cell import Cell, Interval
from draftkit.results.record import Result, SpeedModel, Speedup, result_from
from draftkit.results.settings import Settings
from draftkit.results.verdict import verdicts


def cell(speedup: float, spread: float = 0.1, *, k: int = 4, batch: int = 1, **changes: Any) -> Cell:
    """A cell of 20 prompts; `spread`: how far its interval reaches to each side. inf: it has none."""
    interval = None if spread == float("inf") else Interval(speedup, speedup - spread, speedup + spread, 20)
    made = Cell(
        target="t", draft="one", num_speculative_tokens=k, temperature=0.0, concurrency=batch, num_prompts=20,
        acceptance_length=Interval(3.0, 2.5, 3.5, 20), speedup=speedup, speedup_interval=interval, method="eagle3",
    )  # fmt: skip
    return replace(made, **changes)


def said(*cells: Cell) -> str:
    (verdict,) = verdicts(cells)
    return verdict.sentence


def test_bundled_prompts_are_named_first_where_the_target_is_not_bundled_too() -> None:
    assert said(cell(1.6, dataset="zoo")).startswith("On draftkit's bundled prompts, use one at K = 4 ")
    assert said(cell(1.6, dataset="zoo", target="zoo:target")).startswith("Use one at K = 4 ")
    warm = verdicts((cell(1.6, dataset="zoo"), replace(cell(1.6, dataset="zoo"), temperature=1.0)))[1].sentence
    assert warm.startswith("On draftkit's bundled prompts, at T = 1, use one ")


def test_what_pays_is_used_up_to_where_it_pays() -> None:
    cells = (cell(1.6), cell(1.4, batch=4), cell(1.3, batch=8), cell(0.8, batch=16))
    (verdict,) = verdicts(cells)
    assert verdict.sentence == (
        "Use one at K = 4 up to batch 8, 1.60 × [1.50, 1.70] to 1.30 × [1.20, 1.40]; beyond, draft nothing."
    )
    assert (verdict.kind, verdict.draft, verdict.num_speculative_tokens, verdict.up_to) == ("use", "one", 4, 8)
    assert said(cell(1.6), cell(1.1, 0.2, batch=4)) == (
        "Use one at K = 4 at batch 1, 1.60 × [1.50, 1.70]; beyond, whether a draft pays cannot be told."
    )
    assert said(cell(1.6), cell(0.9, batch=8), cell(1.2, 0.05, batch=8, k=2)).endswith(
        "; beyond, one at K = 2, 1.20 × [1.15, 1.25]."
    )


def test_the_fastest_of_several_is_used_and_a_rival_is_named() -> None:
    slower = cell(1.2, draft="two")
    assert said(cell(1.6), slower) == "Use one at K = 4 at batch 1, 1.60 × [1.50, 1.70]."
    (verdict,) = verdicts((cell(1.6), cell(1.5, draft="two")))
    assert "; two at K = 4 may be as fast, 1.50 × [1.40, 1.60]: " in verdict.sentence
    assert f": {verdict.more_prompts} more prompts would tell" in verdict.sentence
    assert 10 < verdict.more_prompts < 100  # distance 0.065, half width 0.066 × √2, of 20 prompts


def test_a_second_run_of_one_setting_is_no_rival() -> None:
    assert said(cell(1.6), cell(1.5)) == "Use one at K = 4 at batch 1, 1.60 × [1.50, 1.70]."


def test_no_draft_pays() -> None:
    (verdict,) = verdicts((cell(0.9, 0.05), cell(0.7, 0.05, k=2)))
    assert verdict.kind == "none"
    assert verdict.sentence.startswith("No draft pays here: the best, one at K = 4, decodes 0.90 × [0.85, 0.95]")


def test_of_several_batches_the_one_that_is_meant_is_named() -> None:
    assert "the best, one at K = 4 and batch 8, decodes 0.90 ×" in said(cell(0.8, 0.05), cell(0.9, 0.05, batch=8))
    assert said(cell(0.8, 0.05), cell(1.1, 0.2, batch=8)).startswith("Whether one at K = 4 and batch 8 pays")


def test_intervals_that_hold_1_ask_for_more_prompts() -> None:
    (verdict,) = verdicts((cell(1.1, 0.2),))
    assert verdict.kind == "unclear"
    assert verdict.sentence.endswith(f": measure {verdict.more_prompts} more prompts.")
    assert "no number of prompts will tell" in said(cell(1.01, 0.2))


def test_a_disturbed_machine_is_no_matter_of_prompts() -> None:
    noisy = cell(1.3, 0.6, pace_error=0.5, passes=3)
    assert said(noisy).endswith(": something else used the machine; measure again on one that does nothing else.")
    (verdict,) = verdicts((cell(1.6, pace_error=0.2), cell(1.5, draft="two")))
    assert verdict.sentence.endswith("; one at K = 4 may be as fast, 1.60 × [1.50, 1.70].")
    assert verdict.more_prompts is None


BEYOND = {"speedup_interval": Interval(1.85, 1.06, 3.17, 8), "acceptance_length": Interval(2.11, 1.8, 2.4, 8)}
DOUBTED: list[dict[str, Any]] = [
    BEYOND,
    {"pace_error": 0.52, "passes": 3},
    BEYOND | {"acceptance_length": Interval(2.11, None, None)},
]


@pytest.mark.parametrize("doubt", DOUBTED, ids=["beyond", "disturbed", "beyond a length without an interval"])
@pytest.mark.parametrize("engine", ["draftkit", "vllm", "llama.cpp"])
def test_what_its_own_run_doubts_is_not_advised(engine: str, doubt: dict[str, Any]) -> None:
    """Above 1 it is all the same; nor do a page and a card show it as what the draft brings."""
    doubted = cell(1.85, engine=engine, **doubt)
    (verdict,) = verdicts((doubted,))
    assert verdict.kind == "unclear"
    assert "pays cannot be told" in verdict.sentence
    assert verdicts((doubted, cell(1.2, draft="two", engine=engine)))[0].sentence.startswith("Use two at K = 4")
    assert verdicts((cell(1.9, engine=engine), replace(doubted, concurrency=4)))[0].up_to == 1
    assert join([Result((doubted,), PROVENANCE)])[0].fastest is None
    assert with_sure_speeds(Result((doubted,), PROVENANCE)).cells[0].speedup is None


def test_an_interval_beyond_the_acceptance_length_says_so() -> None:
    assert said(cell(1.85, **BEYOND)) == (
        "Whether one at K = 4 pays cannot be told: 1.85 × [1.06, 3.17] plain decoding reaches beyond what an "
        "acceptance length of 2.11 [1.80, 2.40] accounts for; measure again with --set repeats=10."
    )
    within = BEYOND | {"speedup_interval": Interval(1.85, 1.5, 2.5, 8)}  # some prompts accept more
    assert said(cell(1.85, **within)).startswith("Use one at K = 4")


def test_without_an_interval_nothing_is_recommended() -> None:
    assert "how sure that is cannot be told: measure with --set repeats=3" in said(cell(1.8, float("inf")))
    assert said(cell(0.8, float("inf"))).startswith(
        "No draft was faster than plain decoding: one at K = 4 came closest"
    )
    assert "measure at least 8 prompts" in said(cell(1.8, float("inf"), num_prompts=1))
    assert verdicts((replace(cell(1.8), speedup=None, speedup_interval=None),))[0].kind == "unmeasured"


def test_a_speed_up_beyond_the_acceptance_length_is_questioned() -> None:
    """3.66 × at a length of 2.55: the baseline was disturbed."""
    wrong = cell(3.66, acceptance_length=Interval(2.55, 2.2, 3.1, 8))
    assert "No speed-up can be told: 3.66 ×" in said(wrong)
    assert said(wrong, cell(1.3, k=2)).startswith("Use one at K = 2")
    (found,) = findings(Evidence(cell=wrong, settings=Settings()), "measurement")
    assert found.name == "speed-unexplained"
    assert "acceptance length of 2.55" in found.message
    noisy = cell(1.3, pace_error=0.4, passes=3)
    assert [f.name for f in findings(Evidence(cell=noisy, settings=Settings()), "measurement")] == ["speed-disturbed"]


def test_temperatures_and_engines_have_verdicts_of_their_own() -> None:
    sentences = [v.sentence for v in verdicts((cell(1.6), cell(0.8, temperature=1.0), cell(1.6, engine="vllm")))]
    assert [s.partition(", ")[0] for s in sentences] == ["At T = 0", "At T = 1", "At T = 0 in vllm"]


def shown(result: Result, **options: Any) -> list[str]:
    text = io.StringIO()
    show_evaluation(Console(file=text, width=80, highlight=False), result, **options)
    return text.getvalue().splitlines()


PROVENANCE: dict[str, object] = {"dtype": "float32", "device": "cpu"}


def test_the_terminal_begins_with_the_verdict_and_fits_80_columns() -> None:
    """Four drafts over K, temperature and batch, one of which skips rounds: no row is cut or folded."""
    names = ("zoo:eagle3", "zoo:draft-model", "ngram", "/home/me/models/EAGLE-LLaMA3-Instruct-8B-draftkit")
    cells = tuple(
        cell(
            1.25, k=k, batch=batch, draft=name, temperature=t, matches_greedy=True, num_matching_prompts=20,
            drafted_acceptance_length=Interval(3.80, 3.1, 4.4, 20) if name == "ngram" else None,
        )
        for name in names
        for t in (0.0, 0.7)
        for batch in (1, 16)
        for k in (2, 16)
    )  # fmt: skip
    result = Result(cells, PROVENANCE)
    lines = shown(result)
    assert lines[0].startswith("At T = 0, use zoo:eagle3 at K = ")
    assert max(map(len, lines)) <= 80
    assert sum("3.00 [2.50, 3.50]" in line and "1.25 [1.15, 1.35]" in line for line in lines) == len(cells)
    assert not any("…" in line for line in lines)
    assert sum(" 3.80 " in line for line in lines) == 8
    assert not any("accepted at 1…K" in line for line in lines)
    details = io.StringIO()
    show_evaluation(Console(file=details, width=300), result, details=True)
    assert "accepted at 1…K" in details.getvalue()


def test_the_title_names_the_server_that_was_measured() -> None:
    title = "\n".join(shown(Result((cell(1.25, engine="llama.cpp"),), {"server": "http://127.0.0.1:8080"})))
    assert "a server of llama.cpp" in title


@pytest.mark.parametrize(
    ("path", "label"),
    [("/drafts/eagle3", "/drafts/eagle3"), ("/runs/of/eagle3/draft", "of/eagle3/draft"), ("ngram", "ngram")],
)
def test_a_draft_in_a_folder_is_called_by_the_end_of_its_path(path: str, label: str) -> None:
    lines = shown(Result((cell(1.2, draft=path),), PROVENANCE))
    assert [line.split()[0] for line in lines if "1.20 [1.10" in line][-1] == label


def test_what_is_predicted_of_speeds_fits_80_columns() -> None:
    """Extrapolated K are marked."""
    speeds = tuple(Speedup(batch, k, 1.25) for batch in (1, 16) for k in range(1, 9))
    model = SpeedModel("one", predicted=speeds, measured=(Speedup(1, 4, 1.2, 1.25),), best_k=4, schedule=((1, 16, 4),))
    lines = shown(Result((cell(1.6),), PROVENANCE, speed_models=(model,)))
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any("K=4 " in line and "K=5*" in line for line in lines)


def test_drafts_in_folders_are_called_what_tells_them_apart() -> None:
    names = ("/runs/eagle3/draft", "/runs/p-eagle/draft", "ngram")
    lines = shown(Result(tuple(cell(1.2, draft=name) for name in names), PROVENANCE))
    assert [line.split()[0] for line in lines if "1.20 [1.10" in line][-3:] == ["eagle3", "p-eagle", "ngram"]


def test_results_are_judged_as_far_as_they_say() -> None:
    for data in (full_result(), old_result()):
        result = result_from(data, Path("old.json"))
        (verdict,) = result.judged
        assert verdict.kind == "unclear"
        assert shown(result)[0].startswith(verdict.sentence[:60])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (SpeedModel("one", withheld="the predictions miss"), "one: no advice, the predictions miss"),
    ],
)
def test_withheld_advice_gives_no_schedule_to_paste(model: SpeedModel, words: str) -> None:
    text = "\n".join(shown(Result((cell(1.2),), PROVENANCE, speed_models=(model,))))
    assert words in text
    assert "num_speculative_tokens_per_batch_size" not in text
