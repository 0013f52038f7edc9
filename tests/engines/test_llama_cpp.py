"""llama.cpp's server as a kind of server, and `eval --engine llama.cpp`: against a program that answers as it does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Command
from fixtures.servers.llama_program import write_program

from draftkit.convert.api import convert_checkpoint
from draftkit.engines.llama_cpp.process import llama_server
from draftkit.engines.servers.server import server_at
from draftkit.errors import DraftkitError, SourceError
from draftkit.requests import Request


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return write_program(tmp_path / "llama-server")


@contextmanager
def running(program: Path, *arguments: str) -> Iterator[str]:
    with llama_server(program, arguments, program.with_suffix(".log")) as url:
        yield url


def test_a_server_is_known_and_its_counts_are_read(program: Path) -> None:
    with running(program, "--spec-type", "draft-eagle3") as url:
        server = server_at(url)
        server.require(speculates=True)
        assert (server.engine, server.version()) == ("llama.cpp", "b11434")
        answer = server.complete(Request("0", (1, 2), 8), None)
        assert answer.ids == tuple(range(10, 16))
        assert answer.drafts is not None
        assert (answer.drafts.num_drafts, answer.drafts.num_draft_tokens, answer.drafts.num_accepted_tokens) == (
            2,
            6,
            3,
        )
        by_messages = server.complete(Request("0", (), 8, messages=(("user", "hello"),)), None)
        assert by_messages.tokens == answer.tokens
        counted = server.counters().drafts
        assert counted is not None
        assert (counted.num_drafts, counted.num_accepted_tokens_per_pos) == (4, (2, 2, 2))


def test_a_server_that_does_not_draft_is_an_error(program: Path) -> None:
    """One with `-md` and no `--spec-type`, as its slots say; without slots, an answer without draft_n is told."""
    with running(program) as url:
        with pytest.raises(SourceError, match="without speculative decoding"):
            server_at(url).require(speculates=True)
        plain = server_at(url)
        plain.require(speculates=False)
        assert plain.complete(Request("0", (1, 2), 8), None).drafts is None
    with running(program, "--spec-type", "ngram-simple", "silent") as url:
        quiet = server_at(url)
        quiet.require(speculates=True)
        drafts = quiet.complete(Request("0", (1, 2), 8), None).drafts
        assert drafts is not None  # it could have drafted, and found nothing
        assert drafts.num_drafts == 0
        quiet.speculates = lambda: None  # type: ignore[method-assign]
        with pytest.raises(SourceError, match="no draft_n"):
            quiet.complete(Request("0", (1, 2), 8), None)


def test_one_that_does_not_start_says_why(program: Path) -> None:
    with pytest.raises(DraftkitError, match="the model is broken"), running(program, "broken"):
        pass
    with pytest.raises(DraftkitError, match="cannot be run"), running(program.with_name("none")):
        pass


@pytest.mark.slow
def test_eval_starts_one_for_each_draft(draftkit: Command, program: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "result.json", convert_checkpoint("zoo:eagle3", tmp_path / "draft", target="zoo:target")
    started = ("--set", f"llama_server={program}")
    command = ("eval", "--engine", "llama.cpp", *started, "--target", "zoo:target", "--limit", 2)
    drafts = ("--draft", "zoo:eagle3", "--draft", "zoo:draft-model", "--k", 3, "--max-new-tokens", 8)
    outcome = draftkit(*command, *drafts, "--out", out, "--json")
    assert outcome.code == 0, outcome.err
    cells = json.loads(outcome.out)["cells"]
    assert [(cell["engine"], cell["method"]) for cell in cells] == [
        ("llama.cpp", "eagle3"),
        ("llama.cpp", "draft-model"),
    ]
    assert [cell["acceptance_length"]["mean"] for cell in cells] == [2.5, 2.5]
    assert cells[0]["num_accepted_tokens_per_pos"] == [2, 2, 2]
    assert cells[0]["draft"].startswith("zoo:eagle3 (2.0")  # megabytes of the file
    assert len(list(tmp_path.glob("result.llama-server.*.log"))) == 3  # one for each draft, and one without
    assert all(cell["baseline_tokens_per_second"] and cell["matches_greedy"] == 1 for cell in cells)
    untold = [w for w in json.loads(outcome.out)["warnings"] if w["name"] == "not-told"]
    assert any("at each position by request" in warning["message"] for warning in untold)
    assert (
        draftkit("push", folder, "org/draft", "--results", out, "--dry-run", "--allow-unmeasured").code == 0
    )  # what was measured was this draft, whatever its file is called
    assert "draft.gguf --spec-type draft-eagle3" in (folder / "README.md").read_text()
    block = draftkit(*command, "--draft", "zoo:dflash", "--k", 9)
    assert "at most 7 tokens a round" in block.err
    assert "leave out --advise" in draftkit(*command, *drafts, "--advise").err
    assert "several K for a server" in draftkit(*command, *drafts[:4], "--k", "2,3").err


@pytest.mark.slow
def test_what_is_saved_is_not_measured_again(draftkit: Command, program: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = ("eval", "--engine", "llama.cpp", "--set", f"llama_server={program}", "--target", "zoo:target")
    options = ("--limit", 2, "--k", 3, "--max-new-tokens", 8, "--draft", "zoo:eagle3", "--out", out)
    assert draftkit(*command, *options).code == 0
    (kept,) = json.loads(out.read_text())["cells"]
    ran = draftkit(*command, *options, "--draft", "zoo:draft-model", "--resume")
    assert ran.code == 0, ran.err
    first, second = json.loads(out.read_text())["cells"]
    assert first == kept
    assert second["method"] == "draft-model"
