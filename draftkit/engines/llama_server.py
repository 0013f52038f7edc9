"""llama.cpp's server in a process of its own: started on a free port, asked for completions of token ids, and ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftkit.errors import DraftkitError

PATIENCE = 600.0  # seconds that a model may take to load
LOG_LINES = 20  # of the server's output that an error shows
COUNTER = re.compile(r"llamacpp:spec_decode_num_(\w+)_total(?:\{position=\"(\d+)\"\})? ([\d.e+]+)")
# With what the server computes in float32 throughout, as draftkit does: its caches are in float16 otherwise.
EXACT = ("-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off")


@dataclass(frozen=True)
class ServerCompletion:
    """The tokens that came, and of the draft tokens that were verified and those that stood, how many.

    Under the server's own rules: a draft is cut to the tokens that are left but one, and an accepted token that ends
    the text counts only at the end of its draft.
    """

    tokens: list[int]
    drafted: int
    accepted: int


@dataclass(frozen=True)
class DraftCounters:
    """The server's totals so far; `drafts` are the verifying steps that had a draft."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]

    def since(self, before: DraftCounters) -> DraftCounters:
        """What came after another reading."""
        earlier = before.per_position + (0,) * len(self.per_position)
        return DraftCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.per_position, earlier, strict=False)),
        )


class LlamaServer:
    """A running server; `log` is what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path):
        self._process, self._url, self.log = process, url, log

    def complete(self, prompt: Sequence[int], max_new_tokens: int, *, speculating: bool = True) -> ServerCompletion:
        """The greedy continuation of a prompt. Raises `DraftkitError` where the server fails, and where it was to
        speculate and did not: then it counts no draft."""
        asked = {
            "prompt": list(prompt), "n_predict": max_new_tokens, "temperature": 0, "return_tokens": True,
            "cache_prompt": False,
        }  # fmt: skip
        answer = json.loads(self._ask("/completion", asked))
        timings = answer["timings"]
        if speculating and "draft_n" not in timings:
            raise DraftkitError(
                "llama-server has drafted nothing: its answer has no draft_n",
                where=self.log,
                hint="the log may say why: a vocabulary that differs, a file without --spec-type",
            )
        return ServerCompletion(answer["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))

    def counters(self) -> DraftCounters:
        """The totals of what has ended so far."""
        totals: dict[str, int] = {}
        positions: dict[int, int] = {}
        for name, position, value in COUNTER.findall(self._ask("/metrics").decode()):
            if position:
                positions[int(position)] = round(float(value))
            else:
                totals[name] = round(float(value))
        per_position = tuple(positions[position] for position in sorted(positions))
        drafts, drafted, accepted = (totals.get(name, 0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
        return DraftCounters(drafts, drafted, accepted, per_position)

    def wait_until_ready(self) -> None:
        """Return once the model is loaded. Raises `DraftkitError` where the server ends, or takes too long."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"{self._url}/health", timeout=10).close()
                return
            time.sleep(0.1)
        raise self._failure("does not start")

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            raise DraftkitError(f"llama-server refuses: {error.read().decode(errors='replace')}", where=path) from error
        except OSError as error:
            raise self._failure("has ended") from error

    def _failure(self, what: str) -> DraftkitError:
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        return DraftkitError(f"llama-server {what}:\n{end}", where=self.log)


@contextmanager
def llama_server(binary: Path, arguments: Sequence[str], log: Path) -> Iterator[LlamaServer]:
    """Run `llama-server` with these arguments on a free port until the body ends; what it prints goes to `log`.

    Raises `DraftkitError` where there is no such program, and where it does not get ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(binary), "--host", "127.0.0.1", "--port", str(port), "--metrics", *arguments]
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise DraftkitError(
                f"{binary} cannot be run: {error.strerror}", hint="give the path of llama.cpp's llama-server"
            ) from error
        try:
            server = LlamaServer(process, f"http://127.0.0.1:{port}", log)
            server.wait_until_ready()
            yield server
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
