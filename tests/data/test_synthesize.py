"""Prompts that the target writes itself: where its template is cut, what is kept, and going on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command
from fixtures.checkpoints import templates
from fixtures.checkpoints.templates import tokenizer
from fixtures.servers.completions_server import Answer, CompletionsServer

from draftkit.data.categories import language_of
from draftkit.data.endpoints import EndpointResponder
from draftkit.data.loss_mask import Renderer
from draftkit.data.responses import NextRow, Refusal, Responded
from draftkit.data.rows import read_rows
from draftkit.data.synthesize import PromptFile, SynthesizeSettings, opening, synthesize
from draftkit.errors import DraftkitError, FormatError, TargetError

TARGET = tokenizer(templates.CHATML)
IM_END = TARGET.tokenizer.convert_tokens_to_ids("<|im_end|>")
SETTINGS = SynthesizeSettings(
    target="zoo:target", served_by="draftkit", dtype=None, system=None, template_options={}, temperature=1.0, top_k=0,
    top_p=1.0, seed=0, languages=("en", "und"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "before"),
    [
        (templates.CHATML, "<|im_start|>user\n"),
        (templates.LLAMA3, "<|begin_of_text|><|start_header|>user<|end_header|>\n\n"),
        (templates.THINKING, "<|im_start|>user\n"),
        (templates.STRICT, "<|im_start|>user\n"),
        (templates.VICUNA, " USER:"),
    ],
)
def test_the_template_is_cut_before_the_user_s_words(template: str, before: str) -> None:
    target = tokenizer(template)
    cut = opening(Renderer(target))
    assert [target.tokenizer.decode(list(tokens)) for tokens in cut.tokens] == [before]
    assert cut.end_ids >= target.end_ids


def test_a_system_message_stands_before_the_cut() -> None:
    cut = opening(Renderer(TARGET, system="Ask about cooking."))
    assert TARGET.tokenizer.decode(list(cut.tokens[0])).startswith("<|im_start|>system\nAsk about cooking.<|im_end|>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template: a base model"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "nothing before a user's message"),
        ("user: {% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes messages"),
        ("{{ raise_exception('only tools') }}", "takes no user message: only tools"),
    ],
)
def test_what_cannot_be_cut_is_refused(template: str | None, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        opening(Renderer(tokenizer(template)))


TEXTS = [
    "How is the weather?",
    "how is   THE weather!",  # the same words
    "Why",
    "Wie ist das Wetter und der Wind heute?",
    "go round and go round and go round and go round and go round and go round",
    "What is <|start_header|> for?",
    "",
]


class Writer:
    """Writes a text of `TEXTS` with a number of its own, by the seed; some are not ended, one is refused."""

    def __init__(self, together: int = 8):
        self.together = together

    def respond(self, ask: NextRow) -> Iterator[Responded]:
        """Of what is asked together the last is answered first."""
        while asked := [prompt for _ in range(self.together) if (prompt := ask()) is not None]:
            for prompt in reversed(asked):
                yield prompt, self.words(prompt.seed)

    def words(self, seed: int) -> tuple[int, ...] | Refusal:
        kind = seed % 9
        if kind == 8:
            return Refusal("busy")
        text = f"What is number {seed % 97} of them?" if kind == 7 else TEXTS[kind]
        ids = TARGET.tokenizer(text, add_special_tokens=False).input_ids
        return (*ids, *([] if ids and seed % 5 == 0 else [IM_END]))


def written(path: Path, count: int, together: int = 8) -> dict[str, int]:
    renderer = Renderer(TARGET)
    file = PromptFile(path, SETTINGS.header(TARGET))
    return synthesize(count, opening(renderer), renderer, Writer(together), file, SETTINGS)


def test_what_is_kept_and_why_the_rest_is_not(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    left_out = written(path, 30)
    assert left_out.keys() == {
        "duplicate", "too short", "in another language", "looping", "with special tokens", "unfinished", "refused"
    }  # fmt: skip
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 31
    prompts = [line["prompt"] for line in lines[1:]]
    assert len(set(prompts)) == 30
    assert sum("weather" in prompt.lower() for prompt in prompts) == 1
    assert {line["category"] for line in lines[1:]} == {"en"}
    rows = list(read_rows(str(path)))
    assert [row.id for row in rows] == [line["id"] for line in lines[1:]]


def test_what_runs_together_and_interruptions_change_nothing(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts.jsonl"
    written(whole, 30)
    for count in (1, 7, 20, 30):
        written(parts, count, together=count + 2)
    assert parts.read_bytes() == whole.read_bytes()
    parts.write_bytes(whole.read_bytes()[:-20])  # a killed run
    written(parts, 30, together=5)
    assert parts.read_bytes() == whole.read_bytes()
    with pytest.raises(DraftkitError, match="target_sha256: None, now 'other'"):
        PromptFile(parts, SETTINGS.header(TARGET, "other"))
    parts.write_text(whole.read_text().replace('"id":"synthetic-', '"id":"mine-', 1))
    with pytest.raises(FormatError, match="was not synthesized"):
        written(parts, 30)


def test_prompts_begin_as_they_are_told_to_by_turns(tmp_path: Path) -> None:
    """What follows keeps its space, words alone are no duplicate, and a file is gone on with by the same beginnings."""

    class Goes(Writer):
        def words(self, seed: int) -> tuple[int, ...]:
            return (*TARGET.tokenizer(f" number {seed % 97}, please", add_special_tokens=False).input_ids, IM_END)

    settings = replace(SETTINGS, begins=("Summarize", "Translate to French:"))
    renderer, path = Renderer(TARGET), tmp_path / "prompts.jsonl"
    cut = opening(renderer, settings.begins)
    for count in (3, 8):
        synthesize(count, cut, renderer, Goes(), PromptFile(path, settings.header(TARGET)), settings)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    for line in lines:
        begin = settings.begins[int(line["id"].rpartition("-")[2]) % 2]
        assert re.fullmatch(rf"{begin} number \d+, please", line["prompt"])
    assert TARGET.tokenizer.decode(list(cut.tokens[1])) == "<|im_start|>user\nTranslate to French:"
    with pytest.raises(DraftkitError, match="begins"):
        PromptFile(path, SETTINGS.header(TARGET))


def test_a_target_that_writes_nothing_usable_is_an_error(tmp_path: Path) -> None:
    class Silent(Writer):
        def words(self, seed: int) -> tuple[int, ...]:
            return (IM_END,)

    renderer = Renderer(TARGET)
    file = PromptFile(tmp_path / "o", SETTINGS.header(TARGET))
    with pytest.raises(DraftkitError, match=r"attempts in a row gave no prompt: .* too short"):
        synthesize(3, opening(renderer), renderer, Silent(), file, SETTINGS)
    assert not (tmp_path / "o").exists()


def test_an_endpoint_writes_prompts_too(tmp_path: Path) -> None:
    def write(body: dict[str, object]) -> Answer:
        words = Writer().words(int(str(body["seed"])))
        if isinstance(words, Refusal):
            return 400, {"error": {"message": words.reason}}
        return 200, {"choices": [{"index": 0, "text": "x", "token_ids": words, "prompt_token_ids": body["prompt"]}]}

    renderer = Renderer(TARGET)
    cut = opening(renderer)
    with CompletionsServer(write) as server:
        responder = EndpointResponder(server.endpoint, SETTINGS.sampling(cut), 3)
        file = PromptFile(tmp_path / "endpoint", SETTINGS.header(TARGET))
        synthesize(12, cut, renderer, responder, file, SETTINGS)
    assert set(server.requests[0]["stop_token_ids"]) == set(cut.end_ids)  # type: ignore[call-overload]
    written(tmp_path / "engine", 12)
    assert (tmp_path / "endpoint").read_bytes() == (tmp_path / "engine").read_bytes()


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Write a function that sorts the words of a text.", "en"),
        ("Schreibe eine Funktion, die das für mich und dich sortiert.", "de"),
        ("Quelle est la capitale de la France ?", "fr"),
        ("¿Cuál es la capital de los Estados Unidos y por qué?", "es"),
        ("写一个排序函数", "zh"),
        ("並べ替え関数を書いてください", "ja"),
        ("Напиши функцию", "ru"),
        ("x = 3", "und"),
        ("", "und"),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert language_of(text) == language


@pytest.mark.long
def test_the_zoo_s_target_asks_what_it_was_trained_to_be_asked(draftkit: Command, tmp_path: Path) -> None:
    """The command, resumed, gives what it gives at once, and its prompts can be answered and prepared."""
    flags = ("--target", "zoo:target", "--max-new-tokens", 40, "--concurrency", 2)
    ran = draftkit("data", "synthesize", *flags, "--count", 5, "--out", tmp_path / "a.jsonl")
    assert (ran.code, ran.err.splitlines()[-1]) == (
        0, f"next: draftkit data regenerate {tmp_path / 'a.jsonl'} ANSWERS --target zoo:target"
    )  # fmt: skip
    for count in (2, 5):
        assert draftkit("data", "synthesize", *flags, "--count", count, "--out", tmp_path / "b.jsonl").code == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "a.jsonl").read_text().splitlines()[1:]]
    about_code = ("function", "method", "class", "code", "docstring", "Python")
    assert sum(any(word in prompt for word in about_code) for prompt in prompts) >= 4, prompts
    answers = ("data", "regenerate", tmp_path / "a.jsonl", tmp_path / "answers.jsonl", "--target", "zoo:target")
    assert draftkit(*answers, "--dry-run").out.startswith("to answer: 5 turns of 5 rows, 0 of them done; ")
    refused = draftkit("data", "synthesize", *flags, "--count", 6, "--out", tmp_path / "c", "--language", "klingon")
    assert refused.code == 2
    assert "language is 'klingon'" in refused.err
