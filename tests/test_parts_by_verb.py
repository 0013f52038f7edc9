"""Each kind of part that a message may have, with each command that reads rows: it is used, or refused by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints.processors import data_uri, picture, save_visual_target
from fixtures.servers.completions_server import CompletionsServer
from fixtures.servers.seeing import seeing
from transformers.utils import logging

from draftkit.data.endpoints import EndpointResponder
from draftkit.data.loss_mask import Renderer
from draftkit.data.prepare import samples_of
from draftkit.data.regenerate import regenerate
from draftkit.data.responses import Responder, ResponseFile, Sampling, engine_responder
from draftkit.data.rows import read_rows, rows_read_by
from draftkit.data.samples import RowCounts
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError
from draftkit.evaluate.engine import BaseEngine
from draftkit.evaluate.engines.llama_cpp import LlamaCppEngine
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.engines.server import ServerEngine
from draftkit.evaluate.engines.vllm import VllmEngine
from draftkit.evaluate.job import Job
from draftkit.evaluate.prompts import load_prompt_set
from draftkit.loading import OpenedTarget, open_target
from draftkit.requests import SamplingParameters
from draftkit.results.settings import Settings, Sweep
from draftkit.train.adapt import AdaptSettings, _requests

torch.set_num_threads(1)
logging.disable_progress_bar()

PARTS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "What is it?"},
    "file": {"type": "image_url", "image_url": {"url": "a.png"}},
    "base64": {"type": "image_url", "image_url": {"url": data_uri(picture(28, 28, 1)), "detail": "low"}},
    "address": {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
    "responses": {"type": "input_image", "image_url": "a.png"},
    "processor": {"type": "image", "image": "a.png"},
    "sound": {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}},
    "video": {"type": "video_url", "video_url": {"url": "a.mp4"}},
    "new": {"type": "smell", "smell": "rose"},
}
NEVER = "never fetched here"
DONE = dict.fromkeys(PARTS, "done")
OTHERS = {"video": "video_url", "new": "smell"}
HERE = DONE | OTHERS | {"address": NEVER, "sound": "input_audio"}  # what a target in this process does with each
EVAL = HERE | {"address": "unreadable image"}
SERVED = DONE | OTHERS
TEXT = OTHERS | {"text": "done", "sound": "input_audio", "responses": "input_image", "processor": "image"}
TEXT |= dict.fromkeys(("file", "base64", "address"), "image_url")


def counts(report: RowCounts, left_out: object) -> str:
    return f"{report.to_dict()['reasons']} {left_out}"


def prepared(rows: Path, target: OpenedTarget, out: Path) -> str:
    left_out, report = rows_read_by(target), RowCounts()
    renderer = Renderer(load_tokenizer(target), load_vision=lambda: target.vision)
    list(samples_of(read_rows(str(rows), left_out=left_out), renderer, report))
    return "done" if report.samples == 2 else counts(report, left_out)


def regenerated(rows: Path, target: OpenedTarget, out: Path, responder: Responder, *, served: bool) -> str:
    left_out = rows_read_by(target, served=served)
    renderer = Renderer(load_tokenizer(target), load_vision=lambda: target.vision)
    given = read_rows(str(rows), left_out=left_out)
    report = regenerate(given, renderer, responder, ResponseFile(out, {}), served=served)
    return "done" if report.samples == 2 else counts(report, left_out)


SAMPLING = Sampling(SamplingParameters(), 8, frozenset({2}))


def answered_here(rows: Path, target: OpenedTarget, out: Path) -> str:
    return regenerated(rows, target, out, engine_responder(target.with_images(), SAMPLING, 2), served=False)


def answered_there(rows: Path, target: OpenedTarget, out: Path) -> str:
    with CompletionsServer(seeing(target)) as server:
        return regenerated(rows, target, out, EndpointResponder(server.endpoint, SAMPLING, 2), served=True)


def adapted(rows: Path, target: OpenedTarget, *endpoints: str) -> str:
    """Which requests are taken of a log; they are answered as `data regenerate` does it."""
    said: list[str] = []
    settings = AdaptSettings(draft="d", target="t", traffic=str(rows), replay="none", out="o", endpoints=endpoints)
    requests = _requests(settings, target, said.append)
    return "done" if len(requests.logged) == 2 else str(said)


def measured(rows: Path, target: OpenedTarget, engine: type[BaseEngine]) -> str:
    """Which prompts become requests of an engine."""
    with ExitStack() as stack:
        job = Job(target, [], Sweep.of(Settings(prompts=str(rows))), stack, takes=engine.takes)
        asked = job.conversations(job.sweep.first).first_requests
        return "done" if len(asked) == 2 else str(job.prompts.left_out)


def asked_alone(rows: Path, target: OpenedTarget, out: Path) -> str:
    found = load_prompt_set(str(rows))
    return "done" if len(found.prompts) == 2 else str(found.left_out)


VERBS: dict[str, tuple[Callable[[Path, OpenedTarget, Path], str], dict[str, str]]] = {
    "data prepare": (prepared, HERE),
    "data regenerate": (answered_here, HERE),
    "data regenerate --endpoint": (answered_there, SERVED),
    "adapt": (lambda rows, target, _: adapted(rows, target), HERE | {"address": "done"}),  # refused when it is answered
    "adapt --endpoint": (lambda rows, target, _: adapted(rows, target, "http://host/v1"), SERVED),
    "eval": (lambda rows, target, _: measured(rows, target, OwnEngine), EVAL),
    "eval --engine vllm": (
        lambda rows, target, _: measured(rows, target, VllmEngine),
        EVAL,
    ),
    "eval --server": (lambda rows, target, _: measured(rows, target, ServerEngine), SERVED),
    "eval --engine llama.cpp": (lambda rows, target, _: measured(rows, target, LlamaCppEngine), TEXT),
    "doctor, certify, calibrate, plan": (asked_alone, TEXT),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> OpenedTarget:
    return open_target(str(save_visual_target(tmp_path_factory.mktemp("target"), "qwen2_5_vl")))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_used_or_refused_by_name(part: str, verb: str, target: OpenedTarget, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    answer = {"role": "assistant", "content": "A cat."}
    rows = [
        {"id": "part", "messages": [{"role": "user", "content": [PARTS["text"], PARTS[part]]}, answer]},
        {"id": "beside", "messages": [{"role": "user", "content": "Why?"}, answer]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, expected = VERBS[verb]
    assert expected[part] in run(path, target, tmp_path / "out.jsonl")


def test_a_target_of_text_uses_no_other_part(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for part, expected in TEXT.items():
        rows = [{"messages": [{"role": "user", "content": [PARTS[part]]}, {"role": "assistant", "content": "No."}]}]
        path.write_text(json.dumps(rows[0]) + "\n")
        try:
            found = prepared(path, open_target("zoo:target"), tmp_path / "out")
        except DraftkitError as error:
            found = str(error)
        assert part == "text" or (expected in found and "the target reads text alone" in found)
