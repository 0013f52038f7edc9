"""A gate's verdict in the forms that continuous integration shows: JUnit XML, and Markdown for the page of a job."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from draftkit.report.card.markdown import plain, table
from draftkit.results.gate import Gate, GatedCell, GateOutcome, Undecided

MARKS: dict[GateOutcome, str] = {"worse": "❌", "not worse": "✅", "cannot tell": "❔"}
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(gate: Gate, undecided: Undecided) -> str:
    """A test suite with a case for each setting: failed where it is worse, skipped where it cannot be told and that
    neither passes nor fails. Ratio and bounds are properties of the case."""
    outcomes = [_outcome(cell.judgement.verdict, undecided) for cell in gate.cells]
    counts = {"tests": len(outcomes), "failures": outcomes.count("failure"), "errors": 0}
    counts |= {"skipped": outcomes.count("skipped")}
    attributes = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", attributes)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "draftkit gate", **attributes})
    _properties(suite, {"against": gate.against, "tolerance": f"{gate.tolerance:g}", "verdict": gate.verdict})
    for cell, outcome in zip(gate.cells, outcomes, strict=True):
        case = ElementTree.SubElement(suite, "testcase", {"classname": "draftkit.gate", "name": _legal(cell.name)})
        _properties(case, _figures(cell))
        if outcome is not None:
            said = {"message": _legal(cell.sentence)} | ({"type": "acceptance"} if outcome == "failure" else {})
            ElementTree.SubElement(case, outcome, said).text = _legal(cell.sentence)
        ElementTree.SubElement(case, "system-out").text = _legal("\n".join([cell.sentence, *gate.notes]))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _outcome(verdict: GateOutcome, undecided: Undecided) -> str | None:
    if verdict == "worse" or (verdict == "cannot tell" and undecided == "fail"):
        return "failure"
    return "skipped" if verdict == "cannot tell" and undecided == "report" else None


def _figures(cell: GatedCell) -> dict[str, str]:
    ratio = cell.judgement.ratio
    bounds = {} if ratio.bounds is None else {"low": f"{ratio.bounds[0]:.4f}", "high": f"{ratio.bounds[1]:.4f}"}
    lengths = {"acceptance_length": f"{cell.new:.4f}", "reference": f"{cell.old:.4f}"}
    return lengths | {"ratio": f"{ratio.mean:.4f}", **bounds, "prompts": str(cell.prompts)}


def _properties(parent: ElementTree.Element, values: dict[str, str]) -> None:
    inner = ElementTree.SubElement(parent, "properties")
    for name, value in values.items():
        ElementTree.SubElement(inner, "property", {"name": name, "value": _legal(value)})


def _legal(text: str) -> str:
    """The text without characters that no XML file can have."""
    return NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def markdown_summary(gate: Gate) -> str:
    """The verdict, a table of the settings, and the notes."""
    header = ("setting", "before", "now", "ratio, 5 % bounds", "prompts", "verdict")
    rows = [
        (cell.name, f"{cell.old:.2f}", f"{cell.new:.2f}", _ratio(cell), cell.prompts, _verdict(cell))
        for cell in gate.cells
    ]
    notes = [f"- {plain(note)}" for note in (*dict.fromkeys(cell.outlook for cell in gate.cells), *gate.notes)]
    title = f"## {MARKS[gate.verdict]} Acceptance length: {gate.verdict}"
    held = f"Held against {plain(gate.against)}; a loss of up to {gate.tolerance:.1%} is tolerated."
    return "\n\n".join([title, held, table(header, rows), "\n".join(notes), f"{plain(gate.nightly)}."]) + "\n"


def _verdict(cell: GatedCell) -> str:
    return f"{MARKS[cell.judgement.verdict]} {cell.judgement.verdict}"


def _ratio(cell: GatedCell) -> str:
    ratio = cell.judgement.ratio
    bounds = "" if ratio.bounds is None else f" [{ratio.bounds[0]:.3f}, {ratio.bounds[1]:.3f}]"
    return f"{ratio.mean:.3f}{bounds}"
