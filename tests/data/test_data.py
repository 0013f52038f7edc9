"""Training data: what the mask marks, which rows are lost and why, and what the preflight finds."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico, templates
from fixtures.checkpoints.targets import save_target
from fixtures.checkpoints.templates import tokenizer
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM

from draftkit import zoo
from draftkit.checks import training_models
from draftkit.checks.evidence import Data, Evidence
from draftkit.checks.registry import checks_of, run_checks
from draftkit.checks.training_data import check_data, survey
from draftkit.data.decontamination import NearPrompts
from draftkit.data.loss_mask import Renderer, Turn, merged
from draftkit.data.prepare import prepare, samples_of
from draftkit.data.rows import Conversation, Row, parse_row, read_rows
from draftkit.data.sample_files import read_origin, read_samples, write_samples
from draftkit.data.samples import Reason, RowCounts, Sample, SamplesOrigin
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError, FormatError, SourceError, TargetError
from draftkit.evaluate.prompts import Prompt, encode_messages, encode_prompt
from draftkit.layout.folder import read_draft
from draftkit.loading import open_target
from draftkit.targets import chat

Message = dict[str, str]

# Template, what closes a turn, what the target writes before its text, whether there may be a system message.
SHAPES = {
    "chatml": (templates.CHATML, "<|im_end|>", "", True),
    "llama3": (templates.LLAMA3, "<|eot|>", "", True),
    "generation": (templates.GENERATION, "<|im_end|>", "", True),
    "thinking": (templates.THINKING, "<|im_end|>", "", True),
    "vicuna": (templates.VICUNA, "<|eot|>", " ", True),
    "strict": (templates.STRICT, "<|im_end|>", "", False),
}
TEXTS = st.text(st.sampled_from("abc é\n漢<|>_:."), min_size=1, max_size=10).map(lambda text: f"a{text}z")
EXCHANGES = st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=3)


def conversation(exchanges: list[tuple[str, str, bool]], system: str | None = None) -> list[Message]:
    """Questions and answers in turn; an answer may begin with a thought."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer, thinks in exchanges:
        thought = "<think>hm</think>" if thinks else ""
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": thought + answer}]
    return messages


def row(messages: list[Message], id: str = "r") -> Row:
    return Row(id, "all", "test", Conversation(tuple(messages)))


def run(rows: list[Row], renderer: Renderer, max_length: int | None = None) -> tuple[list[Sample], RowCounts]:
    report = RowCounts()
    return list(samples_of(rows, renderer, report, max_length)), report


@pytest.mark.parametrize("shape", SHAPES)
@examples(25)
@given(exchanges=EXCHANGES, system=st.none() | TEXTS)
def test_the_mask_marks_what_the_target_writes(
    shape: str, exchanges: list[tuple[str, str, bool]], system: str | None
) -> None:
    template, end, before, has_system = SHAPES[shape]
    renderer = Renderer(tokenizer(template))
    messages = conversation(exchanges, system if has_system else None)
    samples, _ = run([row(messages)], renderer)
    written, prompts = [], []
    for sample in samples:
        for begin, stop in sample.spans:
            written.append(renderer.target.tokenizer.decode(sample.tokens[begin:stop]))
            prompts.append(sample.tokens[:begin].tolist())
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert written == [before + messages[index]["content"] + end for index in answers]
    assert prompts == [renderer.prompt(messages[:index]) for index in answers]  # what serving shows the target
    if shape != "thinking":
        assert len(samples) == 1
        assert samples[0].loss_mask[-1]  # nothing follows the last end of turn


def test_each_thought_is_trained_where_the_target_reads_it() -> None:
    """Qwen3 drops the thoughts of earlier turns, so that each turn needs a sample of its own."""
    messages = conversation([("q", "a", True), ("r", "b", True), ("s", "c", False)])
    samples, report = run([row(messages)], Renderer(tokenizer(templates.THINKING)))
    assert [sample.id for sample in samples] == ["r", "r#2", "r#3"]
    assert [len(sample.spans) for sample in samples] == [1, 1, 1]
    assert report.tallies[Reason.REWRITTEN].examples == ["r"]
    plain, report = run(
        [row(conversation([("q", "a", False), ("r", "b", False)]))], Renderer(tokenizer(templates.THINKING))
    )
    assert [len(sample.spans) for sample in plain] == [2]
    assert not report.tallies


def test_template_options_and_the_system_prompt_reach_the_template() -> None:
    messages = [{"role": "user", "content": "q"}]
    renderer = Renderer(tokenizer(templates.THINKING), {"enable_thinking": False}, "be brief")
    assert renderer.target.tokenizer.decode(renderer.prompt(messages)) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    own = [{"role": "system", "content": "be long"}, *messages]
    assert renderer.prompt(own) == Renderer(renderer.target, {"enable_thinking": False}).prompt(own)


LONG = conversation([("q", "a" * 40, False)])
LOSSES = {
    "rejected": (
        templates.STRICT,
        [{"role": "system", "content": "s"}, *LONG],
        Reason.REJECTED,
        "roles must alternate",
    ),
    "type error": (
        templates.CHATML.replace("{{ m.content }}", "{{ 'x' + m.content }}"),
        [{"role": "user", "content": [{"type": "text", "text": "q"}]}, *LONG[1:]],
        Reason.REJECTED,
        "can only concatenate str",
    ),
    "rewritten": (templates.FORGETFUL, LONG, Reason.REWRITTEN, ""),
    "no assistant": (templates.CHATML, LONG[:1], Reason.NO_SPAN, ""),
    "empty": (templates.CHATML, [], Reason.NO_SPAN, ""),
    "empty tags": (templates.GENERATION.replace("{{ m.content }}{% endg", "{% endg"), LONG, Reason.NO_SPAN, ""),
    "too short": (templates.CHATML, LONG, Reason.TOO_SHORT, ""),
}


@pytest.mark.parametrize("case", LOSSES)
def test_rows_that_cannot_be_used_are_counted(case: str) -> None:
    template, messages, reason, detail = LOSSES[case]
    limit = 11 if case == "too short" else None
    good = Row("good", "all", "test", "plain text")
    samples, report = run([row(messages, "bad"), good], Renderer(tokenizer(template)), limit)  # type: ignore[arg-type]
    assert [sample.id for sample in samples] == ["good"]
    assert reason in report.tallies
    assert report.tallies[reason].examples[0].startswith(f"bad: {detail}" if detail else "bad")
    assert (report.rows, report.samples) == (2, 1)


def test_prompts_that_no_turn_repeats_and_turns_without_end_are_kept_and_counted() -> None:
    samples, report = run([row(LONG)], Renderer(tokenizer(templates.UNPROMPTED)))
    assert report.tallies.keys() == {Reason.UNPROMPTED}
    (span,) = samples[0].spans
    assert tokenizer(None).tokenizer.decode(samples[0].tokens[slice(*span)]) == "a" * 40 + "<|im_end|>"
    _, report = run([row(conversation([("q", "a", True)]))], Renderer(tokenizer(templates.UNPROMPTED)))
    assert report.tallies.keys() == {Reason.UNPROMPTED, Reason.ALTERED}  # its thought is gone
    _, report = run([row(LONG)], Renderer(tokenizer(templates.CHATML.replace("<|im_end|>", "\n"))))
    assert report.tallies.keys() == {Reason.NO_END}


def test_truncation_cuts_the_end_and_is_counted() -> None:
    renderer = Renderer(tokenizer(templates.CHATML))
    ((whole,), _), ((cut,), report) = run([row(LONG)], renderer), run([row(LONG)], renderer, 15)
    assert cut.tokens.tolist() == whole.tokens[:15].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[:15].tolist()
    assert report.tallies[Reason.TRUNCATED].count == 1


def test_answers_that_repeat_themselves_are_left_out_where_that_is_asked() -> None:
    rows = [row(conversation([("q", "round and " * 40, False)])), row(conversation([("q", "once", False)]))]
    renderer = Renderer(tokenizer(templates.CHATML))
    (_, spoken_once), report = run(rows, renderer)
    assert Reason.LOOPS not in report.tallies
    report = RowCounts()
    (kept,) = samples_of(rows, renderer, report, drop_loops=True)
    assert kept.tokens.tolist() == spoken_once.tokens.tolist()
    assert (report.samples, report.tallies[Reason.LOOPS].count) == (1, 1)


def test_rows_near_an_excluded_prompt_are_left_out() -> None:
    """Whether a user or the assistant says it; case and punctuation do not matter, nor a word in ten."""
    asked = "Name the three largest moons of the planet that has the widest rings around it, please."
    near = asked.upper().replace("WIDEST", "broadest").replace(",", " -")
    said = [("q", f"Sure: {near}", False)], [(near, "Titan", False)], [("Name the three largest moons.", "Io", False)]
    rows = [row(conversation(turns)) for turns in said] + [Row("t", "all", "test", f"He asked: {near}")]
    report = RowCounts()
    without = NearPrompts([("set 7", asked), ("set 8", "?!")])
    (kept,) = samples_of(rows, Renderer(tokenizer(templates.CHATML)), report, without=without)
    assert report.tallies[Reason.NEAR].count == 3
    assert report.tallies[Reason.NEAR].examples[0].endswith(": set 7")
    assert "Io" in tokenizer(templates.CHATML).tokenizer.decode(kept.tokens.tolist())


@given(st.lists(st.sampled_from("abcd"), max_size=9), st.lists(st.sampled_from("abcd"), max_size=6))
def test_what_is_near_is_told_by_shares_of_runs(text: list[str], prompt: list[str]) -> None:
    def runs(words: list[str]) -> set[str]:
        return {" ".join(words[at : at + 3]) for at in range(max(len(words) - 2, 1))} if words else set()

    wanted, found = runs(prompt), NearPrompts([("p", " ".join(prompt))]).found_in(" ".join(text))
    assert (found == "p") == (2 * len(wanted & runs(text)) > len(wanted))


def test_plain_text_is_supervised_but_for_its_first_token() -> None:
    renderer = Renderer(tokenizer(None))
    ((sample,), _) = run([Row("t", "all", "test", "some words here")], renderer)
    assert sample.spans == [(1, len(sample))]
    assert sample.tokens.tolist() == renderer.encode("some words here")
    with pytest.raises(TargetError, match="no chat template"):
        run([row(LONG)], renderer)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=5))
def test_merging_keeps_every_turn(tokens: list[list[int]]) -> None:
    turns = [Turn(part, [(i, i + 1)]) for i, part in enumerate(tokens)]
    sequences = merged(turns)
    assert [span for sequence in sequences for span in sequence.spans] == [
        span for turn in turns for span in turn.spans
    ]
    assert len(sequences) <= len(turns)
    assert all(any(s.tokens[: len(turn.tokens)] == turn.tokens for s in sequences) for turn in turns)


# Samples on disk.

ORIGIN = SamplesOrigin("zoo:target", tokenizer(templates.CHATML).sha256, None, 64)


@given(st.lists(st.tuples(st.text(max_size=3), st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans())))))
@examples(30)
def test_samples_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[str, list[tuple[int, bool]]]]
) -> None:
    path = tmp_path_factory.mktemp("samples") / "data.jsonl"
    samples = [
        Sample(id, np.array([t for t, _ in pairs], np.int32), np.array([s for _, s in pairs], np.bool_), "code")
        for id, pairs in contents
    ]
    assert write_samples(path, iter(samples), ORIGIN) == len(samples)
    assert read_origin(path) == ORIGIN
    for read, written in zip(read_samples(path), samples, strict=True):
        assert (read.id, read.category) == (written.id, written.category)
        assert (read.tokens.dtype, read.loss_mask.dtype) == (np.int32, np.bool_)
        assert read.tokens.tolist() == written.tokens.tolist()
        assert read.loss_mask.tolist() == written.loss_mask.tolist()


DAMAGE = {
    "cut": b'{"id": "b", "category": "all", "tok',
    "no mask": b'{"id": "b", "category": "all", "tokens": [1]}',
    "span outside": b'{"id": "b", "category": "all", "tokens": [1], "supervised": [[0, 2]]}',
    "spans descend": b'{"id": "b", "category": "all", "tokens": [1, 2, 3], "supervised": [[2, 3], [0, 1]]}',
    "odd span": b'{"id": "b", "category": "all", "tokens": [1], "supervised": [[0]]}',
    "negative": b'{"id": "b", "category": "all", "tokens": [-1], "supervised": []}',
    "a list": b"[1, 2]",
    "not UTF-8": b'{"id": "\xff"}',
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_sample_is_named(case: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    write_samples(path, [Sample.of("a", [1, 2], [(1, 2)])], ORIGIN)
    with path.open("ab") as file:
        file.write(DAMAGE[case] + b"\n")
    samples = read_samples(path)
    assert next(samples).id == "a"
    with pytest.raises(FormatError, match=r"data\.jsonl, line 3"):
        next(samples)


def test_other_files_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(FormatError, match="draftkit data prepare"):
        read_origin(tmp_path / "rows.jsonl")
    with pytest.raises(SourceError, match="cannot be read"):
        list(read_samples(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize("failure", ["row", "disk"])
def test_a_failed_preparation_leaves_nothing_behind(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> Iterator[Row]:
        yield row(LONG)
        if failure == "row":
            raise FormatError("the next row is damaged")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out" / "data.jsonl"
    out.parent.mkdir()
    out.write_text("before")
    if failure == "disk":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DraftkitError, match="damaged" if failure == "row" else "No space left"):
        prepare(rows(), Renderer(tokenizer(templates.CHATML)), out, force=True)
    assert [path.name for path in out.parent.iterdir()] == ["data.jsonl"]
    assert out.read_text() == "before"
    with pytest.raises(DraftkitError, match="--force"):
        prepare(rows(), Renderer(tokenizer(templates.CHATML)), out)


def test_the_remains_of_a_killed_preparation_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / ".data.jsonl.tmp-0123456789abcdef"
    dead.mkdir()
    (dead / "new").write_text("half")
    write_samples(tmp_path / "data.jsonl", [Sample.of("a", [1, 2], [(1, 2)])], ORIGIN)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    with pytest.raises(DraftkitError, match="holds"):
        write_samples(tmp_path, [], ORIGIN, force=True)


def test_no_usable_row_is_an_error_with_its_reasons(tmp_path: Path) -> None:
    rejected = row([{"role": "system", "content": "s"}, *LONG], "bad")
    with pytest.raises(FormatError, match=r"none of 1 rows.*\n.*rejected .*bad: roles must alternate"):
        prepare([rejected], Renderer(tokenizer(templates.STRICT)), tmp_path / "data.jsonl")
    assert not list(tmp_path.iterdir())


# Rows.

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
RECORDS = {
    "messages": {"messages": [QUESTION, ANSWER]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "completion": {"prompt": "q", "completion": "a"},
    "response": {"prompt": "q", "response": "a", "messages": None},
    "both lists": {"prompt": [QUESTION], "completion": [ANSWER]},
}


@pytest.mark.parametrize("shape", RECORDS)
def test_every_shape_of_a_conversation_is_read(shape: str) -> None:
    assert parse_row(RECORDS[shape], "x").content == Conversation((QUESTION, ANSWER))  # type: ignore[arg-type]


def test_prompts_texts_tools_and_ids_are_read() -> None:
    assert parse_row({"prompt": "q"}, "x").content == Conversation((QUESTION,))
    assert parse_row({"turns": ["q", "q"], "question_id": 81}, "x").content == Conversation((QUESTION, QUESTION))
    assert parse_row({"text": "words", "category": "web"}, "/a/b.jsonl, line 3") == Row(
        "b.jsonl, line 3", "web", "/a/b.jsonl, line 3", "words"
    )
    content = parse_row({"messages": [QUESTION], "tools": '[{"name": "f"}]'}, "x").content
    assert content == Conversation((QUESTION,), ({"name": "f"},))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_rows_are_read_from_files_and_folders(suffix: str, tmp_path: Path) -> None:
    records = [{"id": str(i // 2), "messages": [QUESTION, ANSWER]} for i in range(4)]
    for name in "ab":
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(records), path)
        else:
            path.write_text(json.dumps(records) if suffix == ".json" else "\n".join(map(json.dumps, records)))
    rows = list(read_rows(str(tmp_path), limit=7))
    assert [row.id for row in rows] == ["0", "0-2", "1", "1-2", "0-3", "0-4", "1-3"]
    assert rows[0].content == Conversation((QUESTION, ANSWER))
    assert "row 1" in rows[0].where or "line 1" in rows[0].where


BAD_FILES = {
    "unknown shape": ("a.jsonl", '{"text": "x"}\n{"instruction": "x", "output": "y"}', "line 2"),
    "keys": ("a.jsonl", '{"instruction": "x", "output": "y"}', "instruction, output"),
    "no role": ("a.jsonl", '{"messages": [{"content": "x"}]}', "line 1, message 1"),
    "content": ("a.jsonl", '{"messages": [{"role": "user", "content": 3}]}', "line 1, message 1"),
    "tools": ("a.jsonl", '{"messages": [], "tools": "{"}', "line 1"),
    "cut line": ("a.jsonl", '{"text": "x"}\n{"text": "y', "line 2"),
    "not a list": ("a.json", '{"text": "x"}', "a list of rows"),
    "cut file": ("a.json", '[{"text": "x"}', "is not valid JSON"),
    "no object": ("a.json", "[1]", "row 1"),
    "parquet": ("a.parquet", "PAR1 and no more", "not valid parquet"),
    "suffix": ("a.csv", "words", "a suffix that is not known"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_rows_are_named(case: str, tmp_path: Path) -> None:
    name, text, message = BAD_FILES[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(DraftkitError, match=message) as caught:
        list(read_rows(str(tmp_path / name)))
    assert name in str(caught.value)


def test_sources_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, message in ((f"{tmp_path}/nothing.jsonl", "no file or folder"), (str(tmp_path), "holds no data")):
        with pytest.raises(SourceError, match=message):
            list(read_rows(missing))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="the dataset nobody/nothing cannot be read"):
        list(read_rows("nobody/nothing"))


def test_hub_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[object] = []

    def load_dataset(*names: object, **options: object) -> list[dict[str, object]]:
        asked.extend([*names, options])
        return [{"messages": [QUESTION, ANSWER]}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (read,) = read_rows("org/chats@v2", split="train_sft", subset="en")
    assert asked == ["org/chats", "en", {"split": "train_sft", "revision": "v2", "streaming": True}]
    assert (read.id, read.where) == ("chats, train_sft row 1", "org/chats, train_sft row 1")


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    for source in ("org/chats", str(tmp_path / "rows.parquet")):
        with pytest.raises(SourceError, match=r"pip install 'draftkit-spec\[train\]'"):
            list(read_rows(source))


# The preflight.


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Good data for the zoo's target, whose own template they were rendered with."""
    target = load_tokenizer("zoo:target")
    path = tmp_path_factory.mktemp("evidence") / "data.jsonl"
    prepare([row(conversation([("What is it?", "a word", False)]))], Renderer(target), path, max_length=64)
    return evidence_of(path, list(read_samples(path)), read_origin(path))


def evidence_of(path: Path, samples: list[Sample], origin: SamplesOrigin) -> Evidence:
    target = load_tokenizer("zoo:target")
    data = Data(path, origin, survey(samples, origin, target, 4096), target)
    return Evidence(data=data, target_config=pico.llama_config(vocab_size=4096))


def failing(evidence: Evidence) -> dict[str, str]:
    """The checks that found something, with its severity."""
    found = [(name, f) for name, f in run_checks(evidence, "training_data") if f.severity != "ok"]
    assert all(f.cost and f.fix and f.where for _, f in found)
    return {name: f.severity for name, f in found}


def surveyed(evidence: Evidence, **counts: object) -> Evidence:
    """Evidence with other counts of its data."""
    assert evidence.data is not None
    return replace(evidence, data=replace(evidence.data, survey=replace(evidence.data.survey, **counts)))


def test_good_data_pass(evidence: Evidence) -> None:
    assert failing(evidence) == {}


BOS, EOT = 4088, 4092
SAMPLES = {
    "outside": (Sample.of("x", [BOS, 5000, EOT], [(1, 3)]), {"tokenizer": "error"}),
    "unmarked": (Sample.of("x", [BOS, 5, EOT], []), {"mask": "error", "end-of-turn": "error"}),
    "endless": (Sample.of("x", [BOS, 5, 6], [(1, 3)]), {"end-of-turn": "error"}),
    "cut": (
        Sample.of("x", [BOS, 5, 6, EOT] * 16, [(1, 4), (62, 63)]),
        {"end-of-turn": "warning", "truncation": "warning"},
    ),
    "loop": (Sample.of("x", [BOS, *[7, 8, 9] * 20, EOT], [(1, 62)]), {"loops": "warning"}),
    "double": (Sample.of("x", [BOS, BOS, EOT], [(2, 3)]), {"beginning": "error"}),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_bad_data_are_found(case: str, evidence: Evidence) -> None:
    sample, expected = SAMPLES[case]
    assert failing(evidence_of(evidence.data.path, [sample], evidence.data.origin)) == expected


def test_another_tokenizer_and_another_template_are_found(evidence: Evidence) -> None:
    origin = replace(evidence.data.origin, tokenizer_sha256="x", template_sha256="y")
    assert failing(replace(evidence, data=replace(evidence.data, origin=origin))) == {
        "tokenizer": "error",
        "chat-template": "warning",
    }


def test_no_samples_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no samples"):
        evidence_of(tmp_path, [], ORIGIN)


def with_model(evidence: Evidence, model: torch.nn.Module) -> Evidence:
    model.set_attn_implementation("draftkit")  # type: ignore[operator]
    small = Sample.of("x", list(range(3, 40)), [(1, 2)])
    return replace(surveyed(evidence, first=small), model=model)


def gemma() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=1.0, query_pre_attn_scalar=16,
        initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.weight)
    return model.requires_grad_(False)


def test_the_model_is_what_is_read_of_it(evidence: Evidence) -> None:
    plain, scaled = with_model(evidence, pico.llama()), with_model(evidence, gemma())
    for checked in (plain, scaled):
        assert [f.severity for f in training_models.aux_layers.run(checked)] == ["ok"]
    assert [f.message for f in training_models.final_norm.run(plain)] == ["the final norm multiplies by its weight w"]
    found = list(training_models.final_norm.run(scaled))
    assert [f.severity for f in found] == ["warning", "note"]
    assert "scales or caps" in found[0].message
    assert "1 + w" in found[1].message


def test_infinite_states_and_wrong_taps_are_found(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pico.llama()
    checked = with_model(evidence, model)
    model.model.layers[3].mlp.down_proj.weight.data[0] = float("nan")
    (finding,) = training_models.aux_layers.run(checked)
    assert "NaN" in finding.message
    monkeypatch.setattr(training_models, "_aux_layer_ids", lambda *_: (2,))
    checked = with_model(evidence, pico.llama())
    reference = training_models._reference
    shifted = lambda *a: (r := reference(*a))._replace(states=r.states[1:])  # noqa: E731
    monkeypatch.setattr(training_models, "_reference", shifted)
    (finding,) = training_models.aux_layers.run(checked)
    assert (finding.severity, "after 2 layers" in finding.message) == ("error", True)


def drafted(evidence: Evidence, draftkit: Command, tmp_path: Path, target: Path, **config: object) -> Evidence:
    """The pico EAGLE-3 draft, converted."""
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(**config), pico.eagle3_tensors())
    assert draftkit("convert", source, tmp_path / "draft", "--target", target).code == 0
    return replace(evidence, draft=read_draft(tmp_path / "draft"), draft_name="draft")


def test_a_draft_is_compared_with_its_target(
    evidence: Evidence, draftkit: Command, tmp_path: Path, target: Path
) -> None:
    known = drafted(evidence, draftkit, tmp_path, target)
    (finding,) = training_models.vocabulary.run(known)
    assert (finding.severity, "320 target tokens" in finding.message) == ("error", True)
    uses = np.zeros(320, dtype=np.int64)
    uses[known.draft.tensors["d2t"].load().numpy() + np.arange(128)] = 1  # type: ignore[union-attr]
    fitting = replace(surveyed(known, uses=uses), target_config=pico.llama_config())
    assert [f.severity for f in training_models.vocabulary.run(fitting)] == ["ok"]
    half = surveyed(fitting, uses=uses + (uses == 0))
    assert "40.0% of the labels" in training_models.vocabulary.run(half)[0].message
    assert [f.message for f in training_models.rope.run(fitting)] == [
        "the draft's rope base is 10000.0, the target's 500000.0"
    ]
    longer = replace(fitting, target_config=pico.llama_config(max_position_embeddings=4096))
    assert [f.severity for f in training_models.rope.run(longer)] == ["warning", "warning"]


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda d: d - 400, "outside"), (lambda d: d * 0 - torch.arange(128), "that another has")],
)
def test_a_broken_vocabulary_map_is_found(
    change,
    message: str,
    evidence: Evidence,
    draftkit: Command,
    tmp_path: Path,
    target: Path,  # type: ignore[no-untyped-def]
) -> None:
    known = drafted(evidence, draftkit, tmp_path, target)
    assert known.draft is not None
    d2t = known.draft.tensors["d2t"]
    values = change(d2t.load())
    broken = replace(d2t, reader=lambda _: iter([values.numpy().tobytes()]))
    draft = replace(known.draft, tensors=known.draft.tensors | {"d2t": broken})
    fitting = surveyed(known, uses=np.zeros(320, dtype=np.int64))
    found = training_models.vocabulary.run(replace(fitting, draft=draft))
    assert (found[0].severity, message in found[0].message) == ("error", True)


# The commands.


@pytest.mark.slow
def test_prepare_and_check(draftkit: Command, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "data.jsonl"
    rows.write_text(json.dumps({"messages": LONG}) + "\n" + json.dumps({"prompt": "q"}))
    dry = draftkit("data", "prepare", rows, out, "--target", "zoo:target", "--dry-run", "--json")
    assert (dry.code, dry.err, out.exists()) == (0, "", False)
    ran = draftkit("data", "prepare", rows, out, "--target", "zoo:target", "--json")
    assert (ran.code, ran.err) == (0, "")
    result = json.loads(ran.out)
    assert result == json.loads(dry.out) | {"out": str(out)}
    assert (result["rows"], result["documents"]) == (2, 1)
    assert result["reasons"][0]["examples"] == ["rows.jsonl, line 2"]
    shown = draftkit("data", "check", out, "--target", "zoo:target", "--skip-model")
    assert shown.code == 0
    assert shown.err.startswith("next: draftkit train ")
    assert re.match(r"(sound|doubtful): .*\d+ ok\n", shown.out)
    assert f"⟦{'a' * 40}<|eot|>⟧" in shown.out.replace("\n", "")
    checked = json.loads(draftkit("data", "check", out, "--target", "zoo:target", "--draft", "zoo:eagle", "--json").out)
    assert {finding["check"] for finding in checked["findings"]} == {
        check.name for check in checks_of("training_data", "training_models") if check.name not in ("runtime", "images")
    }
    assert "".join(piece["text"] for piece in checked["shown"] if piece["supervised"]) == "a" * 40 + "<|eot|>"


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["falcon", "qwen3_next", "deepseek_v3", "qwen2_5_vl"])
def test_the_models_of_today_are_checked(kind: str, draftkit: Command, tmp_path: Path) -> None:
    """In transformers where draftkit's own engine does not run them, of which a note tells."""
    target = save_target(kind, tmp_path / "target")
    own = load_tokenizer(str(target))
    origin = SamplesOrigin("pico", own.sha256, own.template_sha256)
    write_samples(tmp_path / "data.jsonl", [Sample.of("a", list(range(3, 40)), [(5, 37)])], origin)
    ran = draftkit("data", "check", tmp_path / "data.jsonl", "--target", target, "--json", "--device", "cpu")
    found = {finding["check"]: finding for finding in json.loads(ran.out)["findings"]}
    assert found["aux-layers"]["severity"] == "ok", found["aux-layers"]
    assert found["final-norm"]["severity"] in ("ok", "note")
    refused = open_target(str(target)).refusal is not None
    assert ("runtime" in found) == refused
    if kind == "falcon":
        assert refused
        assert "draftkit eval --engine vllm" in found["runtime"]["hint"]


def test_check_fails_on_errors_and_unknown_rows(draftkit: Command, tmp_path: Path) -> None:
    target = load_tokenizer("zoo:target")
    origin = SamplesOrigin("zoo:target", target.sha256, target.template_sha256)
    write_samples(tmp_path / "data.jsonl", [Sample.of("a", [BOS, 9000], [(1, 2)])], origin)
    ran = draftkit("data", "check", tmp_path / "data.jsonl", "--target", "zoo:target")
    assert (ran.code, "ids beyond the target" in ran.out) == (1, True)
    with pytest.raises(SourceError, match="no sample nobody"):
        check_data(tmp_path / "data.jsonl", "zoo:target", with_model=False, row="nobody")


def test_bad_template_options_are_refused(draftkit: Command, tmp_path: Path) -> None:
    ran = draftkit("data", "prepare", tmp_path, tmp_path / "o", "--target", "zoo:target", "--template-option", "x")
    assert (ran.code, "NAME=VALUE" in ran.err) == (1, True)


# What comes with a model may be broken in ways of its own.

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TargetError, match="does not come to an end"):
        chat.render(tokenizer(ENDLESS).tokenizer, [{"role": "user", "content": "q"}])
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize("template", [RECURSIVE, "{{ 'x' * 10 ** 14 }}", "{{ 1 // 0 }}", "{% for", "{% break %}"])
def test_a_template_that_fails_rejects_every_row(template: str, tmp_path: Path) -> None:
    said = Conversation(({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}))
    rows = [Row("a", "all", "test", said)]
    with pytest.raises(FormatError, match="rejected by the template"):
        prepare(rows, Renderer(tokenizer(template)), tmp_path / "out.jsonl")
    with pytest.raises(TargetError, match="does not take the prompt 'q'"):
        encode_messages([{"role": "user", "content": "q"}], tokenizer(template).tokenizer)


def test_half_a_character_in_a_row_is_one_message(draftkit: Command, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"messages": [{"role": "user", "content": "\\ud800"}]}\n')
    ran = draftkit("data", "prepare", path, tmp_path / "out.jsonl", "--target", "zoo:target")
    assert ran.code == 1
    assert "rows.jsonl, line 2" in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "out.jsonl").exists()


def broken_tokenizer(folder: Path, pattern: str) -> Path:
    """The zoo's target without weights, whose tokenizer splits text at a pattern."""
    shutil.copytree(zoo.path("target"), folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_tokenizer_that_panics_or_cannot_be_built_is_one_message(draftkit: Command, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a" * 60 + "b"}) + "\n")
    panics = broken_tokenizer(tmp_path / "panics", "(a|aa)+$")
    ran = draftkit("data", "prepare", tmp_path / "rows.jsonl", tmp_path / "out.jsonl", "--target", panics)
    assert ran.code == 1
    assert "error: the tokenizer's own code has failed: Onig" in ran.err
    with pytest.raises(TargetError, match="own code has failed"):
        encode_prompt(Prompt("1", "all", ("a" * 60 + "b",)), load_tokenizer(str(panics)).tokenizer)
    for damage in ("(", None):
        folder = broken_tokenizer(tmp_path / f"damaged {damage}", damage or "x")
        if damage is None:
            (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(TargetError, match="no tokenizer that transformers can load"):
            load_tokenizer(str(folder))


def test_long_work_says_how_far_it_is_without_a_terminal(
    draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftkit.cli.output.PROGRESS_SECONDS", 0.0)
    (tmp_path / "rows.jsonl").write_text('{"text": "one two"}\n' * 3)
    ran = draftkit("data", "prepare", tmp_path / "rows.jsonl", tmp_path / "out.jsonl", "--target", "zoo:target")
    assert [line for line in ran.err.splitlines() if line.startswith("rows:")] == ["rows: 1", "rows: 2", "rows: 3"]
