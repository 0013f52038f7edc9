"""`draftkit adapt`, from a log to an adapted draft, and what it says of the slices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints.int8 import save_int8
from fixtures.fuzzing.killed import killed_at_rename
from fixtures.servers.completions_server import Answer, CompletionsServer

from draftkit import zoo
from draftkit.convert.api import convert_checkpoint
from draftkit.data.responses import NextRow, Responded
from draftkit.data.rows import read_rows
from draftkit.data.sample_files import read_samples
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError
from draftkit.layout.folder import read_draft
from draftkit.loading import open_draft, open_target
from draftkit.train import adapt
from draftkit.train.adapt import AdaptSettings, _check_settings, _run, _say_what_changed, adapt_draft, compare
from draftkit.train.settings import LoraSettings
from draftkit.train.tuner import SimulatedAcceptance

torch.set_num_threads(1)


def test_slices_before_and_after() -> None:
    """Of which the log lost acceptance, against the general text, and what was won; small ones are left out."""
    slices = (
        ["source=traffic language=de"] * 20 + ["source=traffic language=en"] * 20 + ["source=general language=en"] * 20
    )
    slices += ["source=traffic language=fr"] * 3

    def simulated(of_german: int) -> SimulatedAcceptance:
        accepted = [of_german if "de" in name else 20 + n % 3 for n, name in enumerate(slices)]
        return SimulatedAcceptance({n: (a + n % 2, 10) for n, a in enumerate(accepted)}, tuple(slices))

    found = {part.name: part for part in compare(simulated(5), simulated(15))}
    assert list(found) == ["general", "traffic", "language=de", "language=en"]
    german, english = found["language=de"], found["language=en"]
    assert (german.samples, english.samples) == (20, 20)  # the general English is apart
    assert (german.lost, english.lost, found["general"].lost) == (True, False, False)
    assert german.before.mean == pytest.approx(1.55)
    assert german.gained.mean == pytest.approx(1.0)
    assert german.gained.low > 0.9
    assert (english.gained.low, english.gained.high) == (0, 0)
    assert found["general"].behind is None
    assert german.behind is not None
    assert german.behind.mean == pytest.approx(german.before.mean - found["general"].before.mean)


def test_a_draft_of_another_precision_is_told_before_it_is_adapted(tmp_path: Path) -> None:
    """As what it is: the remedy is what is being done."""
    folder = Path(shutil.copytree(zoo.path("target"), tmp_path / "target-w8a8"))
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "compressed-tensors", "config_groups": {}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    heard: list[str] = []
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        for target in (str(folder), "zoo:target"):
            _say_what_changed("zoo:eagle3", draft, open_target(target), heard.append)
    assert heard[0].startswith("zoo:eagle3 says that it was")
    assert heard[1].endswith("the draft was trained on another precision, zoo:target")
    assert len(heard) == 2


def logs(path: Path) -> Path:
    """What a server of an older target has logged."""
    rows = [json.loads(line) for line in zoo.prompts_path().read_text().splitlines()[:36]]
    records = []
    for number, row in enumerate(rows):
        messages = [{"role": "user", "content": row["turns"][0]}]
        answer = {"role": "assistant", "content": "I do not know."}
        model = "target" if number % 12 == 0 else "older"
        records.append(
            {"request": {"messages": messages}, "response": {"model": model, "choices": [{"message": answer}]}}
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def general(path: Path) -> Path:
    rows = [json.loads(line) for line in zoo.prompts_path().read_text().splitlines()[36:56]]
    path.write_text(
        "".join(json.dumps({"id": f"g{n}", "prompt": row["turns"][0]}) + "\n" for n, row in enumerate(rows))
    )
    return path


@pytest.mark.long
def test_from_a_log_to_an_adapted_draft(draftkit: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = (
        "adapt", "--draft", "zoo:eagle3", "--target", "zoo:target", "--traffic", logs(tmp_path / "logs.jsonl"),
        "--own", "target", "--replay", general(tmp_path / "general.jsonl"), "--replay-share", 0.3, "--held-out", 0.4,
        "--max-new-tokens", 12, "--set", "optimization.max_steps=2", "--set", "tokens_per_row=1024",
        "--set", "options.steps=3", "--json",
    )  # fmt: skip
    ran = draftkit(*flags, "--out", out)
    assert ran.code == 0, ran.err
    printed = json.loads(ran.out)
    assert printed["draft"] == str(out / "draft")
    assert read_draft(out / "draft").spec.method == "eagle3"
    assert json.loads((out / "adapt.json").read_text()) == printed | {"draft": "out/draft"}
    training, judging = (list(read_samples(out / name)) for name in ("training.jsonl", "held-out.jsonl"))
    assert printed["answers"] == len(training)
    names = {sample.id for sample in training} | {sample.id for sample in judging}
    assert len(names) == 36 + 16
    assert sum(name.startswith("general-") for name in names) == 16
    assert not {s.id for s in training} & {s.id for s in judging}
    # The three answers of the target's own are in the log, all others are new.
    answered = {row.id for row in read_rows(str(out / "answers.jsonl"))}
    assert len(names - answered) == 3
    slices = {part["name"]: part for part in printed["slices"]}
    assert {"general", "traffic", "language=en", "tools=no", "thinking=no", "length=short"} <= slices.keys()
    assert slices["general"]["samples"] + slices["traffic"]["samples"] == len(judging)
    for part in slices.values():
        assert part["before"]["low"] <= part["before"]["mean"] <= part["before"]["high"]
        assert part["gained"]["mean"] == pytest.approx(part["after"]["mean"] - part["before"]["mean"])

    again = draftkit(*flags, "--out", out)  # nothing is left to do
    assert (again.code, again.out) == (0, ran.out)
    other = draftkit(*flags, "--out", out, "--k", 3)
    assert other.code == 1
    assert "begun with other settings:\n    k: 4, now 3" in other.err


class Served:
    """A server of a target that asks about numbers and answers in tokens made of its prompt; it goes away after so many
    answers."""

    def __init__(self, until: int):
        self.until = until
        self.answers: dict[tuple[int, ...], tuple[int, ...]] = {}  # of each prompt
        self._tokenizer = load_tokenizer("zoo:target")

    def __call__(self, body: dict[str, Any]) -> Answer:
        prompt, end = tuple(body["prompt"]), min(body["stop_token_ids"])
        if body["temperature"]:
            question = f"What does the function number {body['seed'] % 10**6} return to its caller?"
            answer = (*self._tokenizer.tokenizer(question, add_special_tokens=False).input_ids, end)
        elif self.until == 0:
            return 401, {"error": "the key is no longer good"}
        else:
            self.until -= 1
            answer = self.answers[prompt] = (*prompt[-12:-6], len(prompt), end)
        return 200, {"choices": [{"index": 0, "text": "x", "token_ids": answer, "prompt_token_ids": prompt}]}


@pytest.mark.slow
def test_an_endpoint_writes_prompts_and_answers(draftkit: Command, tmp_path: Path) -> None:
    """They are what training and judging read, and what is there is not asked for again after the server went away."""
    out, served = tmp_path / "out", Served(until=14)
    with CompletionsServer(served, models=("other", "target")) as server:  # type: ignore[arg-type]
        flags = (
            "adapt", "--draft", "zoo:eagle3", "--target", "zoo:target", "--traffic", logs(tmp_path / "logs.jsonl"),
            "--limit", 12, "--held-out", 0.4, "--max-new-tokens", 12, "--set", "optimization.max_steps=1",
            "--set", "tokens_per_row=1024", "--set", "options.steps=2", "--out", out, "--concurrency", 2,
            "--endpoint", server.endpoint,
        )  # fmt: skip
        unnamed = draftkit(*flags)
        assert (unnamed.code, "say which one with --served-model" in unnamed.err, out.exists()) == (1, True, False)
        stopped = draftkit(*flags, "--served-model", "target")
        assert (stopped.code, "401 Unauthorized" in stopped.err) == (1, True)
        there = [row.id for row in read_rows(str(out / "answers.jsonl"))]
        assert there
        served.until, asked = 1000, len(server.requests)
        ran = draftkit(*flags, "--served-model", "target")
        assert ran.code == 0, ran.err
    assert {body["model"] for body in server.requests} == {"target"}
    assert [row.id for row in read_rows(str(out / "answers.jsonl"))][: len(there)] == there
    # The prompts were all there, and those answers. (What was under way when the server went away may count as asked.)
    assert len({tuple(body["prompt"]) for body in server.requests[asked:]}) == 12 + 16 - len(there)
    assert {body["temperature"] for body in server.requests[asked:]} == {0.0}
    drawn = [body["temperature"] for body in server.requests]
    assert set(drawn[: drawn.index(0.0)]) == {1.0}  # prompts are drawn, answers are as they are to be served
    assert set(drawn[drawn.index(0.0) :]) == {0.0}
    samples = [*read_samples(out / "training.jsonl"), *read_samples(out / "held-out.jsonl")]
    assert len(samples) == 12 + 16
    for sample in samples:
        begin, end = sample.spans[-1]
        tokens = tuple(sample.tokens.tolist())
        assert served.answers[tokens[:begin]] == tokens[begin:end]


@pytest.mark.long
def test_a_served_target_that_is_quantized(tmp_path: Path) -> None:
    """Its server answers; the states are those of its weights made plain, here."""
    target, draft = save_int8(zoo.path("target"), tmp_path / "target-w8a8"), tmp_path / "draft"
    convert_checkpoint("zoo:eagle3", draft, target="zoo:target")
    served, said, out = Served(until=1000), list[str](), tmp_path / "out"
    with CompletionsServer(served) as server:  # type: ignore[arg-type]
        settings = AdaptSettings(
            draft=str(draft), target=str(target), traffic=str(logs(tmp_path / "logs.jsonl")), out=str(out),
            replay="none", limit=8, held_out=0.4, max_new_tokens=12, endpoints=(server.endpoint,), device="cpu",
            training=("optimization.max_steps=1", "tokens_per_row=512", "options.steps=2"),
        )  # fmt: skip
        adapted = adapt_draft(settings, said=said.append)
        assert len(server.requests) == 8
    assert (
        "the target is quantized (compressed-tensors W8A16), and the draft was trained on another precision" in said[1]
    )
    assert adapted.draft is not None
    assert read_draft(adapted.draft).provenance.target == target.name


def test_settings_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    given = {"draft": "d", "target": "t", "traffic": "l", "out": str(tmp_path)}
    for name, value in {"replay_share": 1.0, "held_out": 0.0}.items():
        with pytest.raises(DraftkitError, match=f"{name} is {value}"):
            AdaptSettings(**given, **{name: value})  # type: ignore[arg-type]
    (tmp_path / "mine").touch()
    with pytest.raises(DraftkitError, match="the output is already there"):
        _check_settings(tmp_path / "adapt-settings.json", AdaptSettings(**given), {})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_kill_in_the_very_first_write_does_not_end_an_adaptation(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = AdaptSettings(draft="d", target="t", traffic="l", out=str(out))
    assert killed_at_rename(0, lambda: _check_settings(out / "adapt-settings.json", settings, {}))
    assert [path.name[:24] for path in out.iterdir()] == [".adapt-settings.json.tmp"]
    _check_settings(out / "adapt-settings.json", settings, {})
    assert [path.name for path in out.iterdir()] == ["adapt-settings.json"]


class Stopped(Exception):
    """When the answers are there, before anything is judged."""


def stop(text: str) -> None:
    if text.startswith("judging"):
        raise Stopped


class Answering:
    """A responder that answers alike each time."""

    def respond(self, ask: NextRow) -> Iterator[Responded]:
        while (prompt := ask()) is not None:
            yield prompt, (*prompt.tokens[-4:], 0)


def changed(weights: Path) -> None:
    """Another model of the same shapes."""
    if weights.suffix == ".safetensors":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
        return
    tensors = torch.load(weights, weights_only=True)
    torch.save(tensors | {"norm.weight": tensors["norm.weight"] + 1}, weights)


def test_an_adaptation_goes_on_only_with_what_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names stay, and what lies there is replaced: the target, the draft, the log."""
    monkeypatch.setattr(adapt, "engine_responder", lambda *_, **__: Answering())
    target, draft, out = tmp_path / "target", tmp_path / "draft", tmp_path / "out"
    shutil.copytree(zoo.path("target"), target)
    shutil.copytree(zoo.path("eagle3"), draft)
    log = logs(tmp_path / "logs.jsonl")
    settings = AdaptSettings(draft=str(draft), target=str(target), traffic=str(log), out=str(out), replay="none")
    for _ in range(2):
        with pytest.raises(Stopped):
            adapt_draft(settings, said=stop)
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    for weights, name in ((target / "model.safetensors", "target"), (draft / "pytorch_model.bin", "draft")):
        before = weights.read_bytes()
        changed(weights)
        with pytest.raises(DraftkitError, match=f"other settings:\n    {name}_sha256: '"):
            adapt_draft(settings, said=stop)
        weights.write_bytes(before)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[1:]))
    with pytest.raises(DraftkitError, match="1 answers are to requests that are no longer there"):
        adapt_draft(settings, said=stop)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_adapters_are_those_of_a_training_run(tmp_path: Path) -> None:
    given = {"draft": "d", "target": "t", "traffic": "l", "out": str(tmp_path)}
    for asked, run in ((None, None), ({}, LoraSettings()), ({"r": 4}, LoraSettings(r=4))):
        assert _run(AdaptSettings(**given, lora=asked), "eagle3").lora == run  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"traffic": "absent.jsonl"}, "there is no file"),
        ({"replay": "./absent.jsonl"}, "there is no file"),
        ({"training": ("optimization.lr=1e-4", "nonsense=1")}, "nonsense"),
        ({"draft": "ngram:2-4"}, "no recipe trains"),
    ],
)
def test_bad_input_leaves_nothing_behind(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    given = {
        "draft": "zoo:eagle3", "target": "zoo:target", "traffic": str(logs(tmp_path / "logs.jsonl")),
        "out": str(tmp_path / "out"),
    }  # fmt: skip
    with pytest.raises(DraftkitError, match=reason):
        adapt_draft(AdaptSettings(**given | changes))
    assert not (tmp_path / "out").exists()
