"""A diagnosis as terminal tables: what is wrong, how acceptance falls, the tensors, what every change gained."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftkit.report.format import severity
from draftkit.results.cell import Interval
from draftkit.results.metrics import length

SHOWN = 6  # tensors of which the same is to be said


def show_diagnosis(console: Console, diagnosis: Mapping[str, Any]) -> None:
    """Print what `doctor --json` gives; the causes come last, where the eye falls."""
    settings = diagnosis["settings"]
    measured = diagnosis["length"] is not None
    heading = "{draft} ({method}) with {target}: ".format(**diagnosis)
    if measured:
        heading += f"acceptance length {length(Interval(**diagnosis['length']))}"
        heading += ", K {num_speculative_tokens}, T {temperature:g}, {num_prompts} prompts, {dtype} on {device}".format(
            **settings
        )
    console.print(heading if measured else f"{heading}not measured")
    if measured:
        _show_decay(console, diagnosis["decay"])
    if diagnosis["findings"]:
        console.print(_findings(diagnosis))
    console.print(_tensors(diagnosis))
    if measured:
        console.print(_changes(diagnosis))
    if others := diagnosis["not_applicable"]:
        console.print(f"{len(others)} more experiments need what this draft or target does not have (--json says what)")
    _show_causes(console, diagnosis["causes"])


def _show_decay(console: Console, decay: Mapping[str, Any]) -> None:
    rates = " ".join(f"{rate:.2f}" for rate in decay["rates"])
    console.print(f"Each draft token's chance where those before it stand: {rates}")
    for name, between in (("over_context", "long prompts against short ones"), ("over_answer", "over an answer")):
        if decay[name] is not None:
            console.print(f"{between}: {length(Interval(**decay[name]), signed=True)}")
    for pattern in decay["patterns"]:
        console.print(Text(pattern, style="yellow"))


def _findings(diagnosis: Mapping[str, Any]) -> Table:
    table = Table("found", "", "what", "next", title="Without running the draft", title_justify="left")
    for finding in diagnosis["findings"]:
        what = f"{finding['message']} ({finding['source']})"
        table.add_row(finding["name"], severity(finding["severity"]), what, finding["fix"])
    return table


def _tensors(diagnosis: Mapping[str, Any]) -> Table:
    tensors = diagnosis["tensors"]
    used = {use: sum(tensor["use"] == use for tensor in tensors) for use in ("once", "shared", "ignored")}
    sound = sum(tensor["finite"] and tensor["plausible"] for tensor in tensors)
    counts = ", ".join(f"{count} {use}" for use, count in used.items() if count)
    title = f"{len(tensors)} tensors: {counts}; {sound} finite and plausible"
    table = Table("tensor", "dtype", "shape", "used", "remark", title=title, title_justify="left")
    for (use, remark), alike in groupby(tensors, itemgetter("use", "remark")):
        several = list(alike)
        shown = several[:SHOWN] if remark else []  # of a head in its target's folder, all of the target's are ignored
        for tensor in shown:
            table.add_row(tensor["name"], tensor["dtype"], "×".join(map(str, tensor["shape"])), use, remark)
        if shown and len(several) > SHOWN:
            table.add_row(f"and {len(several) - SHOWN} more", "", "", use, remark)
    return table


def _changes(diagnosis: Mapping[str, Any]) -> Table:
    table = Table("experiment", "change", "acceptance length", "gain", "", title="Changed one by one")
    table.title_justify = "left"
    for tried in diagnosis["tried"]:
        table.add_row(
            tried["experiment"],
            tried["change"],
            f"{tried['before']:.2f} → {tried['after']:.2f}",
            length(Interval(**tried["gain"]), signed=True),
            _outcome(tried),
        )
    table.caption = (
        "intervals hold at 95 % for all changes together; those of what looked helpful and was measured again on other "
        "prompts, for one change of each experiment"
    )
    return table


def _outcome(tried: Mapping[str, Any]) -> Text | str:
    if tried["helps"]:
        return Text("helps", style="green" if tried["recommended"] else "")
    if not tried["confirmed"]:
        return ""
    return "too little" if Interval(**tried["gain"]).above(0) else "by chance"


def _show_causes(console: Console, causes: list[Mapping[str, str]]) -> None:
    if not causes:
        console.print(Text("Nothing found: no change helps.", style="green"))
    for number, cause in enumerate(causes, start=1):
        console.print(Text(f"{number}. {cause['name']}: {cause['what']}", style="bold"))
        console.print(f"   {cause['remedy']}", soft_wrap=True)
