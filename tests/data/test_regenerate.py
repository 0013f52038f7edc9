"""Regeneration: the served token ids are kept, every turn is the target's, and a killed run goes on."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import templates
from fixtures.checkpoints.templates import tokenizer
from fixtures.examples import examples
from fixtures.servers.completions_server import Answer, CompletionsServer
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import logging

from draftkit import zoo
from draftkit.data import endpoints
from draftkit.data.endpoints import EndpointResponder
from draftkit.data.loss_mask import Renderer
from draftkit.data.prepare import prepare, samples_of
from draftkit.data.regenerate import plan, regenerate, row_seed
from draftkit.data.responses import (
    EngineResponder,
    NextRow,
    Refusal,
    Responded,
    Responder,
    ResponseFile,
    RowPrompt,
    Sampling,
)
from draftkit.data.rows import Conversation, Row, Served, read_rows
from draftkit.data.sample_files import read_samples
from draftkit.data.samples import Reason, RowCounts
from draftkit.data.tokenizer import load_tokenizer
from draftkit.engines.vllm.client import SERVER_DEFAULTS
from draftkit.errors import DraftkitError, FormatError, SourceError
from draftkit.loading import load_model
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.engine import Engine
from draftkit.targets.rope import UNLIMITED, Positions
from draftkit.targets.target import Target

TARGET = tokenizer(templates.CHATML)
END = TARGET.tokenizer.convert_tokens_to_ids("<|im_end|>")
SETTINGS = {"tokenizer_sha256": TARGET.sha256, "temperature": 0.0}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def row(id: str, *messages: dict[str, str]) -> Row:
    return Row(id, "all", f"test, {id}", Conversation(messages))


ROWS = [
    row("one", user("q")),
    row("three", user("q"), assistant("old"), user("r"), assistant("older"), user("s")),
    row("two", {"role": "system", "content": "s"}, user("long" * 5), assistant("old"), user("r"), assistant("old")),
    row("four", user("x")),
    row("five", user("y"), assistant("old")),
]


def response(prompt: Sequence[int], seed: int) -> tuple[int, ...]:
    """An answer that depends on prompt and seed, in the tokens that its text has, and the end of turn."""
    text = f"answer {seed % 97} to {len(prompt)}"
    return (*TARGET.tokenizer(text, add_special_tokens=False).input_ids, END)


class Echo:
    """Answers with `response`, of `together` prompts any one first; can be interrupted at the n-th prompt."""

    def __init__(self, fail_at: int | None = None, together: int = 2, order: int = 0):
        self.asked: list[RowPrompt] = []
        self.fail_at = fail_at
        self.together = together
        self.random = random.Random(order)

    def respond(self, ask: NextRow) -> Iterator[Responded]:
        waiting: list[RowPrompt] = []
        while True:
            while len(waiting) < self.together and (prompt := ask()) is not None:
                waiting.append(prompt)
                self.asked.append(prompt)
                if len(self.asked) == self.fail_at:
                    raise KeyboardInterrupt
            if not waiting:
                return
            prompt = waiting.pop(self.random.randrange(len(waiting)))
            yield prompt, self.answer(prompt)

    def answer(self, prompt: RowPrompt) -> tuple[int, ...] | Refusal:
        return response(prompt.tokens, prompt.seed)


def answer(path: Path, responder: Echo, rows: list[Row] = ROWS, **changes: object) -> RowCounts:
    return regenerate(rows, Renderer(TARGET), responder, ResponseFile(path, SETTINGS | changes))


def answers(responder: Responder, prompts: Sequence[RowPrompt]) -> list[tuple[int, ...] | Refusal]:
    """The answers in the order of the prompts, which have different ids."""
    left = iter(prompts)
    found = {prompt.id: answer for prompt, answer in responder.respond(lambda: next(left, None))}
    assert len(found) == len(prompts)
    return [found[prompt.id] for prompt in prompts]


def lines(path: Path) -> list[bytes]:
    """The lines of a file, the first as it is, the rows in the order of their ids."""
    first, *rows = path.read_bytes().splitlines(keepends=True)
    return [first, *sorted(rows)]


def test_every_assistant_turn_is_the_targets(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    report = answer(path, Echo())
    assert (report.rows, report.tallies) == (5, {})
    rows = {row.id: row for row in read_rows(str(path))}
    assert rows.keys() == {row.id for row in ROWS}
    found = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    three = next(line for line in found if line["id"] == "three")
    roles = [message["role"] for message in three["messages"]]
    assert roles == ["user", "assistant"] * 3
    assert not any("old" in message["content"] for message in three["messages"])
    (sequence,) = three["sequences"]
    spans = sequence["supervised"]
    assert len(spans) == 3
    renderer = Renderer(TARGET)
    for turn, (begin, end) in enumerate(spans):
        prompt = renderer.prompt(three["messages"][: 2 * turn + 1])
        assert sequence["tokens"][:begin] == prompt
        assert tuple(sequence["tokens"][begin:end]) == response(prompt, row_seed(0, "three", turn))


def test_tokens_that_the_next_prompt_spells_otherwise_make_samples_of_their_own(tmp_path: Path) -> None:
    """What was drawn need not be how the tokenizer writes its text; the target reads both, each in its turn."""
    letters = tuple(TARGET.tokenizer.convert_tokens_to_ids(list("the")))
    assert tuple(TARGET.tokenizer("the", add_special_tokens=False).input_ids) != letters

    class Spelling(Echo):
        def answer(self, prompt: RowPrompt) -> tuple[int, ...]:
            return (*letters, END)

    path = tmp_path / "responses.jsonl"
    answer(path, Spelling(), [ROWS[1]])
    report = RowCounts()
    samples = list(samples_of(read_rows(str(path)), Renderer(TARGET), report))
    assert [sample.id for sample in samples] == ["three", "three#2", "three#3"]
    assert all(tuple(d.tokens[slice(*d.spans[0])].tolist()) == (*letters, END) for d in samples)
    assert report.tallies[Reason.REWRITTEN].examples == ["three"]


def test_served_ids_pass_through_to_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    answer(path, Echo())
    report = RowCounts()
    samples = list(samples_of(read_rows(str(path)), Renderer(TARGET), report))
    served = [row.content for row in read_rows(str(path))]
    expected = [sequence for content in served if isinstance(content, Served) for sequence in content.sequences]
    assert [(d.tokens.tolist(), d.spans) for d in samples] == expected
    assert (report.rows, report.tallies) == (5, {})


@examples(40)
@given(fail_at=st.integers(1, 7), together=st.integers(1, 6), order=st.integers(0, 99))
def test_an_interrupted_run_goes_on_by_the_ids_of_rows(fail_at: int, together: int, order: int, tmp_path: Path) -> None:
    """Whatever was answered first: each row is there once, with the answer that it has anyway."""
    whole, path = tmp_path / "whole.jsonl", tmp_path / "interrupted.jsonl"
    path.unlink(missing_ok=True)
    if not whole.exists():
        answer(whole, Echo())
    with pytest.raises(KeyboardInterrupt):
        answer(path, Echo(fail_at, together, order))
    done = len(lines(path)) - 1 if path.exists() else 0
    rest = Echo(None, together, order + 1)
    assert answer(path, rest, ROWS[::-1]).rows == 5 - done
    assert lines(path) == lines(whole)
    assert len({(prompt.id, prompt.seed) for prompt in rest.asked}) == len(rest.asked)
    assert answer(path, Echo()).rows == 0


def test_a_row_goes_on_at_once_and_no_slot_is_empty(tmp_path: Path) -> None:
    """A turn does not wait for those of other rows, nor a row for the end of others."""
    rows = [row(str(n), user("q"), assistant("a"), user("r"), assistant("b"), user("s")) for n in range(6)]

    class Counting(Echo):
        answered: list[tuple[str, int]]  # of whom an answer came, and how many prompts had been asked then

        def respond(self, ask: NextRow) -> Iterator[Responded]:
            self.answered = []
            for prompt, answer in super().respond(ask):
                self.answered.append((prompt.id, len(self.asked)))
                yield prompt, answer

    responder = Counting(together=3)
    answer(tmp_path / "o", responder, rows)
    ids = [prompt.id for prompt in responder.asked]
    assert [prompt.goes_on for prompt in responder.asked] == [id in ids[:n] for n, id in enumerate(ids)]
    for number, (id, asked) in enumerate(responder.answered):
        if id in ids[asked:]:
            assert ids[asked] == id
        if len(set(ids[:asked])) < 6:  # else the last rows are under way
            assert asked - number == 3


def test_the_same_row_twice_is_answered_once(tmp_path: Path) -> None:
    responder = Echo(together=4)
    answer(tmp_path / "o", responder, [ROWS[0], ROWS[0], ROWS[3]])
    assert [prompt.id for prompt in responder.asked] == ["one", "four"]
    with pytest.raises(DraftkitError, match="another row one"):
        answer(tmp_path / "p", Echo(together=4), [ROWS[0], row("one", user("other"))])


@examples(40)
@given(cut=st.integers(0, 10_000))
def test_a_half_written_line_is_repaired(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.unlink(missing_ok=True)
    answer(path, Echo())
    whole, before = path.read_bytes(), lines(path)
    path.write_bytes(whole[: cut % len(whole)])
    answer(path, Echo())
    assert lines(path) == before


def test_a_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftkit.data.journals.JournalFile.every", 0.0)
    path, written = tmp_path / "responses.jsonl", os.write

    def full(descriptor: int, data: memoryview) -> int:
        if path.stat().st_size > 900:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(descriptor, data[:100])

    monkeypatch.setattr("draftkit.data.journals.os.write", full)
    with pytest.raises(DraftkitError, match="No space left"):
        answer(path, Echo())
    assert 1 < len(lines(path)) < 6
    assert path.read_bytes().endswith(b"\n")
    monkeypatch.undo()
    answer(path, Echo())
    answer(tmp_path / "whole.jsonl", Echo())
    assert lines(path) == lines(tmp_path / "whole.jsonl")


def test_other_settings_files_and_damage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    answer(path, Echo())
    before = path.read_bytes()
    with pytest.raises(DraftkitError, match=r"temperature: 0\.0, now 0\.7"):
        answer(path, Echo(), temperature=0.7)
    parts = before.splitlines(keepends=True)
    path.write_bytes(b"".join([*parts[:2], b'{"id": "x", \n', *parts[2:]]))
    with pytest.raises(FormatError, match=r"responses\.jsonl, line 3"):
        answer(path, Echo())
    for foreign in ('{"text": "x"}\n', "words without a line end"):
        path.write_text(foreign)
        with pytest.raises(DraftkitError, match="no file of responses"):
            answer(path, Echo())
        assert path.read_text() == foreign


def test_a_file_goes_on_where_source_and_target_were_moved(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    answer(path, Echo(), ROWS[:2], source="/a/prompts.jsonl", target="/a/target")
    answer(path, Echo(), ROWS, source="/b/c/prompts.jsonl", target="/b/c/target")
    assert {json.loads(line).get("id") for line in path.read_text().splitlines()[1:]} == {row.id for row in ROWS}
    with pytest.raises(DraftkitError, match="target: '/a/target', now '/b/other'"):
        answer(path, Echo(), source="/b/c/prompts.jsonl", target="/b/other")


def test_an_answer_stays_that_to_its_own_row(tmp_path: Path) -> None:
    """What has changed under the same id is refused, in a file that says which rows it is of."""
    path = tmp_path / "responses.jsonl"
    answer(path, Echo(), ROWS[:3])
    before = path.read_bytes()
    changed = [ROWS[0], row("three", user("another question")), *ROWS[2:]]
    with pytest.raises(DraftkitError, match="the answer to another row three") as caught:
        answer(path, Echo(), changed)
    assert "where: test, three" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_other_weights_under_the_same_name_are_refused(draftkit: Command, tmp_path: Path) -> None:
    target, rows, out = tmp_path / "target", tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    shutil.copytree(zoo.path("target"), target)
    rows.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    command = ("data", "regenerate", rows, out, "--target", target, "--max-new-tokens", 2, "--limit")
    assert draftkit(*command, 1).code == 0
    before = out.read_bytes()
    weights = next(target.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    for more in ((), ("--dry-run",)):
        refused = draftkit(*command, 2, *more)
        assert (refused.code, "other settings:\n    target_sha256: '" in refused.err) == (1, True), refused.err
    assert out.read_bytes() == before
    shutil.copytree(zoo.path("target"), target, dirs_exist_ok=True)
    assert draftkit(*command, 2).code == 0


def test_rows_that_are_not_answered_are_counted_and_not_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    strict = Renderer(tokenizer(templates.STRICT))

    class Short(Echo):
        def answer(self, prompt: RowPrompt) -> tuple[int, ...] | Refusal:
            others = {"refused": Refusal("too long"), "endless": (100, 101)}
            return others.get(prompt.id, super().answer(prompt))

    rows = [
        row("good", user("q"), assistant("a"), user("r")),
        row("rejected", {"role": "system", "content": "s"}, user("q")),
        row("refused", user("q")),
        row("endless", user("q"), assistant("a"), user("r")),
        row("nothing", assistant("a")),
        row("tool", user("q"), assistant("call"), {"role": "tool", "content": "4"}, assistant("a"), user("r")),
    ]
    report = regenerate(rows, strict, Short(), ResponseFile(path, SETTINGS))
    assert {reason: tally.examples for reason, tally in report.tallies.items()} == {
        Reason.REJECTED: ["rejected: roles must alternate"],
        Reason.REFUSED: ["refused: too long"],
        Reason.NO_END: ["endless"],
        Reason.NO_SPAN: ["nothing: there is no user message to answer"],
    }
    stored = {line["id"]: line for line in map(json.loads, path.read_text().splitlines()[1:])}
    assert [len(stored[id]["messages"]) for id in ("good", "endless", "tool")] == [4, 2, 2]
    assert regenerate(rows, strict, Short(), ResponseFile(path, SETTINGS)).rows == 0
    report = RowCounts()
    samples = list(samples_of(read_rows(str(path)), strict, report))
    assert {sample.id for sample in samples} == {"good", "endless", "tool"}
    assert report.tallies.keys() == {Reason.REFUSED, Reason.NO_END}


def test_nothing_is_begun_where_no_row_is_answered(tmp_path: Path) -> None:
    rows = [row("a", {"role": "system", "content": "s"}, user("q"))]
    with pytest.raises(DraftkitError, match="roles must alternate"):
        regenerate(rows, Renderer(tokenizer(templates.STRICT)), Echo(), ResponseFile(tmp_path / "o", SETTINGS))
    assert not (tmp_path / "o").exists()
    served = Row("a", "all", "file, line 2", Served((), "x"))
    with pytest.raises(DraftkitError, match="responses already"):
        regenerate([served], Renderer(TARGET), Echo(), ResponseFile(tmp_path / "o", SETTINGS))


def test_responses_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    answer(path, Echo(), tokenizer_sha256="other")
    with pytest.raises(FormatError, match="another tokenizer") as caught:
        prepare(read_rows(str(path)), Renderer(TARGET), tmp_path / "data.jsonl")
    assert "responses.jsonl, line 2" in str(caught.value)
    assert not (tmp_path / "data.jsonl").exists()


def test_the_cost_is_known_before() -> None:
    cost = plan(ROWS, {"three"}, 10)
    assert (cost.rows, cost.done, cost.turns, cost.max_new_tokens) == (5, 1, 5, 50)


# The two responders.

SAMPLING = Sampling(SamplingParameters(0.8), 12, frozenset({4092}))


@pytest.mark.slow
def test_the_engine_serves_the_targets_own_tokens(tmp_path: Path) -> None:
    """As plain decoding with the row's seed, batch by batch, and the same when it was interrupted."""
    target = load_tokenizer("zoo:target")
    model, _ = load_model("zoo:target", device="cpu", dtype=torch.float32)
    rows, renderer = list(read_rows(str(zoo.prompts_path()), limit=5)), Renderer(target)
    responder = EngineResponder(model, SAMPLING, concurrency=3)
    whole, path = (ResponseFile(tmp_path / name, {"tokenizer_sha256": target.sha256}) for name in ("whole", "resumed"))
    regenerate(rows, renderer, responder, whole, seed=7)
    regenerate(rows[:3], renderer, responder, path, seed=7)
    regenerate(rows, renderer, responder, path, seed=7)
    assert lines(path.path) == lines(whole.path)
    engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=1)
    found = {line["id"]: line for line in map(json.loads, whole.path.read_text().splitlines()[1:])}
    for source in rows:
        (sequence,) = found[source.id]["sequences"]
        ((begin, end),) = sequence["supervised"]
        assert isinstance(source.content, Conversation)
        assert sequence["tokens"][:begin] == renderer.prompt(source.content.messages)
        drawn = replace(SAMPLING.parameters, seed=row_seed(7, source.id, 0))
        (plain,) = engine.generate([Request("x", tuple(sequence["tokens"][:begin]), 12, drawn)])
        assert sequence["tokens"][begin:end] == plain.tokens


def test_the_engine_refuses_prompts_beyond_the_context() -> None:
    model, _ = load_model("zoo:target", device="cpu", dtype=torch.float32)
    responder = EngineResponder(model, SAMPLING, concurrency=2)
    responder.engine.target.positions = Positions(most=8, turn=UNLIMITED)
    first, second = answers(responder, [RowPrompt("long", (5,) * 8, 0), RowPrompt("short", (5,) * 6, 0)])
    assert first == Refusal("8 prompt tokens: its tokens fill the target's context of 8")
    assert isinstance(second, tuple)
    assert len(second) <= 2
    assert isinstance(answers(responder, [RowPrompt("long", (5,) * 8, 0)])[0], Refusal)


def echo(body: dict[str, object]) -> Answer:
    """As `Echo` answers."""
    prompt, seed = body["prompt"], body["seed"]
    assert isinstance(prompt, list)
    assert isinstance(seed, int)
    choice = {"index": 0, "text": "x", "token_ids": response(prompt, seed), "prompt_token_ids": prompt}
    return 200, {"choices": [choice]}


@pytest.fixture(autouse=True)
def quick_and_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PAUSES", (0.0, 0.0))
    logging.disable_progress_bar()  # as the commands do where they are the first to import transformers


ENDPOINT = Sampling(SamplingParameters(0.7, 20, 0.9), 12, frozenset({END}))


def test_an_endpoint_serves_as_the_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    answer(tmp_path / "engine", Echo())
    with CompletionsServer(echo) as server:
        responder = EndpointResponder(server.endpoint, ENDPOINT, 3)
        regenerate(ROWS, Renderer(TARGET), responder, ResponseFile(tmp_path / "endpoint", SETTINGS))
    assert lines(tmp_path / "endpoint") == lines(tmp_path / "engine")
    sent = server.requests[0]
    assert {key: sent[key] for key in sent.keys() - {"prompt", "seed"}} == {
        "model": "target", "max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [END],
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    assert sent.keys() >= set(SERVER_DEFAULTS)
    assert server.authorizations == {"Bearer secret"}


def test_an_endpoint_that_fails_for_a_while_is_asked_again() -> None:
    failures = iter([503, 429])

    def flaky(body: dict[str, object]) -> Answer:
        return (status, {}) if (status := next(failures, None)) else echo(body)

    with CompletionsServer(flaky) as server:
        (answered,) = answers(EndpointResponder(server.endpoint, ENDPOINT, 1), [RowPrompt("a", (1, 2), 3)])
    assert answered == response((1, 2), 3)
    assert len(server.requests) == 3


def test_a_prompt_that_the_endpoint_rejects_is_refused() -> None:
    def strict(body: dict[str, object]) -> Answer:
        return (400, {"error": {"message": "context is full"}}) if len(body["prompt"]) > 2 else echo(body)  # type: ignore[arg-type]

    with CompletionsServer(strict) as server:
        responder = EndpointResponder(server.endpoint, ENDPOINT, 2)
        found = answers(responder, [RowPrompt("a", (1,) * 3, 0), RowPrompt("b", (1,), 0)])
    assert found == [Refusal("400 Bad Request: context is full"), response((1,), 0)]


BAD_ENDPOINTS = {
    "no ids": ({"choices": [{"text": "x"}]}, 200, "without its token ids"),
    "no choices": ({}, 200, "without its token ids"),
    "other prompt": ({"choices": [{"token_ids": [5], "prompt_token_ids": [0, 1]}]}, 200, "has read 2 prompt tokens"),
    "forbidden": ({"error": "no key"}, 401, "401 Unauthorized"),
    "unknown model": ({"message": "no such model"}, 404, "no such model"),
    "always busy": ({}, 503, "503 Service Unavailable"),
}


@pytest.mark.parametrize("case", BAD_ENDPOINTS)
def test_endpoints_that_cannot_be_used_are_named(case: str) -> None:
    body, status, message = BAD_ENDPOINTS[case]
    with CompletionsServer(lambda _: (status, body)) as server:  # type: ignore[arg-type, return-value]
        responder = EndpointResponder(server.endpoint, ENDPOINT, 2)
        with pytest.raises(SourceError, match=message) as caught:
            answers(responder, [RowPrompt(id, (1,), 0) for id in "abc"])
    assert server.endpoint in str(caught.value)


def test_an_endpoint_must_be_there_and_say_its_model() -> None:
    with pytest.raises(SourceError, match="http://HOST:PORT/v1"):
        EndpointResponder("file:///etc/passwd", ENDPOINT, 1)
    with CompletionsServer(echo, models=("a", "b")) as server, pytest.raises(SourceError, match="serves a, b"):
        EndpointResponder(server.endpoint, ENDPOINT, 1)
    with pytest.raises(SourceError, match="does not answer"):
        EndpointResponder(server.endpoint, ENDPOINT, 1)


@pytest.mark.slow
def test_regenerate_from_the_command_line(draftkit: Command, tmp_path: Path) -> None:
    prompts, out, data = (tmp_path / name for name in ("prompts.jsonl", "responses.jsonl", "data.jsonl"))
    prompts.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(3)))
    common = ("--target", "zoo:target", "--max-new-tokens", 8, "--temperature", 0.7, "--json")
    dry = json.loads(draftkit("data", "regenerate", prompts, out, *common, "--dry-run").out)
    assert (dry["turns"], dry["max_new_tokens"], out.exists()) == (3, 24, False)
    first = draftkit("data", "regenerate", prompts, out, *common, "--limit", 2)
    second = draftkit("data", "regenerate", prompts, out, *common)
    assert (first.code, first.err, second.err) == (0, "", "")
    assert [json.loads(ran.out)["rows"] for ran in (first, second)] == [2, 1]
    assert json.loads(second.out)["resumed"] == 2
    refused = draftkit("data", "regenerate", prompts, out, *common, "--seed", 1)
    assert (refused.code, "seed: 0, now 1" in refused.err) == (1, True)
    assert draftkit("data", "prepare", out, data, "--target", "zoo:target").code == 0
    assert len(list(read_samples(data))) == 3


def test_regenerate_through_an_endpoint_from_the_command_line(draftkit: Command, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "q"}\n')
    with CompletionsServer(lambda body: echo(body | {"seed": 0})) as server:
        ran = draftkit(
            "data", "regenerate", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", "--target", "zoo:target",
            "--endpoint", server.endpoint,
        )  # fmt: skip
    assert ran.code == 0
    assert ran.out.startswith(f"written: {tmp_path / 'out.jsonl'}: 1 rows → 1 samples")
    assert ran.err.startswith("next: draftkit data prepare")
