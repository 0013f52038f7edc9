"""A diagnosis on a screen: the causes and what mends them, the one length all gains are against, and how they came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftkit.report.terminal.screen import columns, labelled, named_table, severity
from draftkit.results.cell import Interval
from draftkit.results.metrics import gained, length

SHOWN = 6  # tensors of which the same is to be said
FEWEST = 8  # prompts, of which six confirm a change: fewer gain alike by chance too often (`doctor/measure.py`)


def show_diagnosis(console: Console, diagnosis: Mapping[str, Any]) -> None:
    """Print what `doctor --json` gives."""
    _show_causes(console, diagnosis)
    for line in _as_it_is(diagnosis):
        console.print(line)
    if diagnosis["findings"]:
        console.print("found without running the draft:")
        console.print(_findings(diagnosis))
    if (tensors := _tensors(diagnosis)).row_count:
        console.print(tensors)
    else:
        console.print(tensors.title)
    if diagnosis["by_context"]:
        console.print(_changes_by_context(diagnosis))
    elif diagnosis["tried"]:
        console.print(_changes(diagnosis))
    if others := diagnosis["not_applicable"]:
        console.print(f"{len(others)} more experiments do not apply to this draft or target (--json says why)")


def _show_causes(console: Console, diagnosis: Mapping[str, Any]) -> None:
    """The verdict: what is wrong, what mends it, and what that gains."""
    causes = diagnosis["causes"]
    if not causes:
        few = diagnosis["length"] is not None and diagnosis["settings"]["num_prompts"] < FEWEST
        why = "no known defect, and no change helps by more than chance"
        if few:
            why = f"no known defect; whether a change helps cannot be told of so few prompts: --limit {FEWEST} or more"
        console.print(labelled(f"{diagnosis['draft']}: nothing found", why, "yellow" if few else "green"))
    for number, cause in enumerate(causes, start=1):
        gain = "" if cause.get("gain") is None else f": {_signed(cause['gain'])} tokens a round"
        console.print(Text.assemble((f"{number}. {cause['name']}", "bold yellow"), f": {cause['what']}{gain}"))
        if cause["remedy"]:
            console.print(f"   {cause['remedy']}", soft_wrap=True)


def _as_it_is(diagnosis: Mapping[str, Any]) -> Iterator[str | Text]:
    """The draft as it was found: its acceptance length, and how that falls within a round, a context and an answer."""
    named = "{draft} ({method}) with {target}, as it is".format(**diagnosis)
    if diagnosis["length"] is None:
        yield f"{named}: not measured"
        return
    settings = "K={num_speculative_tokens}, T={temperature:g}, {num_prompts} prompts, {dtype} on {device}"
    yield f"{named}: acceptance length {length(Interval(**diagnosis['length']))}"
    yield f"  from the probabilities at {settings.format(**diagnosis['settings'])}"
    yield "  (so that few prompts tell small differences; `eval` decodes, at T=0 by default)"
    decay = diagnosis["decay"]
    rates = " ".join(f"{rate:.2f}" for rate in decay["rates"])
    yield f"  each draft token's chance where those before it stand: {rates}"
    for name, between in (("over_context", "long prompts against short ones"), ("over_answer", "over an answer")):
        if decay[name] is not None:
            yield f"  {between}: {_signed(decay[name])}"
    for pattern in decay["patterns"]:
        yield Text(f"  {pattern}", style="yellow")


def _findings(diagnosis: Mapping[str, Any]) -> Table:
    rows = columns()
    for finding in diagnosis["findings"]:
        rows.add_row(severity(finding["severity"]), f"{finding['message']} [{finding['name']}; {finding['source']}]")
        if finding["fix"]:
            rows.add_row("", f"mend: {finding['fix']}")
    return rows


def _tensors(diagnosis: Mapping[str, Any]) -> Table:
    tensors = diagnosis["tensors"]
    used = {use: sum(tensor["use"] == use for tensor in tensors) for use in ("once", "shared", "ignored")}
    sound = sum(tensor["finite"] and tensor["plausible"] for tensor in tensors)
    counts = ", ".join(f"{count} {use}" for use, count in used.items() if count)
    title = f"{len(tensors)} tensors: {counts}; {sound} finite and plausible"
    table = named_table("tensor", "dtype", "shape", "used", "remark", title=title)
    for (use, remark), alike in groupby(tensors, itemgetter("use", "remark")):
        several = list(alike)
        shown = several[:SHOWN] if remark else []  # of a head in its target's folder, all of the target's are ignored
        for tensor in shown:
            table.add_row(tensor["name"], tensor["dtype"], "×".join(map(str, tensor["shape"])), use, remark)
        if shown and len(several) > SHOWN:
            table.add_row(f"and {len(several) - SHOWN} more", "", "", use, remark)
    return table


def _changes(diagnosis: Mapping[str, Any]) -> Table:
    """What each change gained over the draft as it is, on the same prompts."""
    table = named_table("changed, one by one", "gained", "")
    for tried in diagnosis["tried"]:
        table.add_row(tried["change"], _signed(tried["gain"]), _outcome(tried))
    table.caption = (
        "acceptance length against the draft as it is, on the same prompts: a first quarter of them, and for what "
        "looked helpful the others; intervals hold at 95 % for all changes together, of what was measured again for "
        "one change of each experiment"
    )
    return table


def _changes_by_context(diagnosis: Mapping[str, Any]) -> Table:
    """What each change gained at each context over the draft as it is, on the same prompts."""
    table = named_table("changed, one by one", "context", "gained", "")
    for at in diagnosis["by_context"]:
        table.add_row("nothing: acceptance length", _of_context(at), length(Interval(**at["length"])), "")
    table.add_section()
    for tried in diagnosis["tried"]:
        name = tried["change"]
        for at in tried["by_context"]:
            outcome = "helps" if at["helps"] else "" if at["confirmed"] else "a look"
            gain = gained(Interval(**at["gain"]), look=not at["confirmed"])
            table.add_row(name, _of_context(at), gain, outcome)
            name = ""
    table.caption = (
        "acceptance length against the draft as it is, on the same prompts behind other text; a look: the mean on a "
        "first quarter of them; intervals hold at 95 % for all changes and contexts together"
    )
    return table


def _of_context(at: Mapping[str, Any]) -> str:
    return f"at {at['context']:,}" if at["context"] else "as they are"


def _signed(interval: Mapping[str, Any]) -> str:
    return length(Interval(**interval), signed=True)


def _outcome(tried: Mapping[str, Any]) -> Text | str:
    if tried["helps"]:
        return Text("helps", style="bold green" if tried["recommended"] else "green")
    if not tried["confirmed"]:
        return ""
    gain = Interval(**tried["gain"])
    if not gain.above(0):
        return "by chance"
    return "too few prompts" if tried["too_few"] else "too little"
