"""llama.cpp's server as a kind of server, and `eval --engine llama.cpp`: against a program that answers as it does."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Command

from draftkit.convert.api import convert_checkpoint
from draftkit.engines.llama_server import llama_server
from draftkit.engines.servers.connect import server_at
from draftkit.errors import DraftkitError, SourceError
from draftkit.requests import Request

# Two drafts of 3 for each request: all of the first stand, none of the second. `FLAGS` are the arguments.
PROGRAM = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FLAGS = sys.argv[1:]
SAID = dict(speculates="--spec-type" in FLAGS, counts="silent" not in FLAGS, asked=0)
TIMINGS = {{"predicted_n": 6, "draft_n": 6, "draft_n_accepted": 3}}
if "broken" in FLAGS:
    sys.exit("error: the model is broken")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        n = SAID["asked"]
        name, each = "llamacpp:spec_decode_num_", (("drafts", 2), ("draft_tokens", 6), ("accepted_tokens", 3))
        metrics = [f"{{name}}{{k}}_total {{v * n}}" for k, v in each]
        metrics += [name + 'accepted_tokens_per_pos_total{{position="%d"}} %d' % (p, n) for p in range(3)]
        pages = {{
            "/health": {{}}, "/props": {{"build_info": "b11434"}}, "/slots": [{{"speculative": SAID["speculates"]}}],
            "/v1/models": {{"data": [{{"id": "m", "owned_by": "llamacpp"}}]}}, "/metrics": "\\n".join(metrics),
        }}
        self.answer(pages[self.path])

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/apply-template":
            return self.answer({{"prompt": asked["messages"][0]["content"]}})
        SAID["asked"] += 1
        assert asked["cache_prompt"] is False
        events = [{{"tokens": [token], "content": "x", "stop": False}} for token in range(10, 16)]
        timings = TIMINGS if SAID["counts"] and SAID["speculates"] else {{"predicted_n": 6}}
        events.append({{"tokens": [], "content": "", "stop": True, "timings": timings}})
        self.answer("".join(f"data: {{json.dumps(event)}}\\n\\n" for event in events))

    def answer(self, value):
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


ThreadingHTTPServer(("127.0.0.1", int(FLAGS[FLAGS.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


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


def test_eval_starts_one_for_each_draft(draftkit: Command, program: Path, tmp_path: Path) -> None:
    out, folder = tmp_path / "result.json", convert_checkpoint("zoo:eagle3", tmp_path / "draft", target="zoo:target")
    command = ("eval", "--engine", "llama.cpp", "--llama-server", program, "--target", "zoo:target", "--limit", 2)
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
    assert len(list(tmp_path.glob("result.llama-server.*.log"))) == 4  # two for each draft: with it, and without
    assert all(cell["baseline_tokens_per_second"] and cell["matches_greedy"] == 1 for cell in cells)
    untold = [w for w in json.loads(outcome.out)["warnings"] if w["name"] == "not-told"]
    assert any("at each position by request" in warning["message"] for warning in untold)
    assert draftkit("card", folder, out).code == 0  # what was measured was this draft, whatever its file is called
    assert "draft.gguf --spec-type draft-eagle3" in (folder / "README.md").read_text()
    block = draftkit(*command, "--draft", "zoo:dflash", "--k", 9)
    assert "at most 7 tokens a round" in block.err
    assert "add it" in draftkit("eval", "--target", "zoo:target", "--draft", "x", "--llama-server", program).err
    assert "leave it out" in draftkit(*command, *drafts, "--advise").err
    assert "several K for a server" in draftkit(*command, *drafts[:4], "--k", "2,3").err
