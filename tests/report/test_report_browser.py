"""The report in a real browser: it renders, asks for nothing, and can be read in light, dark, on paper and on a phone.

The browser is the system's chromium or Chrome, one that CHROMIUM names, or Playwright's own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fixtures.report_results import full_result

from draftkit.report.page.figures import all_figures
from draftkit.report.page.page import page
from draftkit.report.page.series import join
from draftkit.results.record import result_from

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 740}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two drafts with everything that a result may hold, and a name that no line can hold."""
    data = full_result()
    data["cells"][0]["target"] = "target-" + "x" * 300
    result = result_from(data, Path("result.json"))
    series = join([result])
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page([result], series, all_figures(series)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        named = (os.environ.get("CHROMIUM"), *map(shutil.which, PROGRAMS), driver.chromium.executable_path)
        program = next((path for path in named if path and Path(path).exists()), None)
        if program is None:
            pytest.skip("needs a browser: apt-get install chromium, or playwright install chromium")
        # Chromium's own sandbox needs rights that containers and root do not give it.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Shown:
    """A loaded page, all that it asked for, and all that it complained about."""

    page: playwright.Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def color(self, selector: str, name: str) -> tuple[float, ...]:
        """A computed color as red, green and blue."""
        text = self.page.locator(selector).first.evaluate(f"e => getComputedStyle(e)['{name}']")
        return tuple(float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3])

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.fixture
def show(browser: playwright.Browser, report: Path) -> Iterator[type]:
    contexts = []

    def open_page(**options: object) -> Shown:
        contexts.append(browser.new_context(**options))
        shown = Shown(contexts[-1].new_page())
        shown.page.on("request", lambda request: shown.requests.append(request.url))
        shown.page.on("console", lambda message: shown.complaints.append(message.text))
        shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
        shown.page.goto(report.as_uri())
        return shown

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_renders_in_light_and_dark_and_asks_for_nothing(show, report: Path, scheme: str) -> None:
    shown = show(viewport=DESKTOP, color_scheme=scheme)
    sections = shown.page.locator("section h2").all_inner_texts()
    assert len(sections) == 8
    assert shown.requests == [report.as_uri()]
    assert shown.complaints == []
    assert shown.overflow() <= 0
    plots = [plot.bounding_box() for plot in shown.page.locator(".plot svg").all()]
    assert len(plots) == 13
    assert all(box and box["width"] > 250 and box["height"] > 150 for box in plots)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(show, scheme: str) -> None:
    shown = show(viewport=DESKTOP, color_scheme=scheme)
    behind = {
        "p.note": "body",
        "td": "body",
        "a": "body",
        ".card small": ".card",
        ".prompt": ".prompt",
        ".warning": ".warning",
        ".legend .rejected": "body",
        **{f".legend .{kind}": f".legend .{kind}" for kind in ("accepted", "recovered", "bonus", "plain")},
    }
    contrasts = {
        selector: contrast(shown.color(selector, "color"), shown.color(background, "backgroundColor"))
        for selector, background in behind.items()
    }
    assert {selector: ratio for selector, ratio in contrasts.items() if ratio < 4.5} == {}


def test_plots_follow_the_color_scheme(show) -> None:
    inks = [show(color_scheme=scheme).color(".plot text", "fill") for scheme in ("light", "dark")]
    assert max(inks[0]) < 128 < min(inks[1])


def test_it_prints_in_light_with_rejected_tokens_in_the_text(show, tmp_path: Path) -> None:
    shown = show(viewport=DESKTOP, color_scheme="dark")
    shown.page.emulate_media(media="print", color_scheme="dark")
    assert shown.color("body", "backgroundColor") == (255, 255, 255)
    assert shown.page.locator(".generation .rejected").first.is_visible()
    assert not shown.page.locator(".proposal").first.is_visible()
    paper = shown.page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert paper.startswith(b"%PDF")


HIDDEN = """() => [...document.querySelectorAll('.scroll')].filter(
    box => box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight).length"""


def test_every_row_of_every_table_can_be_reached_without_scrolling_a_box(show) -> None:
    phone = show(viewport=PHONE, has_touch=True, is_mobile=True).page
    assert phone.evaluate(HIDDEN) == 0
    rows = phone.locator("#summary tbody tr:not(.group)")
    assert rows.count() == 48
    for row in (rows.first, rows.last):
        box = row.bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE["width"]
        assert (
            row.locator("td").nth(5).evaluate("e => getComputedStyle(e, '::before').content") == '"acceptance length"'
        )
    wider = show(viewport=DESKTOP).page
    for width in (DESKTOP["width"], 1000, 880, 700):
        wider.set_viewport_size({"width": width, "height": 900})
        assert wider.evaluate(HIDDEN) == 0, width


def test_a_phone_does_not_scroll_the_page_sideways(show) -> None:
    shown = show(viewport=PHONE, has_touch=True, is_mobile=True)
    assert shown.overflow() <= 0
    widths = [plot.bounding_box()["width"] for plot in shown.page.locator(".plot svg").all()]
    assert min(widths) > 300


def test_the_page_opens_with_the_verdict(show) -> None:
    for viewport in (DESKTOP, PHONE):
        page = show(viewport=viewport).page
        assert "was the fastest" in page.locator("main > :first-child").inner_text()


def test_a_series_has_its_color_beside_its_name(show) -> None:
    colors = [
        swatch.evaluate("e => getComputedStyle(e).backgroundColor")
        for swatch in show(viewport=DESKTOP).page.locator("#summary .swatch").all()
    ]
    assert len(set(colors)) == len(colors) == 3  # the cell of another target is one
    assert "rgba(0, 0, 0, 0)" not in colors


@pytest.mark.parametrize("how", ["hover", "focus", "tap"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_round_shows_what_the_draft_proposed(show, how: str, viewport: dict[str, int]) -> None:
    shown = show(viewport=viewport, has_touch=True)
    round = shown.page.locator(".round").nth(1)  # of ) -> int : the first is accepted
    proposal = round.locator(".proposal")
    assert not proposal.is_visible()
    getattr(round, how)()
    assert proposal.is_visible()
    assert proposal.locator(".rejected").inner_text() == "·->"
    assert proposal.locator(".unread").all_inner_texts() == ["·int", ":"]
    box = proposal.bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= viewport["width"]
    assert shown.overflow() <= 0


def test_rounds_are_reached_with_the_tab_key(show) -> None:
    shown = show(viewport=DESKTOP)
    shown.page.locator(".sample summary").first.focus()
    shown.page.keyboard.press("Tab")
    if shown.page.evaluate("document.activeElement.className") != "round":  # a long prompt scrolls, and takes focus
        shown.page.keyboard.press("Tab")
    shown.page.keyboard.press("Tab")
    assert shown.page.locator(".proposal >> visible=true").count() == 1


@pytest.mark.slow
def test_rejected_tokens_can_be_shown_in_the_text(show) -> None:
    shown = show(viewport=DESKTOP)
    rejected = shown.page.locator(".round > .rejected").first
    assert not rejected.is_visible()
    shown.page.get_by_label("Show the rejected draft tokens").check()
    assert rejected.is_visible()


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The ratio that the Web Content Accessibility Guidelines define; 4.5 is asked of text."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
