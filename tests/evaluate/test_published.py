"""Published figures: each is quoted in the notes of `fixtures/published_sources.md`, and stands beside its pair."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fixtures.eval_results import cell, write

from draftkit.evaluate import published
from draftkit.evaluate.published import PublishedRow, published_beside, published_rows, rows_of
from draftkit.results.record import Result, result_from

NOTES = (Path(__file__).parents[1] / "fixtures" / "published_sources.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?|(?<![\w])\.\d+")
ROWS = json.loads(resources.files("draftkit.evaluate").joinpath("published.json").read_text(encoding="utf-8"))


def quoted(source: str) -> str:
    """What the notes say of a source: the lines of a table that name it, or its section."""
    lines = [line for line in NOTES.splitlines() if line.startswith("|") and source in line]
    sections = [part for part in re.split(r"^## ", NOTES, flags=re.M) if source in part.splitlines()[0]]
    return "\n".join(lines or sections)


def numbers(text: str) -> set[float]:
    return {float(found.replace(",", "")) for found in NUMBER.findall(text)}


@pytest.mark.parametrize("source", sorted({row["source"] for row in ROWS}))
def test_no_value_is_there_that_its_source_does_not_quote(source: str) -> None:
    said = quoted(source)
    assert said, f"the notes do not name {source}"
    for row in (row for row in ROWS if row["source"] == source):
        figures = [row["acceptance_length"], row["num_speculative_tokens"], row["temperature"]]
        figures += row["acceptance_per_pos"] or []
        wanted = {float(one) for one in figures if one is not None} | numbers(row["speed"] or "")
        # K and batch 1 stand in words such as "K3", "T=1.0" or "b1".
        words = {float(found) for found in re.findall(r"[KTcb]=?(\d+(?:\.\d+)?)", said)}
        assert not wanted - numbers(said) - words, row


def test_every_row_has_every_key_and_a_link() -> None:
    names = {field.name for field in fields(PublishedRow)}
    assert len(ROWS) > 90
    for row in ROWS:
        assert row.keys() == names
        assert re.fullmatch(r"https://[\w./#-]+", row["link"])
        assert row["acceptance_length"] is not None or row["speed"]
        assert row["target"]
        assert row["draft"]
        for name in ("target_id", "draft_id"):
            assert row[name] is None or re.fullmatch(r"[\w.-]+/[\w.-]+", row[name])


def test_a_row_is_found_by_words() -> None:
    assert {row.target for row in rows_of("qwen3-8b DSPARK")} == {"Qwen3-8B"}
    assert rows_of("AQ-MedAI/Qwen3-4B-DSpark gsm8k")[0].acceptance_length == 6.0
    assert rows_of("") == list(published_rows())
    assert rows_of("no such thing") == []


def measured(draft: str, target: str, tmp_path: Path, sources: dict[str, str] | None = None, **changes: Any) -> Result:
    path = write(tmp_path / "r.json", cell(draft, target=target, **changes))
    data = json.loads(path.read_text())
    data["provenance"]["dataset"]["thinking"] = True
    return result_from(data | {"provenance": data["provenance"] | {"sources": sources or {}}}, path)


def test_a_pair_is_known_by_its_hub_ids_and_each_difference_is_named(tmp_path: Path) -> None:
    draft = "AQ-MedAI/Qwen3-4B-DSpark"
    found = published_beside(measured(draft, "Qwen/Qwen3-4B", tmp_path, dataset="gsm8k", method="dspark"))
    assert found[0].row.draft_id == draft
    said = found[0].sentence
    assert "published 6 for DSpark with Qwen3-4B (https://huggingface.co/AQ-MedAI/Qwen3-4B-DSpark)" in said
    assert "2.50 measured here" in said
    assert "not stated: K, T, thinking" in said
    assert "block 8" in said


def test_a_folder_is_known_by_where_it_was_converted_from(tmp_path: Path) -> None:
    sources = {"my-folder": "Dogacel/Qwen3-8B-DSpark@abc", "target": "Qwen/Qwen3-8B@def"}
    found = published_beside(measured("my-folder", "target", tmp_path, sources, method="dspark", temperature=0.0))
    assert found[0].row.acceptance_length == 2.33
    assert "T 1, here 0" in found[0].sentence
    assert "K 7, here 3" in found[0].sentence


def test_another_revision_is_another_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = (row for row in rows_of("Dogacel") if row.draft_id)
    row = replace(own, draft_revision="abc")
    monkeypatch.setattr(published, "published_rows", lambda: (row,))
    same, other = ({"d": f"Dogacel/Qwen3-8B-DSpark@{commit}"} for commit in ("abc", "xyz"))
    assert published_beside(measured("d", "Qwen/Qwen3-8B", tmp_path, same))
    assert not published_beside(measured("d", "Qwen/Qwen3-8B", tmp_path, other))


def test_a_source_that_names_no_checkpoint_says_so(tmp_path: Path) -> None:
    found = published_beside(measured("org/eagle3", "meta-llama/Llama-3.1-8B-Instruct", tmp_path, method="eagle3"))
    assert found
    assert all("which checkpoint is not stated" in one.sentence for one in found)
    assert not published_beside(measured("org/eagle3", "org/other", tmp_path, method="eagle3"))


def test_views_show_what_was_published(draftkit: Command, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", cell("AQ-MedAI/Qwen3-4B-DSpark", target="Qwen/Qwen3-4B", method="dspark"))
    page = tmp_path / "page.html"
    assert draftkit("report", path, "--out", page).code == 0
    assert "Published beside it" in page.read_text()
    assert "published 4.21 for DSpark with Qwen3-4B" in page.read_text()


def test_the_command_prints_rows_with_links_and_what_is_not_stated(draftkit: Command) -> None:
    shown = draftkit("published", "Kimi-K3.1-Pro").out
    assert "https://huggingface.co/Inferact/Kimi-K3.1-Pro-DSpark-preview" in shown
    assert "4.597" in shown
    assert "not stated: " in shown
    rows = json.loads(draftkit("published", "Qwen3-32B", "--json").out)["published"]
    assert {row["num_speculative_tokens"] for row in rows} == {3, 4}
    unknown = draftkit("published", "nothing", "known")
    assert (unknown.code, "Qwen3-8B" in unknown.err) == (1, True)
