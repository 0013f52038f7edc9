"""Stdout and stderr that are not UTF-8: no command fails over what they lack, and no data is damaged."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.report_results import full_result

from draftkit.cli import main, output
from draftkit.doctor.diagnose import Diagnosis
from draftkit.doctor.measure import Tried
from draftkit.finding import Finding
from draftkit.results.cell import Interval
from draftkit.results.record import Result, result_from

NAME = "draft → ü"
ENCODINGS = ("ascii", "cp1252", "latin-1")
GAIN = Interval(0.4, 0.3, 0.5, 8)
DIAGNOSIS = Diagnosis(
    "target", NAME, "eagle3", None, None, (Finding("rope", "warning", "1e4 → 1e6, 1.5 ×"),), (),
    (Tried("rope", "rope_theta 1e4 → 1e6", 2.5, 2.9, GAIN, True, True, f"draftkit convert '{NAME}'", ""),), {}, {},
)  # fmt: skip

InEncoding = Callable[..., tuple[bytes, bytes]]


@pytest.fixture
def in_encoding(monkeypatch: pytest.MonkeyPatch) -> InEncoding:
    """What a command that succeeds writes to stdout and stderr of an encoding."""

    def run(encoding: str, *arguments: object) -> tuple[bytes, bytes]:
        raw = [BytesIO(), BytesIO()]
        streams = [TextIOWrapper(one, encoding=encoding, errors="strict") for one in raw]
        with monkeypatch.context() as during:
            for name, stream in zip(("stdout", "stderr"), streams, strict=True):
                during.setattr(sys, name, stream)
            during.setattr(sys, "argv", ["draftkit", *map(str, arguments)])
            with pytest.raises(SystemExit) as exit:
                main()
        for stream in streams:
            stream.flush()
        out, err = (one.getvalue() for one in raw)
        assert not exit.value.code, err
        return out, err

    return run


def measured() -> Result:
    """A result whose draft has a name that no small encoding holds."""
    found = full_result()
    for cell in found["cells"]:
        cell["draft"] = cell["draft"].replace("zoo:eagle3", NAME)
    return result_from(found, Path("result.json"))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_command_fails_over_what_a_stream_lacks(
    encoding: str, in_encoding: InEncoding, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = pico.write_checkpoint(tmp_path / "source →", pico.eagle3_config(), pico.eagle3_tensors())
    out, _ = in_encoding(encoding, "convert", source, NAME, "--target", target)
    assert b"written: eagle3, 14 tensors, draft ? " in out
    assert b"/source ? (eagle3)" in out
    assert "draftkit" in json.loads((tmp_path / NAME / "config.json").read_text(encoding="utf-8"))
    shown, _ = in_encoding(encoding, "inspect", source, "--target", target, "-v")
    assert b"----" in shown  # a table of ASCII
    monkeypatch.setattr("draftkit.evaluate.evaluate.evaluate_draft", lambda *_, **__: measured())
    measure = ("eval", "--target", "zoo:target", "--draft", NAME)
    out, _ = in_encoding(encoding, *measure, "--details")
    assert b"draft ?" in out
    assert b"----" in out
    (tmp_path / "result.json").write_text(json.dumps(full_result()), encoding="utf-8")
    in_encoding(encoding, "report", "result.json", "--out", "pâge →.html", "--figures", "figures")
    assert "×" in (tmp_path / "pâge →.html").read_text(encoding="utf-8")
    assert in_encoding(encoding, "push", NAME, "org/name", "--dry-run", "--allow-unmeasured")[0]
    monkeypatch.setattr("draftkit.doctor.diagnose.diagnose_draft", lambda *_, **__: DIAGNOSIS)
    out, _ = in_encoding(encoding, "doctor", "--target", "zoo:target", "--draft", NAME)
    assert b"rope: 1e4 ? 1e6" in out


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-8"])
def test_data_is_whole_in_every_encoding(
    encoding: str, in_encoding: InEncoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftkit.evaluate.evaluate.evaluate_draft", lambda *_, **__: measured())
    measure = ("eval", "--target", "zoo:target", "--draft", NAME)
    out, err = in_encoding(encoding, *measure, "--json")
    assert json.loads(out.decode("utf-8"))["cells"][0]["draft"] == NAME
    assert err == b""
    assert out.isascii() is (encoding != "utf-8")
    out, _ = in_encoding(encoding, *measure, "--csv")
    assert {row["draft"] for row in csv.DictReader(StringIO(out.decode("utf-8")))} > {NAME}


def test_progress_off_a_terminal_is_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of rows, of bytes, and of runs over prompts, whose acceptance length is said where there is one."""
    monkeypatch.setattr(output, "PROGRESS_SECONDS", 0.0)
    with output.counted_progress("rows", None) as advance:
        advance(1000)
        advance(500)
    with output.counted_progress("convert", 4 * 10**9, in_bytes=True) as advance:
        advance(10**9)
    with output.prompt_progress() as on_progress:
        on_progress("cell 1 of 2: eagle3", 0, 8, math.nan)
        on_progress("cell 1 of 2: eagle3", 2, 8, 2.5)
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == ["rows: 1,000", "rows: 1,500", "convert: 1.0 GB of 4.0 GB", "cell 1 of 2: eagle3"]
    assert re.fullmatch(r"cell 1 of 2: eagle3: 2 of 8: 2\.50, about \d:\d\d:\d\d left", last)


def test_progress_on_a_terminal_is_a_bar_for_each_name_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    for one_bar in (False, True):
        with monkeypatch.context() as during:
            during.setattr(sys, "stderr", terminal := Terminal())
            with output.shown_progress(one_bar=one_bar) as show:
                show("loading", 0, None)
                show("scaling", 3, 5)
        *before, _ = terminal.getvalue().partition("scaling")[0].split("\n")
        assert "3/5" in terminal.getvalue()
        assert ("loading" in "".join(before[-1:])) is not one_bar


def test_nothing_is_colored_with_no_color(draftkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, where the same is in color without it."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    color = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9)\d")
    in_color = draftkit("inspect", "zoo:eagle3").out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = draftkit("inspect", "zoo:eagle3").out
    assert (bool(color.search(in_color)), color.search(plain)) == (True, None)
