"""The pictures of README and site: a terminal as SVG, the report's first screen as PNG, light and dark.

    python -m scripts.docs.pictures

measures the embedded drafts once, into `build/pictures/result.json`; a second call draws that again, after a change of
what is printed. Chromium photographs the report, the one that CHROMIUM names or the system's.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
WORK = ROOT / "build" / "pictures"
ASKED = (
    "draftkit eval --target zoo:target --draft zoo:eagle3 --draft ngram --k 2,4 --concurrency 4 --limit 24 "
    "--max-new-tokens 96 --out result.json"
)
COLUMNS = 100
MOST_BYTES = 200_000
SCHEMES: tuple[tuple[str, Literal["light", "dark"]], ...] = (("report.png", "light"), ("report-dark.png", "dark"))


def terminal() -> str:
    """What the measurement prints on a terminal of 100 columns, in color; measured where `WORK` has no result yet."""
    WORK.mkdir(parents=True, exist_ok=True)
    resumed = ["--resume"] if (WORK / "result.json").is_file() else []
    command = [sys.executable, "-m", *shlex.split(ASKED), *resumed]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, cwd=WORK, env=environment) as running:
        os.close(theirs)
        shown = _read(ours)
        assert running.stderr is not None
        said = running.stderr.read().decode()
    if running.returncode:
        raise SystemExit(said)
    hints = [line for line in said.splitlines() if line.startswith("next: ")]
    return _anywhere(shown.replace("\r\n", "\n") + "\n".join(hints))


def _anywhere(text: str) -> str:
    """Text without the names of folders of this machine."""
    return text.replace(f"{WORK}/", "").replace(str(ROOT), "…")


def _read(descriptor: int) -> str:
    """All that is written to a terminal, until nobody holds its other end."""
    parts = []
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except OSError:  # how Linux says that the other end is closed
        pass
    return b"".join(parts).decode()


def drawn(shown: str) -> str:
    """A terminal as an SVG that asks for nothing: its fonts are the reader's own."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text(f"$ {ASKED}"))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="draftkit")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")


def photograph() -> None:
    """The first screen of the report in both color schemes."""
    report = WORK / "report.html"
    subprocess.run(
        [sys.executable, "-m", "draftkit", "report", "result.json", "--out", report.name], cwd=WORK, check=True
    )
    report.write_text(_anywhere(report.read_text(encoding="utf-8")), encoding="utf-8")
    with sync_playwright() as driver:
        program = os.environ.get("CHROMIUM") or shutil.which("chromium") or driver.chromium.executable_path
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, scheme in SCHEMES:
            page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme=scheme)
            page.goto(report.as_uri())
            page.screenshot(path=PICTURES / name)
        browser.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "terminal.svg").write_text(drawn(terminal()), encoding="utf-8")
    photograph()
    for picture in PICTURES.iterdir():
        if picture.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{picture} has {picture.stat().st_size:,} bytes; {MOST_BYTES:,} are the most")


if __name__ == "__main__":
    main()
