"""A server of `/v1/completions` on 127.0.0.1 as vLLM's, as far as draftkit calls it; the answers are a function's."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Answer = tuple[int, dict[str, object]]  # status and body


class CompletionsServer:
    """Serves until the `with` block ends. `answer` maps the body of a completion request to status and body."""

    def __init__(self, answer: Callable[[dict[str, object]], Answer], models: tuple[str, ...] = ("target",)):
        self.answer = answer
        self.models = models
        self.requests: list[dict[str, object]] = []
        self.authorizations: set[str | None] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_side": self}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> CompletionsServer:
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_side: CompletionsServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        models = [{"id": name} for name in self.server_side.models]
        self._send(200 if self.path == "/v1/models" else 404, {"object": "list", "data": models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server_side.requests.append(body)
        self.server_side.authorizations.add(self.headers["Authorization"])
        self._send(*(self.server_side.answer(body) if self.path == "/v1/completions" else (404, {})))

    def _send(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean; `CompletionsServer.requests` is the log."""
