"""A draft is adapted to a log with images: a server answers, their states are the target's, and both are judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints.processors import picture, save_visual_target
from fixtures.servers.completions_server import CompletionsServer
from fixtures.servers.seeing import seeing
from fixtures.training.image_samples import write_image_samples
from transformers.utils import logging

from draftkit.data.sample_files import read_samples
from draftkit.loading import open_target
from draftkit.train.adapt import AdaptSettings, _requests, adapt_draft
from draftkit.train.config import TrainConfig
from draftkit.train.run import train_draft
from draftkit.train.settings import Optimization

torch.set_num_threads(1)
logging.disable_progress_bar()


def log_of(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        (folder / f"{number}.png").write_bytes(picture(56, 28, number))
        image = {"type": "image_url", "image_url": {"url": f"{number}.png"}}
        parts = [image, {"type": "text", "text": f"And {number}?"}]
        request = {"messages": [{"role": "user", "content": parts if number % 4 else f"Why {number}?"}]}
        lines.append({"request": request, "response": {"model": "other", "choices": [{"message": {"content": "No."}}]}})
    lines.append({"request": {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "response": {}})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "log.jsonl"


@pytest.mark.long
@pytest.mark.parametrize("served", [True, False], ids=["served", "in-process"])
def test_an_adaptation_reads_images(served: bool, tmp_path: Path) -> None:
    target = save_visual_target(tmp_path / "target", "qwen2_5_vl")
    data = write_image_samples(target, tmp_path / "first" / "samples.jsonl", count=2, new=8)
    config = TrainConfig(
        recipe="eagle3", target=str(target), data=str(data), out=str(tmp_path / "run"), device="cpu",
        tokens_per_row=256, optimization=Optimization(max_steps=1), options={"layers": (1, 2, 3)},
    )  # fmt: skip
    draft = train_draft(config).draft
    log, out = log_of(tmp_path / "log", 12), tmp_path / "out"
    with CompletionsServer(seeing(open_target(str(target)))) as server:
        settings = AdaptSettings(
            draft=str(draft), target=str(target), traffic=str(log), out=str(out), replay="none", held_out=0.4,
            max_new_tokens=8, endpoints=(server.endpoint,) if served else (), device="cpu",
            training=("optimization.max_steps=1", "tokens_per_row=256", "options.steps=2"),
        )  # fmt: skip
        said: list[str] = []
        adapted = adapt_draft(settings, said=said.append)
        assert adapted.draft is not None
        posted = len(server.requests)
        assert adapt_draft(settings).answers == adapted.answers  # all is there
        assert len(server.requests) == posted == (12 if served else 0)
    assert any("1 row is left out" in text and "video_url" in text for text in said)
    samples = [*read_samples(out / "training.jsonl"), *read_samples(out / "held-out.jsonl")]
    assert (len(samples), sum(len(sample.images) for sample in samples)) == (12, 9)
    assert any(found.name == "traffic" and found.samples for found in adapted.slices)


def test_general_rows_with_images_lie_in_one_folder_with_the_log(tmp_path: Path) -> None:
    target = open_target(str(save_visual_target(tmp_path / "target", "llava")))
    log, general = log_of(tmp_path / "log", 4), log_of(tmp_path / "general", 4)
    rows = [json.loads(line)["request"] for line in general.read_text().splitlines()[:4]]
    general.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for root, kept, images in ((None, 1, False), (str(tmp_path / "log"), 4, True)):
        settings = AdaptSettings(
            draft="d", target="t", traffic=str(log), replay=str(general), out="o", media_root=root,
        )  # fmt: skip
        said: list[str] = []
        requests = _requests(settings, target, said.append)
        assert (len(requests.logged), requests.show_images) == (4, True)
        assert len(requests.general or ()) == kept
        assert any("lie in the folder of the log" in text for text in said) is not images
