"""Calibrations as files: a page of what was said of surviving beside what survived, and what programs read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from draftkit.evaluate.calibrate import Calibration
from draftkit.io.html import signed as signed_page
from draftkit.io.jsonfile import dump
from draftkit.report.calibration import advice, signed
from draftkit.report.page.chart import PALETTE, Chart, Line, linear, shares
from draftkit.report.page.svg import svg
from draftkit.results.calibration import sglang_calibration
from draftkit.version import __version__

TEMPLATES = Path(__file__).with_name("templates")


def survival_chart(one: Calibration) -> Chart:
    """Said and survived by position; the bar at what survived is the interval of the difference."""
    found = list(enumerate(one.whole.cumulative, start=1))
    said = Line("said", "series-1", tuple((k, at.said) for k, at in found), marker="circle")
    bars = tuple(
        ((k, max(at.said - at.gap.high, 0)), (k, min(at.said - at.gap.low, 1)))
        for k, at in found
        if at.gap.low is not None and at.gap.high is not None
    )
    survived = Line("survived", "series-2", tuple((k, at.survived) for k, at in found), bars, marker="square")
    x = linear("draft token", [k for k, _ in found], whole=True)
    title = f"{one.draft}, K={one.num_speculative_tokens}, T={one.temperature:g}"
    return Chart(title, x, shares("rounds in which it stands"), (said, survived), (said, survived))


def calibration_page(calibrations: Sequence[Calibration]) -> str:
    """The calibrations as one HTML page that needs no network and runs no script."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    html = environment.get_template("calibration.html").render(
        calibrations=[(one, advice(one), svg(survival_chart(one))) for one in calibrations],
        signed=signed,
        version=__version__,
        palette=PALETTE,
        stylesheet=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )
    return signed_page(html)


def calibration_files(found: Sequence[Calibration]) -> dict[str, str]:
    """What a folder of calibrations holds, by name: page, JSON, and what SGLang reads of each draft: temperatures where
    they help beyond chance and are of enough rounds."""
    whole = {"schema": 1, "calibrations": [one.to_dict() for one in found]}
    files = {"calibration.html": calibration_page(found), "calibration.json": dump(whole)}
    for one in found:
        if one.scaling is not None and one.scaling.written:
            name = f"{_plain(one.draft)}-k{one.num_speculative_tokens}-t{one.temperature:g}.sts.json"
            files[name] = dump(sglang_calibration(one.scaling, ", ".join(one.slices)))
    return files


def _plain(name: str) -> str:
    """A name as that of a file."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "draft"
