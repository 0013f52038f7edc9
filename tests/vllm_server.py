"""A vLLM server on 127.0.0.1, as far as draftkit calls it: models, version, streamed completions and metrics."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Literal

from fake_vllm.simulation import histogram, per_position, simulate

CHUNK_SECONDS = 0.002
Fault = Literal["no metrics", "web page", "no token ids", "busy", "error event", "other prompt", "reset", "hangs up"]


@dataclass
class VllmTestServer:
    """Serves until the `with` block ends, with two engines that answer in turns.

    `k` 0: without a draft. `by_request`: answers carry their own counts. `lag`: seconds until an answer is counted.
    `others`: output tokens of a foreign request that is counted with each answer.
    """

    k: int = 4
    by_request: bool = False
    lag: float = 0.0
    others: int = 0
    fault: Fault | None = None
    bodies: list[dict[str, object]] = field(default_factory=list)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.lock = Lock()
        self.running = 0
        self.accepted: tuple[list[int], list[int]] = ([], [])
        self.finished = self.tokens = 0
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": self}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> VllmTestServer:
        Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def count(self, accepted: list[int], tokens: int) -> None:
        time.sleep(self.lag)
        with self.lock:
            self.accepted[self.finished % 2].extend(accepted)
            self.finished += 1 + bool(self.others)
            self.tokens += tokens + self.others

    def metrics(self) -> str:
        with self.lock:
            lines = [
                "# TYPE vllm:request_success_total counter",
                f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {self.finished}.0',
                f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {self.tokens}',
            ]
            for engine, accepted in enumerate(self.accepted if self.k else ()):
                labels = f'engine="{engine}",model_name="m"'
                name = "vllm:spec_decode_num"
                lines += [
                    f"{name}_drafts_total{{{labels}}} {len(accepted)}",
                    f"{name}_drafts_created{{{labels}}} 1.7e+09",
                    f"{name}_draft_tokens_total{{{labels}}} {self.k * len(accepted)}",
                    f"{name}_accepted_tokens_total{{{labels}}} {sum(accepted)}",
                ]
                lines += [
                    f'{name}_accepted_tokens_per_pos_total{{{labels},position="{position}"}} {count}'
                    for position, count in enumerate(per_position(accepted, self.k))
                ]
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    state: VllmTestServer

    def do_GET(self) -> None:
        fault = self.state.fault
        match self.path:
            case "/metrics" if fault == "no metrics":
                self._send(404, "Not Found")
            case "/metrics" if fault == "web page":
                self._send(200, "<html>Welcome</html>")
            case "/metrics":
                self._send(200, self.state.metrics())
            case "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "served"}, {"id": "adapter"}]}))
            case "/version":
                self._send(200, json.dumps({"version": "0.0-server"}))
            case _:
                self._send(404, "Not Found")

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            state.bodies.append(body)
            state.running += 1
            state.most_at_once = max(state.most_at_once, state.running)
        if state.fault == "busy":
            self._send(503, json.dumps({"error": {"message": "no room for another request"}}))
        else:
            self._stream(body)

    def _stream(self, body: dict) -> None:
        state = self.state
        done = simulate(body["prompt"], body["max_tokens"], state.k)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number, chunk in enumerate(done.chunks):
            choice: dict[str, object] = {"index": 0, "text": "text"}
            if state.fault != "no token ids":
                choice["token_ids"] = chunk
            if number == 0:
                choice["prompt_token_ids"] = [1, *body["prompt"]] if state.fault == "other prompt" else body["prompt"]
            self._event({"choices": [choice]})
            if state.fault == "error event":
                self._event({"error": {"message": "the engine is dead"}})
            if state.fault == "hangs up":
                self.connection.close()
                return
            time.sleep(CHUNK_SECONDS)
        final: dict[str, object] = {"choices": [], "usage": {"completion_tokens": len(done.tokens)}}
        if state.by_request and state.k:
            counted = histogram(done.accepted, state.k)
            drafted = state.k * len(done.accepted)
            final["metrics"] = {"speculative_decoding": {"acceptance_histogram": counted, "num_draft_tokens": drafted}}
        with state.lock:
            state.running -= 1
        self._event(final)
        self.wfile.write(b"data: [DONE]\n\n")
        if state.fault == "reset" and len(state.bodies) > 2:
            state.accepted = ([], [])
        state.count([] if state.fault == "reset" and len(state.bodies) > 2 else done.accepted, len(done.tokens))

    def _event(self, value: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""
