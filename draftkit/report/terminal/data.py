"""Training data as terminal tables: what became of the rows, what the preflight found, one sample by its mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftkit.finding import SEVERITIES
from draftkit.report.terminal.screen import columns, labelled, named_table, severity
from draftkit.results.metrics import length
from draftkit.train.adapt import Adaptation
from draftkit.train.dry_run import PARAMETER_BYTES, RunSize, StepSize


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


def run_size(size: RunSize) -> Iterator[str]:
    """Lines on what a run takes of the disk and of devices."""
    yield f"samples: {size.samples:,}, {size.tokens:,} tokens; {_size(size.sample_bytes)} on disk"
    yield f"states of the target: {_size(size.states_bytes)} on disk if they are stored in {size.encoding}"
    shared = f", {_size(size.trained_bytes // size.ranks)} on each of {size.ranks} that share them by FSDP"
    each = f"{size.trained:,} of {PARAMETER_BYTES} bytes (weight, gradient, optimizer)"
    yield f"trained parameters: {each}: {_size(size.trained_bytes)} on a device{shared if size.ranks > 1 else ''}"


def step_size(size: StepSize) -> str:
    """A line on what a step took."""
    of = "GPU memory allocated" if size.device == "cuda" else "memory resident"
    pace = f"{size.tokens / size.seconds:,.0f} tokens/s"
    return f"a step on {size.tokens:,} tokens: {_size(size.peak_bytes)} of {of} at most, {pace}"


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
