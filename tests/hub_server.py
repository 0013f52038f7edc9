"""A Hugging Face Hub on 127.0.0.1: the endpoints that `huggingface_hub` calls for a download, served from folders."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(frozen=True)
class Commit:
    """One folder as one commit, with git's object names."""

    folder: Path

    @cached_property
    def files(self) -> dict[str, Path]:
        return {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}

    @cached_property
    def blobs(self) -> dict[str, str]:
        return {name: blob_id(path.read_bytes()) for name, path in self.files.items()}

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(json.dumps(self.blobs, sort_keys=True).encode()).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubServer:
    """Serves `repos` until the `with` block ends.

    A key is `org/name`, or `org/name@revision` for a branch or tag beside `main`. The listing of a gated repository is
    public and its files are not, as on the Hub.
    """

    handler: type[BaseHTTPRequestHandler]

    def __init__(self, repos: Mapping[str, Path], gated: Collection[str] = frozenset()):
        self.gated = frozenset(gated)
        self.private: set[str] = set()
        self.busy: list[Refusal] = []  # what the next requests are answered with
        self.nameless = False  # whether files are listed without their names
        self.requests: list[tuple[str, str]] = []
        self._commits: dict[str, dict[str, Commit]] = {}
        for key, folder in repos.items():
            repo, _, revision = key.partition("@")
            commit = Commit(folder)
            self._commits.setdefault(repo, {}).update({revision or "main": commit, commit.sha: commit})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (self.handler,), {"hub": self}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def sha(self, repo: str, revision: str = "main") -> str:
        """The commit hash of a revision."""
        return self._commits[repo][revision].sha

    def downloads(self) -> set[str]:
        """The files whose content was requested."""
        return {match["file"] for method, path in self.requests if method == "GET" and (match := _FILE.fullmatch(path))}

    def commit(self, repo: str, revision: str) -> Commit:
        if repo not in self._commits:
            raise Refusal(401, "RepoNotFound", "Invalid username or password.")
        if revision not in self._commits[repo]:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self._commits[repo][revision]

    def __enter__(self) -> HubServer:
        # The default poll of half a second is what leaving the block would wait for.
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Refusal(Exception):
    """An answer that is an error, with the Hub's code for it."""

    def __init__(self, status: int, code: str, message: str, **headers: str):
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message, **headers}


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path))
        try:
            if self.hub.busy:
                raise self.hub.busy.pop(0)
            if match := _INFO.fullmatch(path):
                self._send_info(match["repo"], unquote(match["revision"] or "main"))
            elif match := _TREE.fullmatch(path):
                self._send_tree(match["repo"], unquote(match["revision"]))
            elif match := _FILE.fullmatch(path):
                self._send_file(match["repo"], unquote(match["revision"]), unquote(match["file"]))
            else:
                raise Refusal(404, "EntryNotFound", f"no such endpoint: {path}")
        except Refusal as refusal:
            self.send(refusal.status, refusal.headers, b"")

    do_HEAD = do_GET

    def _send_info(self, repo: str, revision: str) -> None:
        commit = self.hub.commit(repo, revision)
        siblings = [{"rfilename": None if self.hub.nameless else name} for name in commit.files]
        private = repo in self.hub.private
        self.send_json({"_id": repo, "id": repo, "sha": commit.sha, "private": private, "siblings": siblings})

    def _send_tree(self, repo: str, revision: str) -> None:
        commit = self.hub.commit(repo, revision)
        self.send_json(
            [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": commit.blobs[name]}
                for name, path in commit.files.items()
            ]
        )

    def _send_file(self, repo: str, revision: str, name: str) -> None:
        commit = self.hub.commit(repo, revision)
        if repo in self.hub.gated:
            raise Refusal(403, "GatedRepo", f"Access to model {repo} is restricted.")
        if name not in commit.files:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        data = commit.files[name].read_bytes()
        headers = {"ETag": f'"{commit.blobs[name]}"', "X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            self.send(206, headers, data[start : end + 1])
        else:
            self.send(200, headers, data)

    def send_json(self, value: object, status: int = 200) -> None:
        self.send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean; `HubServer.requests` is the log."""


HubServer.handler = Handler
