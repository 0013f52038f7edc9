"""The documentation: what its pages tell users to type works, and the site builds without a broken link."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Command
from pages import Step, files, likeness, rewrite, steps

import draftkit as package

PACKAGE = Path(package.__file__).parent
ROOT = PACKAGE.parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN = [DOCS / "index.md", *sorted(DOCS.glob("tutorials/*.md"))]
SHOWN = r"^next: |held out: "  # of stderr; the rest is progress
ALIKE = 0.6  # the least likeness of what is printed to what a page shows


@pytest.fixture
def typed(draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Step], str]:
    """Types a step's commands in a folder of their own, and returns what they print on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    def run(step: Step) -> str:
        printed = ""
        for program, *arguments in step.commands:
            if program != "draftkit":  # a script of the checkout
                subprocess.run([sys.executable, *arguments], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
                continue
            ran = draftkit(*arguments)
            assert ran.code == 0, f"{shlex.join(arguments)}\n{ran.err}"
            said = [re.sub(r".*it/s\]", "", line) for line in ran.err.splitlines() if re.search(SHOWN, line)]
            hints = [line for line in said if line.startswith("next: ")]
            logged = [line for line in said if line not in hints]
            printed += "".join(f"{line}\n" for line in (*logged, ran.out.rstrip("\n"), *hints))
        return printed.replace(f"{tmp_path}/", "").replace(str(PACKAGE), "…/draftkit").lstrip("\n")

    return run


def test_the_pictures_are_of_readmes_commands() -> None:
    script = (ROOT / "scripts" / "docs" / "pictures.py").read_text(encoding="utf-8")
    asked = "".join(re.findall(r'"(.*)"', script.partition("ASKED = (")[2].partition(")")[0]))
    assert asked.startswith("draftkit eval ")
    assert asked in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    shown = re.sub(r"<[^>]*>|&#160;|\s", "", (DOCS / "pictures" / "terminal.svg").read_text(encoding="utf-8"))
    assert asked.replace(" ", "") in shown


@pytest.mark.long
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_and_print_what_it_shows(
    page: Path, typed: Callable[[Step], str], tmp_path: Path
) -> None:
    """`DRAFTKIT_GOLDEN=write` writes what they print into the page; figures of time, and verdicts on them, vary."""
    for name, text in files(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    printed: list[tuple[Step, str]] = []

    def run(step: Step) -> str:
        printed.append((step, typed(step)))
        return printed[-1][1]

    if os.environ.get("DRAFTKIT_GOLDEN") == "write":
        rewrite(page, run)
    else:
        for step in steps(page):
            output = run(step)
            shown = step.output or ""
            alike = likeness(shown, output) > ALIKE if shown.strip() else not output.strip()
            assert alike, f"{step.commands}\n{output}"
    lengths = [length_of(output) for step, output in printed if step.commands[0][1] == "eval"]
    if page.stem == "find-out-why":
        broken, mended = lengths
        assert mended > broken + 0.5
    if page.stem == "train-a-draft":  # from a draft of which nothing is accepted
        assert lengths[-1] > 1.1


def length_of(printed: str) -> float:
    """The first acceptance length in what `eval` prints, which stands before its interval."""
    found = re.search(r"(\d+\.\d\d) \[", printed)
    assert found, printed
    return float(found[1])


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
