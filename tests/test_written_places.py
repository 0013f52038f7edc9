"""Nothing that draftkit writes says where it was made: local folders have names in all files but those that go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Command
from fixtures.checkpoints import pico

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TRAINING = {
    "optimization.max_steps": 2, "save_every": 1, "validation.every": 1, "validation.share": 0.4, "tokens_per_row": 256,
    "options.steps": 2, "device": "cpu",
}  # fmt: skip
# What a run is gone on with, which `push` leaves out, or of which it takes names: of a checkpoint its settings and the
# Trainer's own state, and the base model that its adapter is loaded with.
GOES_ON = re.compile(r".*/checkpoint-\d+/(train\.yaml|trainer_state\.json|adapter/adapter_config\.json)")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models and rows, which is neither in the home nor in the current nor in the temporary one."""
    monkeypatch.setattr("draftkit.hub.local_paths._own_folders", list)
    target = pico.save_tokenizer(pico.save_llama(tmp_path / "some-target"))
    (target / "chat_template.jinja").write_text(TEMPLATE)
    config = pico.eagle3_config() | {"name_or_path": str(target), "_name_or_path": str(target)}
    pico.write_checkpoint(tmp_path / "some-source", config, pico.eagle3_tensors())
    pico.save_tokenizer(pico.save_llama(tmp_path / "some-lm", num_hidden_layers=1))
    config = json.loads((tmp_path / "some-lm" / "config.json").read_text()) | {"_name_or_path": str(target)}
    (tmp_path / "some-lm" / "config.json").write_text(json.dumps(config))
    questions = [{"role": "user", "content": f"What of {number}?"} for number in range(12)]
    for name, rows in {
        "rows": [{"id": str(n), "messages": [question]} for n, question in enumerate(questions)],
        "prompts": [{"question_id": n, "turns": [question["content"]]} for n, question in enumerate(questions)],
        "logs": [{"request": {"messages": [question]}, "response": {"model": "old"}} for question in questions],
    }.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.long
def test_no_file_says_where_it_was_made(place: Path, draftkit: Command) -> None:
    given = set(place.rglob("*"))

    def run(*arguments: object) -> str:
        ran = draftkit(*arguments)
        assert ran.code == 0, f"{arguments}\n{ran.err}"
        return ran.out

    target, unified, data, run_folder = place / "some-target", place / "unified", place / "data.jsonl", place / "run"
    of_target, on_cpu = ("--target", target), ("--device", "cpu")
    settings = [part for name, value in TRAINING.items() for part in ("--set", f"{name}={value}")]

    run("convert", place / "some-source", unified, *of_target)
    run("convert", place / "some-lm", place / "lm", *of_target)
    for to in ("speculators", "sglang", "eagle", "vllm"):
        run("convert", unified, place / to, "--to", to, *of_target, "--allow-lossy")
    run("convert", unified, place / "draft.gguf", "--to", "gguf", *of_target, "--allow-lossy")

    answered = (*of_target, *on_cpu, "--max-new-tokens", 12)
    run("data", "regenerate", place / "rows.jsonl", place / "answers.jsonl", *answered)
    run("data", "prepare", place / "answers.jsonl", data, *of_target)
    run("data", "states", data, place / "states", *of_target, *on_cpu, "--layers", "2,4,5")

    given_data = ("--data", data, *of_target)
    run("train", "--recipe", "eagle3", "--draft", unified, "--out", run_folder, *given_data, *settings)
    run("train", "--recipe", "eagle3", "--states", place / "states", "--out", place / "stored", *given_data, *settings)
    lora = ("--lora", "r=2", "--draft", place / "some-lm", "--out", place / "lora")
    run("train", "--recipe", "draft-model", *lora, *given_data, "--set", "optimization.max_steps=1")
    adapted = ("--traffic", place / "logs.jsonl", "--replay", place / "rows.jsonl", "--held-out", 0.4)
    run("adapt", "--draft", unified, *answered, *adapted, "--out", place / "adapted", *settings[:2])

    drafts = [part for draft in (unified, run_folder / "draft", place / "some-source") for part in ("--draft", draft)]
    result, records = place / "result.json", place / "rounds.jsonl"
    asked = (*of_target, *drafts, *on_cpu, "--prompts", place / "prompts.jsonl", "--max-new-tokens", 8, "--k", 2)
    own = ("eval", *asked, "--limit", 2, "--out", result)
    (place / "printed.json").write_text(run(*own, "--records", records, "--advise", "--json"))
    (place / "printed.csv").write_text(run(*own, "--resume", "--csv"))
    for draft in (unified, run_folder / "draft"):
        run("push", draft, "org/draft", "--results", result, "--dry-run", "--allow-unmeasured")
    run("report", result, "--out", place / "page.html", "--figures", place / "figures")
    run("report", run_folder, "--out", place / "training.html")

    written = sorted(path for path in set(place.rglob("*")) - given if path.is_file())
    telling = {path.relative_to(place).as_posix() for path in written if str(place).encode() in path.read_bytes()}
    assert telling
    assert [name for name in sorted(telling) if not GOES_ON.fullmatch(name)] == []
    cells = json.loads((place / "printed.json").read_text())["cells"]
    assert [cell["draft"] for cell in cells] == ["unified", "run/draft", "some-source"]
    assert {(cell["target"], cell["dataset"]) for cell in cells} == {("some-target", "prompts.jsonl")}
    assert len((place / "printed.csv").read_text().splitlines()) == 1 + len(cells)  # none was measured again
    assert (
        json.loads((place / "speculators" / "config.json").read_text())["speculators_config"]["verifier"][
            "name_or_path"
        ]
        == "some-target"
    )
