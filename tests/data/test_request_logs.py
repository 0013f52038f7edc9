"""Logs of requests: every shape that servers write, what is the target's own, and the slices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.checkpoints import templates
from fixtures.checkpoints.templates import tokenizer

from draftkit.data.categories import sliced
from draftkit.data.request_logs import read_request_logs
from draftkit.data.rows import Conversation
from draftkit.data.samples import Sample
from draftkit.errors import FormatError

USER = [{"role": "user", "content": "How do you sort the words of a list?"}]
ANSWER = {"role": "assistant", "content": "With sorted."}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CHOICES = [{"index": 0, "message": ANSWER, "finish_reason": "stop"}]
SERVED = {"model": "m", "choices": CHOICES}
ASKED = {"messages": USER, "model": "asked"}
SHAPES = {
    "request and response": {"request": ASKED, "response": SERVED},
    "one object": {"messages": USER, "temperature": 0.7} | SERVED,
    "a batch's": {"custom_id": "1", "body": ASKED, "response": {"status_code": 200, "body": SERVED}},
}


def written(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_chats(shape: str, tmp_path: Path) -> None:
    path = written(tmp_path / "logs.jsonl", SHAPES[shape])
    (foreign,) = read_request_logs(path)
    assert not foreign.own
    assert foreign.row.content == Conversation(tuple(USER))
    assert foreign.row.category == "language=en tools=no"
    (own,) = read_request_logs(path, ("m",))
    assert own.own
    assert own.row.content == Conversation((*USER, ANSWER))
    assert own.row.id == foreign.row.id


def test_other_records(tmp_path: Path) -> None:
    path = written(
        tmp_path / "logs.jsonl",
        {"request": {"prompt": "def f(", "model": "m"}, "response": {"choices": [{"text": "x):"}]}},
        {"text": "Und das ist der Text, der nicht von mir ist."},
        {"messages": USER, "tools": TOOLS},
        {"messages": [*USER, ANSWER, {"role": "tool", "content": "4"}]},
        SHAPES["one object"],
        SHAPES["request and response"],  # the same request
    )
    found = list(read_request_logs(path, ("m",)))
    assert [entry.own for entry in found] == [False, False, False, False, True]
    assert found[0].row.content == "def f("
    assert [entry.row.category for entry in found] == [
        "language=und tools=no", "language=de tools=no", "language=en tools=yes", "language=en tools=yes",
        "language=en tools=no",
    ]  # fmt: skip
    again = written(tmp_path / "others.jsonl", {"messages": USER, "tools": TOOLS})
    assert [entry.row.id for entry in read_request_logs(again)] == [found[2].row.id]


@pytest.mark.parametrize(
    "record", [{"request": {"prompt": [1, 2]}, "response": {}}, {"request": "x", "response": {}}, {"choices": CHOICES}]
)
def test_what_is_no_request_is_named_by_its_line(record: object, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"logs\.jsonl, line 2"):
        list(read_request_logs(written(tmp_path / "logs.jsonl", SHAPES["one object"], record)))


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        ("<think>\nWell.\n</think>\nYes.", 10, "thinking=yes length=short"),
        ("<think>\n\n</think>\nYes.", 300, "thinking=no length=medium"),
        ("Yes.", 2000, "thinking=no length=long"),
    ],
)
def test_slices_of_a_sample(text: str, length: int, expected: str) -> None:
    target = tokenizer(templates.CHATML)
    ids = target.tokenizer(text, add_special_tokens=False).input_ids
    sample = Sample.of("s", [*ids, *[ids[-1]] * (length - len(ids))], [], "source=traffic language=en tools=no")
    assert sliced(sample, target).category == f"source=traffic language=en tools=no {expected}"
