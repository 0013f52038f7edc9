"""`--context` and `--slice`: how acceptance shifts with the length of what precedes, and with what is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command
from fixtures.servers.speaking import SpeakingServer, simulated
from rich.console import Console
from typer import BadParameter

from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import findings
from draftkit.cli.options import length_of_text
from draftkit.data.categories import language_of
from draftkit.errors import DraftkitError
from draftkit.evaluate.cell import with_slices
from draftkit.evaluate.contexts import Filler
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.options import parse_contexts
from draftkit.evaluate.prompts import Prompt, load_prompt_set
from draftkit.evaluate.speed import RoundTimes
from draftkit.layout.provenance import TRAINED_FACT, FactOrigin
from draftkit.loading import open_target
from draftkit.report.page.figures import all_figures
from draftkit.report.page.series import join
from draftkit.report.terminal.tables import contexts_table, show_evaluation
from draftkit.results.cell import Cell, Interval, PromptRecord
from draftkit.results.contexts import falls, with_shifts
from draftkit.results.record import Result
from draftkit.results.settings import Settings, read_slices

TEXTS = {
    "en": "What is the best way to learn how to cook for the family in the evening?",
    "de": "Was ist der beste Weg, um das Kochen für die Familie am Abend zu lernen und nicht zu viel?",
}


def test_prompts_are_padded_with_text_of_the_set() -> None:
    prompts = load_prompt_set("zoo", 6).prompts
    tokenizer = open_target("zoo:target").tokenizer
    plain = Conversations(prompts, tokenizer, Settings())
    own = [len(request.prompt) for request in plain.first_requests]
    wanted = max(own) + 40
    padded = Conversations(prompts, tokenizer, Settings(context=wanted))
    requests = padded.first_requests
    assert all(abs(len(request.prompt) - wanted) <= 4 for request in requests)  # where texts meet, tokens may differ
    first, second = tokenizer.decode(requests[0].prompt), prompts[1].text
    assert prompts[0].text in first
    assert first.index(second[:20]) < first.index(prompts[0].text[:20])
    # A block of prompts is padded as the whole set is, and a prompt that is long enough is left alone.
    blocks = [r for block in padded.blocks for r in block.first_requests]
    assert [r.prompt for r in blocks] == [r.prompt for r in requests]
    short = Conversations(prompts, tokenizer, Settings(context=min(own) - 5)).first_requests
    assert [r.prompt for r in short] == [r.prompt for r in plain.first_requests]


def test_no_text_comes_again_in_a_context() -> None:
    """The whole set fills contexts, answers included, not only the prompts that are asked; then Python's reference."""
    tokenizer = open_target("zoo:target").tokenizer
    said = {f"question {n}": f"question {n}\n\nanswer {n}" for n in range(9)}
    filler = Filler(said, tokenizer)
    few = filler.before("question 7", 30)
    assert few.startswith("question 8\n\nanswer 8\n\nquestion 0")
    assert filler.borrowed == 0
    many = filler.before("question 7", 400)
    assert all(many.count(f"answer {n}\n") == (n != 7) for n in range(9))
    assert "question 7" not in many
    assert filler.borrowed > 200
    with pytest.raises(
        DraftkitError, match=r"9,999,999 tokens before it, and the set and the reference of Python 3\.\d+"
    ):
        filler.before("question 7", 9_999_999)


TRACE = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Write add(a, b)."},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "run", "arguments": {}}}]},
    {"role": "tool", "content": "it ran"},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
]


def test_answers_of_a_trace_are_asked_for_anew(tmp_path: Path) -> None:
    """Each recorded answer is a request of all that comes before it, in rows and in logs of a server."""
    logged = {"request": {"messages": TRACE[:2]}, "response": {"choices": [{"message": TRACE[4]}]}}
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, ({"id": "t", "messages": TRACE}, logged))))
    found = load_prompt_set(str(tmp_path / "log.jsonl"), recorded=True).prompts
    assert [(prompt.id, len(prompt.recorded), prompt.tools) for prompt in found] == [
        ("t/1", 2, True), ("t/2", 4, True), ("2/1", 2, False),
    ]  # fmt: skip
    tokenizer = open_target("zoo:target").tokenizer
    asked = Conversations(found, tokenizer, Settings(turns="recorded")).first_requests
    assert "it ran" in tokenizer.decode(asked[1].prompt)
    assert "return a + b" not in tokenizer.decode(asked[1].prompt)
    assert [prompt.id for prompt in load_prompt_set(str(tmp_path / "log.jsonl")).prompts] == ["t", "2"]
    with pytest.raises(DraftkitError, match="pass --target"):
        _ = Conversations(found, None, Settings(turns="recorded")).first_requests
    with pytest.raises(DraftkitError, match="recorded turns have a context of their own"):
        Settings(turns="recorded", context=512)
    (tmp_path / "questions.jsonl").write_text('{"prompt": "What?"}')
    with pytest.raises(DraftkitError, match="holds no answers"):
        load_prompt_set(str(tmp_path / "questions.jsonl"), recorded=True)


def of_context(context: int | None, *accepted: int) -> Cell:
    """A cell of prompts with ten rounds each, in which so many drafts stood."""
    records = tuple(PromptRecord(str(n), 10, count, 40, prompt_tokens=context) for n, count in enumerate(accepted))
    return Cell(
        target="t", draft="d", num_speculative_tokens=3, temperature=0, concurrency=1, context=context,
        acceptance_length=Interval(1 + sum(accepted) / (10 * len(accepted)), None, None), by_prompt=records,
    )  # fmt: skip


def test_a_fall_over_contexts_is_told_prompt_by_prompt() -> None:
    """The prompts differ far more than the contexts do."""
    short, long = of_context(None, 25, 2, 14, 8, 20, 3), of_context(4096, 22, 0, 11, 6, 17, 1)
    found = with_shifts([long, short])
    assert found[1].over_context is None
    assert found[0].over_context is not None
    assert found[0].over_context.mean == pytest.approx(-0.25)
    assert found[0].over_context.below(-0.15)
    (fall,) = falls(found)
    assert "draftkit doctor --context 4096" in fall.message
    assert not [*falls(with_shifts([short, replace(short, context=4096)]))]
    figure = all_figures(join([Result(tuple(found), {})]))["acceptance-by-context"]
    assert [x for x, _ in figure.lines[0].points] == [0, 4096]


def test_lengths_are_slices_in_the_order_of_their_size() -> None:
    cell = of_context(100, 25, 2, 14, 8)
    sizes = (100, 5000, 600, 700)
    records = tuple(replace(r, prompt_tokens=n) for r, n in zip(cell.by_prompt or (), sizes, strict=True))
    prompts = [Prompt(str(n), "c", ("x",)) for n in range(4)]
    found = with_slices(replace(cell, by_prompt=records), prompts, ("length",)).slices or ()
    assert [(s.name, s.prompts) for s in found] == [
        ("length=0–255", 1), ("length=512–1023", 2), ("length=4096–8191", 1),
    ]  # fmt: skip


@pytest.mark.slow
def test_contexts_and_slices_are_measured() -> None:
    settings = Settings(2, 6, concurrency=2, limit=4, repeats=0, device="cpu", slices=("category", "tools"))
    result = evaluate_draft("zoo:target", "ngram", settings.sweep(context=(64, 150)))
    assert [cell.context for cell in result.cells] == [64, 150]
    assert [cell.over_context is None for cell in result.cells] == [True, False]
    assert len({cell.key for cell in result.cells}) == 2
    assert [("context 150" in verdict.sentence) for verdict in result.verdicts] == [False, True]
    for cell in result.cells:
        assert cell.slices is not None
        lengths = {found.name: found.acceptance_length for found in cell.slices}
        for category, interval in cell.by_category.items():
            found = lengths[f"category={category}"]
            assert (found is None) == (interval is None)
            assert found is None or interval is None or found.mean == pytest.approx(interval.mean)
        everything = next(found for found in cell.slices if found.name == "tools=no")
        assert (everything.prompts, everything.shift) == (4, None)
    assert json.loads(json.dumps(result.to_dict()))["cells"][1]["context"] == 150


def test_a_shift_is_named() -> None:
    """German answers accept less; what is asked in English is so much longer."""
    prompts = [Prompt(str(n), "c", (TEXTS["de" if n % 4 == 0 else "en"],)) for n in range(24)]
    assert {language_of(text) for text in TEXTS.values()} == set(TEXTS)
    records = tuple(
        PromptRecord(str(n), 20, (4 if n % 4 == 0 else 30) + n % 3, 40, thinks=n % 2 == 0) for n in range(24)
    )
    cell = Cell(target="t", draft="d", num_speculative_tokens=3, temperature=0, concurrency=1, acceptance_length=None)
    found = with_slices(cell, prompts, ("language",))
    assert found.slices is None  # of requests that were not counted one by one nothing is known
    cell = Cell(**{**vars(cell), "by_prompt": records})
    slices = {s.name: s for s in with_slices(cell, prompts, ("language", "thinking")).slices or ()}
    assert set(slices) == {"language=de", "language=en", "thinking=yes", "thinking=no"}
    german = slices["language=de"]
    assert german.prompts == 6
    assert german.acceptance_length is not None
    assert german.acceptance_length.mean == pytest.approx(1 + sum(4 + n % 3 for n in range(0, 24, 4)) / 120)
    assert german.shift is not None
    assert german.shift.below(-1)
    english = slices["language=en"].shift
    assert english is not None
    assert english.above(1)


def counted_cell() -> Cell:
    return Cell(
        target="t", draft="d", num_speculative_tokens=3, temperature=0, concurrency=1, acceptance_length=None,
        num_prompts=24, by_prompt=tuple(PromptRecord(str(n), 20, 0, 40) for n in range(24)), speedup=2.0,
    )  # fmt: skip


@pytest.mark.long
def test_advice_is_of_each_k_and_batch_in_each_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model for each context, from rounds that were timed and cells that were measured there."""
    timed: list[tuple[int, list[int]]] = []

    def times(plain, target, drafter, requests, settings, batches) -> RoundTimes:
        timed.append((min(len(request.prompt) for request in requests), list(batches)))
        slow = 5.0 if settings.context == 150 else 1.0
        return RoundTimes({(b, k): 10 * b + slow * k * b for b in batches for k in (0, 1, 8)})

    monkeypatch.setattr("draftkit.evaluate.engines.own.measure_round_times", times)
    settings = Settings(max_new_tokens=12, limit=2, device="cpu", repeats=0)
    sweep = settings.sweep(k=(1, 2), concurrency=(1, 2), context=(64, 150))
    result = evaluate_draft("zoo:target", "ngram", sweep, advise=True)
    assert [batches for _, batches in timed] == [[1, 2], [1, 2]]
    assert 64 <= timed[0][0] < 150 <= timed[1][0]
    assert [model.context for model in result.speed_models] == [64, 150]
    for model in result.speed_models:
        assert {(p.concurrency, p.num_speculative_tokens) for p in model.predicted} == {
            (batch, k) for batch in (1, 2) for k in range(1, 9)
        }
        own = {
            (cell.concurrency, cell.num_speculative_tokens): cell.speedup
            for cell in result.cells
            if cell.context == model.context
        }
        assert {(m.concurrency, m.num_speculative_tokens): m.speedup for m in model.measured} == own
    near, far = ([p.speedup for p in model.predicted] for model in result.speed_models)
    assert all(a > b for a, b in zip(near, far, strict=True))
    assert [one.model and one.model.context for one in join([result])] == [64, 150]
    show_evaluation(Console(width=80), result)
    shown = capsys.readouterr().out
    assert all(f"ngram, context {context}: no advice" in " ".join(shown.split()) for context in (64, 150))


def test_contexts_are_numbers_of_tokens() -> None:
    assert parse_contexts("512,1k,16k") == (512, 1024, 16384)
    assert parse_contexts(None) == ()
    for wrong in ("1m", "0", "-1k"):
        with pytest.raises(DraftkitError, match="context is"):
            parse_contexts(wrong)
    assert read_slices("language, tools") == ("language", "tools")
    with pytest.raises(DraftkitError, match="language, thinking, tools, category, length"):
        Settings(slices=read_slices("tongue"))


def test_a_server_is_asked_in_slices_and_contexts(draftkit: Command, tmp_path: Path) -> None:
    rows = [{"id": n, "turns": [TEXTS["de" if n % 2 else "en"]]} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with SpeakingServer("sglang", simulated(3), 3) as server:
        ran = draftkit(
            "eval", "--server", server.url, "--target", "zoo:target", "--prompts", tmp_path / "prompts.jsonl",
            "--context", "128", "--slice", "language", "--max-new-tokens", "12",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        assert "context=128" in ran.out
        assert "language=de" in ran.out
        assert {len(body["input_ids"]) for body in server.bodies} <= set(range(124, 133))
        messages = draftkit("eval", "--server", server.url, "--prompts", tmp_path / "prompts.jsonl", "--context", "9")
        assert "pass --target" in messages.err


def test_batches_that_accept_the_same_stand_once_in_the_table_by_context() -> None:
    cell = counted_cell()
    cells = [replace(cell, context=context, concurrency=batch) for batch in (1, 8) for context in (128, 640)]
    other = replace(cells[-1], num_prompts=23)
    assert list(contexts_table([*cells, other]).columns[1].cells) == ["128", "640", "640"]


def test_each_context_has_the_k_that_is_the_fastest_there() -> None:
    speeds = {(128, 1, 2): 1.2, (128, 1, 4): 1.5, (128, 8, 2): 1.1, (128, 8, 4): 1.3,
              (640, 1, 2): 1.4, (640, 1, 4): 1.3, (640, 8, 2): 0.9, (640, 8, 4): 0.8}  # fmt: skip
    cells = [
        replace(counted_cell(), context=context, concurrency=batch, num_speculative_tokens=k, speedup=speedup)
        for (context, batch, k), speedup in speeds.items()
    ]
    *_, contexts, _, _, _, best = contexts_table(cells).columns
    assert dict(zip(contexts.cells, best.cells, strict=True)) == {"128": "4", "640": "1: 2, 8: 0"}
    untold = contexts_table([replace(cell, speedup=None) for cell in cells])
    assert set(untold.columns[-1].cells) == {"–"}


@pytest.mark.parametrize(("trained", "told"), [(600, True), (1000, False), (None, False)])
def test_text_much_longer_than_a_draft_was_trained_on_is_told(trained: int | None, told: bool) -> None:
    cell = counted_cell()
    prompts = tuple(replace(one, prompt_tokens=1500 - one.tokens) for one in cell.by_prompt or ())
    facts = [] if trained is None else [FactOrigin(name=TRAINED_FACT, value=str(trained), origin="stated", note="")]
    seen = Evidence(cell=replace(cell, by_prompt=prompts), origins={fact.name: fact for fact in facts})
    found = {finding.name: finding.message for finding in findings(seen, "measurement")}
    assert ("beyond-training" in found) == told
    assert not told or "grew to 1,500 tokens, and the draft was trained up to 600" in found["beyond-training"]


@pytest.mark.parametrize("text", ["1", "k", "4kb", "-2k", ""])
def test_a_length_of_samples_is_a_number_of_tokens(text: str) -> None:
    assert length_of_text("32k") == 32768
    with pytest.raises(BadParameter, match="as 4096 or 32k"):
        length_of_text(text)
