"""The local Hub with the endpoints that `huggingface_hub` calls for an upload without Xet: Git LFS and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from hub_server import Commit, Handler, HubServer, Refusal, blob_id

WRITE, READ = "hf_write_secret", "hf_read_secret"  # the tokens that this Hub knows
LARGE = ("*.safetensors", "*.png")
LICENCES = ("apache-2.0", "mit", "llama3.1")
_REPO = "/api/models/(?P<repo>[^/]+/[^/]+)"


class HubUploads(HubServer):
    """A Hub that repositories can be made on and pushed to; every commit is a folder under `root`.

    `commits`: how many were made in each repository. `uploads`: the large objects that arrived, in their order.
    `uploads_left`: after so many, connections break off while they carry one. `full`: no storage is left.
    """

    def __init__(self, root: Path):
        super().__init__({})
        self.root = root
        self.commits: dict[str, int] = {}
        self.uploads: list[str] = []
        self.uploads_left = 1_000
        self.lock = Lock()
        self.full = False

    def create(self, repo: str, *, private: bool = False) -> None:
        if repo in self._commits:
            raise Refusal(409, "", "You already created this model repo")
        self._commits[repo], self.commits[repo] = {}, 0
        self.private |= {repo} if private else set()
        self.record(repo, "main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.commits[repo] = 0

    def branch(self, repo: str, name: str) -> None:
        if name in self._commits[repo]:
            raise Refusal(409, "", "Reference already exists")
        self._commits[repo][name] = self.commit(repo, "main")

    def record(self, repo: str, revision: str, files: dict[str, bytes]) -> Commit:
        """Make a commit that has exactly `files`."""
        self.commits[repo] += 1
        folder = self.root / repo / f"{revision.replace('/', '_')}-{self.commits[repo]}"
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        commit = Commit(folder)
        self._commits[repo] |= {revision: commit, commit.sha: commit}
        return commit

    def object(self, oid: str) -> Path:
        return self.root / "objects" / oid

    def names(self, repo: str, revision: str = "main") -> set[str]:
        return set(self.commit(repo, revision).files)


class UploadHandler(Handler):
    hub: HubUploads  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.hub.requests.append((self.command, path))
        self._answer(lambda: self._post(path, body))

    def do_PUT(self) -> None:
        oid = self.path.rpartition("/")[2]
        with self.hub.lock:  # the client sends several at once
            self.hub.uploads_left -= 1
            breaks_off = self.hub.uploads_left < 0
        if breaks_off:
            self.rfile.read(16)
            self.close_connection = True  # in the middle of the object, without an answer
            self.connection.close()
            return
        data = self._body()
        if hashlib.sha256(data).hexdigest() != oid:
            self.send(400, {}, b"")
            return
        self.hub.uploads.append(oid)
        self.hub.object(oid).parent.mkdir(parents=True, exist_ok=True)
        self.hub.object(oid).write_bytes(data)
        self.send(200, {"ETag": f'"{oid}"'}, b"")

    def _answer(self, answer: Any) -> None:
        try:
            self._authorise()
            answer()
        except Refusal as refusal:
            self.send(refusal.status, refusal.headers, b"{}")

    def _authorise(self) -> None:
        """What the Hub says to strangers: private repositories do not exist, and they cannot write."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path = unquote(urlsplit(self.path).path)
        if token and token not in (WRITE, READ):
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        repo = re.search(r"^(?:/api/models)?/([^/]+/[^/]+?)(?:\.git)?(?:/|$)", path)
        if not token and repo is not None and (repo[1] in self.hub.private or repo[1] not in self.hub.commits):
            raise Refusal(401, "RepoNotFound", "Invalid username or password.")
        if token and repo is not None and path.startswith("/api/models") and repo[1] not in self.hub.commits:
            raise Refusal(404, "RepoNotFound", "Repository not found")
        if self.command == "POST" and path != "/api/validate-yaml" and token != WRITE:
            raise Refusal(403, "", "You don't have the required permissions")

    def _post(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif path == "/verify":
            self.send_json({})
        elif match := re.fullmatch(f"{_REPO}/branch/(?P<branch>.+)", path):
            self.hub.branch(match["repo"], match["branch"])
            self.send_json({})
        elif match := re.fullmatch(f"{_REPO}/preupload/(?P<revision>.+)", path):
            self._preupload(match["repo"], match["revision"], json.loads(body)["files"])
        elif match := re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body)["objects"])
        elif match := re.fullmatch(f"{_REPO}/commit/(?P<revision>.+)", path):
            self._commit(match["repo"], match["revision"], map(json.loads, body.splitlines()))
        else:
            raise Refusal(404, "EntryNotFound", f"no such endpoint: {path}")

    def _create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}"
        self.hub.create(repo, private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
        self.send_json({"url": f"{self.hub.endpoint}/{repo}", "name": repo})

    def _validate(self, card: str) -> None:
        metadata = yaml.safe_load(card.split("---\n")[1])
        problems = []
        if metadata.get("license", LICENCES[0]) not in LICENCES:
            problems.append({"message": f'"license" must be one of {list(LICENCES)}'})
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", metadata.get("base_model", "org/name")):
            problems.append({"message": '"base_model" must be a model id'})
        self.send_json({"errors": problems, "warnings": []}, 400 if problems else 200)

    def _preupload(self, repo: str, revision: str, files: list[dict[str, Any]]) -> None:
        there = self.hub.commit(repo, revision).files
        answers = []
        for file in files:
            large = any(fnmatchcase(file["path"], pattern) for pattern in LARGE)
            content = there[file["path"]].read_bytes() if file["path"] in there else None
            oid = None if content is None else hashlib.sha256(content).hexdigest() if large else blob_id(content)
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": answers})

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        if self.hub.full:
            raise Refusal(403, "", "Private repository storage limit reached, please upgrade")
        answers = []
        for wanted in objects:
            answer: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if not self.hub.object(wanted["oid"]).exists():
                upload, verify = f"{self.hub.endpoint}/objects/{wanted['oid']}", f"{self.hub.endpoint}/verify"
                answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            answers.append(answer)
        self.send_json({"transfer": "basic", "objects": answers})

    def _commit(self, repo: str, revision: str, lines: Iterable[dict[str, Any]]) -> None:
        files = {name: path.read_bytes() for name, path in self.hub.commit(repo, revision).files.items()}
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.object(value["oid"]).read_bytes()
                case "deletedFile":
                    del files[value["path"]]
        sha = self.hub.record(repo, revision, files).sha
        self.send_json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{sha}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data


HubUploads.handler = UploadHandler
