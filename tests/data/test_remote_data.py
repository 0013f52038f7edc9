"""Samples and answers in stores: as those on a disk, by every command that reads or writes them."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
from conftest import Command
from fixtures import plain_store

from draftkit.data.journals import JournalParts
from draftkit.data.responses import ResponseFile
from draftkit.data.rows import read_rows
from draftkit.data.sample_files import open_samples, read_samples, samples_sha256
from draftkit.errors import DraftkitError, FormatError
from draftkit.io.cache import local_file
from draftkit.io.store import WRITER, Store

assert plain_store
TARGET = ("--target", "zoo:target")


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def store() -> Store:
    return Store(f"memory://{uuid4().hex}")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} and so on, and on"}) + "\n" for number in range(12)))
    return path


@pytest.mark.long
def test_samples_are_prepared_checked_and_read_there(
    draftkit: Command, store: Store, rows: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "data.jsonl"
    assert draftkit("data", "prepare", rows, disk, *TARGET).code == 0
    store.upload(rows, "rows.jsonl")
    for form in ("data.jsonl", "data.arrow"):
        address = f"{store}/{form}"
        ran = draftkit("data", "prepare", f"{store}/rows.jsonl", address, *TARGET)
        assert (ran.code, ran.out.splitlines()[0]) == (
            0, f"written: {address}: 12 rows → 12 samples, 96 tokens, 84 of them in the loss mask",
        )  # fmt: skip
        assert f"data check {address}" in ran.err
        assert [one.tokens.tolist() for one in open_samples(local_file(address))] == [
            one.tokens.tolist() for one in read_samples(disk)
        ]
        checks = (draftkit("data", "check", one, *TARGET, "--skip-model", "--json") for one in (address, disk))
        said = [[one["message"] for one in json.loads(ran.out)["findings"]] for ran in checks]
        assert said[0] == said[1]
        train = ("train", "--recipe", "eagle3", *TARGET, "--data", address, "--out", tmp_path / "run", "--dry-run")
        checked = draftkit(*train, "--set", "device=cpu")
        assert (checked.code, f"data: {address}" in checked.out) == (0, True)
        refused = draftkit("data", "prepare", rows, address, *TARGET)
        assert (refused.code, "already there" in refused.err) == (1, True)
        assert draftkit("data", "prepare", rows, address, *TARGET, "--force").code == 0
    folder = draftkit("data", "prepare", rows, f"{store}/folder", *TARGET)
    assert (folder.code, "ends in .arrow or .jsonl" in folder.err) == (2, True)
    for command in ("check", "prepare"):
        more = (tmp_path / "other.jsonl",) if command == "prepare" else ()
        missing = draftkit("data", command, f"{store}/none.jsonl", *more, *TARGET)
        assert (missing.code, f"{store}/none.jsonl" in missing.err) == (1, True)


@pytest.mark.long
def test_answers_are_parts_that_go_on(draftkit: Command, store: Store, rows: Path, tmp_path: Path) -> None:
    answers = f"{store}/answers.jsonl"
    regenerate = ("data", "regenerate", rows, answers, *TARGET, "--max-new-tokens", 4, "--json")
    dry = json.loads(draftkit(*regenerate, "--dry-run").out)
    assert (dry["turns"], store.names()) == (12, [])
    first, second = draftkit(*regenerate, "--limit", 5), draftkit(*regenerate)
    assert [json.loads(ran.out)[name] for ran in (first, second) for name in ("rows", "resumed")] == [5, 0, 7, 5]
    assert store.names() == ["answers.jsonl/00000000.jsonl", "answers.jsonl/00000001.jsonl"]
    refused = draftkit(*regenerate, "--seed", 1)
    assert (refused.code, "seed: 0, now 1" in refused.err, answers in refused.err) == (1, True, True)
    on_disk = tmp_path / "answers.jsonl"
    assert draftkit("data", "regenerate", rows, on_disk, *TARGET, "--max-new-tokens", 4).code == 0
    forms = []
    for number, source in enumerate((answers, on_disk)):
        out = tmp_path / f"{number}.jsonl"
        assert draftkit("data", "prepare", source, out, *TARGET).code == 0
        forms.append(sorted((sample.id, sample.tokens.tolist()) for sample in read_samples(out)))
    assert forms[0] == forms[1]
    prompts = f"{store}/prompts.jsonl"
    synthesize = ("data", "synthesize", *TARGET, "--out", prompts, "--min-words", 1, "--max-new-tokens", 64, "--json")
    for count in (1, 3):
        assert draftkit(*synthesize, "--count", count).code == 0
    assert json.loads(draftkit(*synthesize, "--count", 3).out)["resumed"] == 3


def test_a_row_that_is_wrong_is_named_by_its_address(store: Store) -> None:
    store.write("rows.jsonl", b'{"text": "a"}\n{"smell": "rose"}\n')
    with pytest.raises(FormatError, match=f"where: {store}/rows.jsonl, line 2"):
        list(read_rows(f"{store}/rows.jsonl"))


SETTINGS = {"tokenizer_sha256": "0"}


def test_a_second_writer_of_answers_is_refused(store: Store) -> None:
    one, other = (ResponseFile(str(store), SETTINGS) for _ in range(2))
    one.append([{"id": "a"}])
    with pytest.raises(DraftkitError, match="another process is adding to it"):
        other.append([{"id": "b"}])
    again = ResponseFile(str(store), SETTINGS)
    assert list(again.done) == ["a"]
    again.append([{"id": "b"}])
    assert [row["id"] for _, row in again.rows()] == ["a", "b"]


@pytest.mark.parametrize("scheme", ["old", "looking"])
def test_where_a_store_has_no_conditional_puts_one_process_writes_answers(scheme: str, tmp_path: Path) -> None:
    """Another would overwrite what it has written, and neither would know."""
    address = f"{scheme}://{tmp_path}"
    one = ResponseFile(address, SETTINGS)
    one.append([{"id": "a"}])
    with pytest.raises(DraftkitError, match=f"another process writes there, or was killed(.|\n)*{address}/{WRITER}"):
        ResponseFile(address, SETTINGS)
    one.append([{"id": "b"}])
    del one
    again = ResponseFile(address, SETTINGS)
    assert list(again.done) == ["a", "b"]


def test_what_lies_there_and_is_no_answers_is_left_alone(store: Store) -> None:
    for name in ("00000000.jsonl", "other.txt"):
        store.write(name, b'{"precious": 1}\n')
        with pytest.raises(DraftkitError, match="no file of responses"):
            ResponseFile(str(store), SETTINGS)
        store.remove(name)
    store.write("00000000.jsonl", b"")
    with pytest.raises(DraftkitError, match="no file of responses"):
        ResponseFile(str(store), SETTINGS)
    store.remove("00000000.jsonl")
    store.write("00000001.jsonl", b"{}\n")  # the first part is missing
    with pytest.raises(DraftkitError, match="no file of responses"):
        JournalParts(str(store), "draftkit-regenerated")


def test_samples_are_written_in_the_other_form(draftkit: Command, rows: Path, tmp_path: Path) -> None:
    """As they are, whatever they were cut at; what only rows have is refused."""
    data, arrow, back = (tmp_path / name for name in ("data.jsonl", "data.arrow", "back.jsonl"))
    assert draftkit("data", "prepare", rows, data, *TARGET, "--max-length", 5).code == 0
    ran = draftkit("data", "prepare", data, arrow, *TARGET)
    assert (ran.code, ran.out) == (
        0,
        f"written: {arrow}: 12 rows → 12 samples, 60 tokens, 48 of them in the loss mask\n",
    )
    assert draftkit("data", "prepare", arrow, back, *TARGET).code == 0
    assert samples_sha256(back) == samples_sha256(data)
    some = json.loads(draftkit("data", "prepare", data, tmp_path / "some", *TARGET, "--limit", 3, "--json").out)
    assert (some["documents"], len(open_samples(tmp_path / "some"))) == (3, 3)
    dry = json.loads(draftkit("data", "prepare", data, tmp_path / "dry", *TARGET, "--dry-run", "--json").out)
    assert (dry["documents"], (tmp_path / "dry").exists()) == (12, False)
    for option in (("--max-length", 4), ("--drop-loops",), ("--system", "s"), ("--template-option", "a=1")):
        refused = draftkit("data", "prepare", data, tmp_path / "no.arrow", *TARGET, *option)
        assert (refused.code, f"{option[0]} is for rows" in refused.err.replace("\n", " ")) == (2, True), refused.err
    data.write_text(data.read_text().replace('"tokenizer_sha256":"', '"tokenizer_sha256":"0', 1))
    other = draftkit("data", "prepare", data, tmp_path / "no.arrow", *TARGET)
    assert (other.code, "another tokenizer" in other.err, (tmp_path / "no.arrow").exists()) == (1, True, False)
