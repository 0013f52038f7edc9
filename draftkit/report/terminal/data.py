"""Training data as terminal tables: what became of the rows, what the preflight found, one sample by its mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftkit.finding import SEVERITIES
from draftkit.report.terminal.screen import columns, labelled, named_table, severity
from draftkit.results.metrics import length
from draftkit.train.adapt import Adaptation


def show_report(console: Console, report: Mapping[str, Any], out: object = None) -> None:
    """The counts of a run, and a line for each reason why rows are not used as they are."""
    counts = "{rows:,} rows → {documents:,} samples, {tokens:,} tokens, {supervised_tokens:,} of them in the loss mask"
    said = counts.format(**report)
    console.print(said if out is None else labelled("written", f"{out}: {said}", "green"), soft_wrap=True)
    if not report["reasons"]:
        return
    table = named_table("reason", "rows", "what was done", "first rows")
    for reason in report["reasons"]:
        table.add_row(reason["reason"], str(reason["rows"]), reason["consequence"], ", ".join(reason["examples"]))
    console.print(table)


def work_to_do(cost: Mapping[str, Any]) -> Text:
    """The line of `data regenerate --dry-run`: whether anything is left to answer, and how much."""
    if not cost["turns"]:
        return labelled("nothing to answer", "{rows:,} rows, {done:,} of them done".format(**cost), "green")
    said = "{turns:,} turns of {rows:,} rows, {done:,} of them done; {max_new_tokens:,} tokens at most"
    return labelled("to answer", said.format(**cost), "green")


def show_checkup(console: Console, checkup: Mapping[str, Any]) -> None:
    """Whether to train on it, each finding, the worst first, and one sample colored by its mask."""
    findings = sorted(checkup["findings"], key=lambda finding: SEVERITIES.index(finding["severity"]))
    counts = Counter(finding["severity"] for finding in findings)
    plurals = {name: "" if name == "ok" or counts[name] == 1 else "s" for name in SEVERITIES}
    said = ", ".join(f"{counts[name]} {name}{plurals[name]}" for name in SEVERITIES if counts[name])
    verdict = "not to be trained on" if counts["error"] else "doubtful" if counts["warning"] else "sound"
    console.print(labelled(verdict, said, "red" if counts["error"] else "yellow" if counts["warning"] else "green"))
    rows = columns()
    for finding in findings:
        rows.add_row(severity(finding["severity"]), f"{finding['what']} [{finding['check']}]")
        for label, text in (("where", finding["where"]), ("if ignored", finding["cost"]), ("next", finding["hint"])):
            if text:
                rows.add_row("", f"{label}: {text}")
    console.print(rows)
    console.print("a sample, its loss mask between ⟦ and ⟧:")
    console.print(masked_text((piece["text"], piece["supervised"]) for piece in checkup["shown"]))


def states_plan(plan: Mapping[str, Any]) -> str:
    """A table of what storing hidden states takes."""
    shards = f"{plan['shards']:,} shard{'' if plan['shards'] == 1 else 's'}"
    counts = "{documents:,} samples, {tokens:,} tokens in " + shards + ", {bytes_per_token:,} bytes a token: "
    free = plan["free_bytes"]  # of a disk; a store does not tell
    sizes = _size(plan["bytes"]) + ("" if free is None else f" of {_size(free)} free")
    time = f"about {timedelta(seconds=round(plan['seconds']))}, from {plan['probe_tokens']:,} tokens"
    return f"{counts.format(**plan)}{sizes}; {time}"


def costs_table(costs: Mapping[str, Any]) -> Table:
    """A table of what the target's states take from each source of states."""
    encodings = ", ".join(f"{name} {_size(size)}" for name, size in costs["encodings"].items())
    table = named_table(
        "states", "on disk", "a sample", "the target computes", "a sample",
        title="{samples:,} samples, {tokens:,} tokens, each read {passes:.2g} times".format(**costs),
        caption=f"stored: {encodings}; times {costs['estimate']}",
    )  # fmt: skip
    names = {
        "online": "online, in the run's process",
        "store": f"stored first, in {costs['encoding']}",
        "stream": "streamed, beside the run (at most)",
    }
    for way, name in names.items():
        cost = costs[way]
        times = (_time(cost["seconds"]), f"{cost['sample_seconds']:.3g} s")
        disk = (_size(cost["bytes"]), _size(cost["sample_bytes"])) if cost["bytes"] else ("none", "none")
        table.add_row(name, *disk, *times)
    return table


PARTS = {
    "target": "target", "draft": "draft", "gradients": "its gradients", "optimizer": "its optimizer",
    "states": "states of a row", "logits": "logits", "activations": "activations",
    "target_activations": "the target's, for a moment",
}  # fmt: skip


def memory_table(devices: Sequence[Mapping[str, Any]]) -> Table:
    """A table of what training takes of each of so many devices, where the draft is sharded among them."""
    table = named_table(
        "memory of a device", *(f"of {device['ranks']}" for device in devices),
        title="a row of tokens_per_row, all of them drafted",
        caption="several: the draft sharded by accelerate launch --use_fsdp; unsharded, each as of 1",
    )  # fmt: skip
    for part, name in PARTS.items():
        table.add_row(name, *(_size(device[part]) for device in devices))
    table.add_row("together", *(_size(sum(device[part] for part in PARTS)) for device in devices))
    return table


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 10 else f"{seconds:.2g} s"


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"


def masked_text(pieces: Iterable[tuple[str, bool]]) -> Text:
    """Text with the pieces that the loss mask holds in green, and between brackets that are seen without color."""
    text = Text()
    for piece, masked in pieces:
        text.append(f"⟦{piece}⟧" if masked else piece, style="green" if masked else "dim")
    return text


def adaptation_table(adapted: Adaptation, k: int) -> Table:
    """One row for each slice of the answers held out."""
    table = named_table(
        "slice", "answers", "before", "against general", "after", "gained",
        title=f"acceptance length at K={k} on held-out answers, trained on {adapted.answers:,}",
        caption="lost: before, less was accepted than of general text, beyond chance",
    )  # fmt: skip
    for found in adapted.slices:
        behind = "" if found.behind is None else length(found.behind, signed=True) + (" lost" if found.lost else "")
        table.add_row(
            found.name,
            f"{found.samples:,}",
            length(found.before),
            behind,
            length(found.after),
            length(found.gained, signed=True),
        )
    return table
