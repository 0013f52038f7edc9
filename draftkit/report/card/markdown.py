"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from draftkit.report.card.model_index import is_hub_id
from draftkit.results.cell import Cell
from draftkit.results.metrics import Metric, View, metrics_of, number
from draftkit.results.record import Result

NumberedCell = tuple[int, Cell]  # the number of a run, from 1, and one of its cells
EMPHASIZED = "acceptance_length"  # the metric whose mean is in bold
VERSIONS = ("draftkit", "vllm", "torch", "transformers", "python")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; what is in its cells cannot break it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(plain(cell) for cell in line) + " |" for line in lines)


def plain(value: object) -> str:
    """Text on one line that Markdown shows as it is inside a table; None is a dash."""
    text = "–" if value is None else " ".join(str(value).split())
    return text.replace("|", "\\|").replace("<", "&lt;")


def acceptance_table(rows: Sequence[NumberedCell]) -> str:
    """A table of what each cell accepted."""
    return _shown("card-acceptance", rows)


def _shown(view: View, rows: Sequence[NumberedCell]) -> str:
    """A table of what a view shows of each cell."""
    shown = metrics_of(view, [cell for _, cell in rows])
    return _by_setting([metric.title for metric in shown], rows, lambda cell: [_text(metric, cell) for metric in shown])


def _by_setting(header: Sequence[str], rows: Sequence[NumberedCell], texts: Callable[[Cell], Sequence[str]]) -> str:
    """A table whose rows begin with the run and how it was measured."""
    setting = metrics_of("card", [cell for _, cell in rows])
    lines = ((run, *(metric.text(cell) for metric in setting), *texts(cell)) for run, cell in rows)
    return table(("run", *(metric.title for metric in setting), *header), lines)


def _text(metric: Metric, cell: Cell) -> str:
    text = metric.text(cell)
    if metric.name != EMPHASIZED or metric.value(cell) is None:
        return text
    mean, _, rest = text.partition(" ")
    return f"**{mean}** {rest}".rstrip()


def convention_table(rows: Sequence[NumberedCell]) -> str:
    """What other tools would call the acceptance length of each cell; empty where no cell says."""

    def lengths(cell: Cell) -> dict[str, str]:
        return {name: number(value) for name, value in cell.acceptance_length_by_convention.items()}

    return _spread(rows, lengths, least=1)


def category_table(rows: Sequence[NumberedCell]) -> str:
    """The acceptance length by category, with its number of prompts; empty where there is but one category."""

    def lengths(cell: Cell) -> dict[str, str]:
        measured = {name: found for name, found in cell.by_category.items() if found}
        return {name: number(i.mean) + (f" ({i.prompts})" if i.prompts else "") for name, i in measured.items()}

    return _spread(rows, lengths, least=2)


def _spread(rows: Sequence[NumberedCell], texts: Callable[[Cell], dict[str, str]], least: int) -> str:
    """A column for each name that a cell has a text for; empty where there are fewer than `least`."""
    names = list(dict.fromkeys(name for _, cell in rows for name in texts(cell)))
    if len(names) < least:
        return ""
    return _by_setting(names, rows, lambda cell: [texts(cell).get(name, number(None)) for name in names])


def speed_table(rows: Sequence[NumberedCell]) -> str:
    """Throughput and latencies; empty where no cell compares with plain decoding."""
    timed = [(run, cell) for run, cell in rows if cell.times_faster is not None]
    return _shown("card-speed", timed) if timed else ""


def runs_table(results: Sequence[Result]) -> str:
    """Where, when and with what each run measured."""
    header = ("run", "date", "engine", "hardware", "dtype", "prompts", "chat template", "max new tokens", "versions")
    return table(header, ((number, *_run(result)) for number, result in enumerate(results, start=1)))


def _run(result: Result) -> tuple[object, ...]:
    said = result.provenance
    template = said.get("chat_template_sha256")
    return (
        said.get("date"),
        _all(cell.engine for cell in result.cells),
        _hardware(said),
        said.get("dtype"),
        _prompts(said.get("dataset")) or _all(cell.dataset for cell in result.cells),
        f"sha256 {str(template)[:12]}" if template else "none",
        _all(cell.max_new_tokens for cell in result.cells),
        ", ".join(f"{name} {said[name]}" for name in VERSIONS if said.get(name)),
    )


def _all(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "–"


def _hardware(provenance: dict[str, object]) -> object:
    """The machine's own name where the result has it."""
    name, threads = provenance.get("hardware") or provenance.get("device"), provenance.get("threads")
    if provenance.get("device") != "cpu" or threads is None:
        return name
    return f"{name}, {threads} thread" + ("s" if threads != 1 else "")


def _prompts(dataset: object) -> str:
    """A prompt set by Hub id or name, split, revision, digest, turns and thinking, as far as the result says."""
    if not isinstance(dataset, dict):
        return ""
    source = str(dataset.get("source") or "")
    parts = [source if is_hub_id(source) else str(dataset.get("name") or Path(source).name)]
    parts += [f"{key} {dataset[key]}" for key in ("split", "revision", "turns") if dataset.get(key)]
    parts += [f"sha256 {str(dataset['sha256'])[:12]}"] if dataset.get("sha256") else []
    parts += [f"thinking {'on' if dataset['thinking'] else 'off'}"] if dataset.get("thinking") is not None else []
    return ", ".join(parts)
