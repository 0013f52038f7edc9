"""The documentation: what its pages tell users to type works, and the site builds without a broken link."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command, Outcome
from fixtures.checkpoints import mtp_targets, pico

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
LOGS = [
    {
        "id": str(number),
        "messages": [{"role": "user", "content": f"Write a function that adds {number}."}],
    }
    for number in range(8)
]


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_run(
    page: Path, draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOGS))
    if page.stem == "check-mtp-heads":
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOGS))
        target = pico.save_tokenizer(mtp_targets.save_with_head("glm4_moe", tmp_path / "TARGET").folder)
        (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    lines = commands(page)
    assert len(lines) > 1
    for program, *arguments in lines:
        assert program == "draftkit"
        ran = draftkit(*arguments)
        assert ran.code == 0, f"{shlex.join(arguments)}\n{ran.err}"


def of_page(name: str, command: str) -> list[str]:
    """The arguments of the last line of a tutorial that runs a command."""
    return next(line[1:] for line in reversed(commands(DOCS / f"tutorials/{name}.md")) if line[1] == command)


def acceptance_length(ran: Outcome) -> float:
    assert ran.code == 0, ran.err
    return float(json.loads(ran.out)["cells"][0]["acceptance_length"]["mean"])


@pytest.mark.long
@pytest.mark.xfail(strict=True, reason="step 4: the draft that the tutorial breaks accepts more than the whole one")
def test_the_draft_that_a_tutorial_breaks_is_worse(
    draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert draftkit(*of_page("find-out-why", "convert")).code == 0
    measure = of_page("find-out-why", "eval")
    broken = acceptance_length(draftkit(*measure, "--json"))
    whole = acceptance_length(draftkit(*("zoo:eagle3" if word == "broken" else word for word in measure), "--json"))
    assert broken < whole


@pytest.mark.long
@pytest.mark.xfail(strict=True, reason="step 4: the tutorial trains for two steps, after which no draft is accepted")
def test_the_draft_that_a_tutorial_trains_is_accepted(
    draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With answers that are not the target's own, which take long."""
    monkeypatch.chdir(tmp_path)
    answer = {"role": "assistant", "content": "def add(x):\n    return x + 1"}
    rows = [row | {"messages": [*row["messages"], answer]} for row in LOGS]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draftkit("data", "prepare", "answers.jsonl", "samples.jsonl", "--target", "zoo:target").code == 0
    assert draftkit(*of_page("train-a-draft", "train")).code == 0
    measure = [*of_page("train-a-draft", "eval"), "--limit", 1, "--max-new-tokens", 8, "--json"]
    assert acceptance_length(draftkit(*measure)) > 1.1


@pytest.mark.long
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    """From what git has, as on a clean clone; and commands can be pasted: hyphens and quotes are what a shell knows."""
    sources = Path(shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "reference")))
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "dirhtml"]
    built = subprocess.run([*command, sources, tmp_path / "site"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for page in ("tutorials/serve-faster", "reference/commands", "reference/findings", "reference/api"):
        assert (tmp_path / "site" / page / "index.html").is_file()
    text = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "site").rglob("*.html"))
    assert not re.findall(r"[–—][a-z]\S*|[“”‘’]", text)
    assert "norm_before_residual" in (sources / "reference" / "facts.md").read_text()
    assert "### layer-ids-as-outputs" in (sources / "reference" / "findings.md").read_text()
