"""What a Hub answers: listings, file names, headers and bodies."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants as constants
from hub_server import Handler, HubServer

from draftkit.hub.locate import locate
from fuzzing.judge import Kind, refusal
from fuzzing.mutate import changed, written


class Answers(Handler):
    """The answers of the Hub, changed by the random numbers of the case."""

    hub: FuzzedHub

    def send_json(self, value: object, status: int = 200) -> None:
        rng = self.hub.rng
        if rng.random() < 0.5:
            value = changed(
                rng,
                value,
                ("rfilename", "sha", "siblings", "path", "size", "lfs", "oid", "type"),
                rng.choice([1, 1, 2]),
            )
        body = written(rng, value)
        self.send(rng.choice([200] * 12 + [204, 400, 404, 422]), {"Content-Type": "application/json"}, body)

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        rng = self.hub.rng
        if "ETag" in headers and rng.random() < 0.3:
            wrong = rng.choice(['""', "x", '"../../x"', 'W/"a"', '"' + "0" * 64 + '"', '"' + "a" * 300 + '"'])
            headers = {**headers, rng.choice(["ETag", "X-Linked-Etag", "X-Repo-Commit", "X-Linked-Size"]): wrong}
        if rng.random() < 0.05 and body:
            body = body[:-1]
        super().send(status, headers, body)


class FuzzedHub(HubServer):
    handler = Answers
    rng: random.Random


class Hub(Kind):
    """`org/draft` from a Hub that answers wrongly: a folder with the wanted files, or one message."""

    share = 0.5

    def __init__(self, corpus: Path):
        super().__init__(corpus)
        self.source = corpus / "draft"
        self.source.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (self.source / name).write_text(json.dumps({"name": name}))

    def run(self, rng: random.Random, folder: Path) -> bool:
        hub = FuzzedHub({"org/draft": self.source})
        hub.rng = rng
        outside = set(folder.rglob("*"))
        with hub, at(hub.endpoint, folder / "cache"):
            located: list[Any] = []
            refused = refusal(lambda: located.append(locate("org/draft")))
        assert {path.name for path in folder.iterdir()} <= {"cache"} | {path.name for path in outside}
        if refused is None:
            assert located[0].path.is_relative_to(folder / "cache")
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return refused is None


class at:
    """The Hub's client asks this endpoint and keeps files here."""

    def __init__(self, endpoint: str, cache: Path):
        self.new = {
            "ENDPOINT": endpoint,
            "HF_HUB_CACHE": str(cache),
            "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        }

    def __enter__(self) -> None:
        self.before = {name: getattr(constants, name) for name in self.new}
        self._set(self.new)

    def __exit__(self, *exception: object) -> None:
        self._set(self.before)

    def _set(self, values: Mapping[str, str]) -> None:
        from huggingface_hub import hf_api

        for name, value in values.items():
            setattr(constants, name, value)
        hf_api.api.endpoint = values["ENDPOINT"]


KINDS: dict[str, Callable[[Path], Kind]] = {"hub": Hub}
