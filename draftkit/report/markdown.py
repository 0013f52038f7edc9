"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from draftkit.report.format import latencies, length, mean, number
from draftkit.report.model_index import is_hub_id
from draftkit.results.record import Cell, Interval, Result

Row = tuple[int, Cell]  # the number of a run, from 1, and one of its cells
# What every table says of a row; the last only where rows differ in it.
SETTING: dict[str, Callable[[Cell], object]] = {
    "dataset": lambda cell: cell.dataset,
    "K": lambda cell: cell.num_speculative_tokens,
    "T": lambda cell: f"{cell.temperature:g}",
    "concurrency": lambda cell: cell.concurrency,
    "context": lambda cell: cell.context,
    "engine": lambda cell: cell.engine,
}
VARIED = ("context", "engine")
VERSIONS = ("draftkit", "vllm", "torch", "transformers", "python")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; what is in its cells cannot break it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(plain(cell) for cell in line) + " |" for line in lines)


def plain(value: object) -> str:
    """Text on one line that Markdown shows as it is inside a table; None is a dash."""
    text = "–" if value is None else " ".join(str(value).split())
    return text.replace("|", "\\|").replace("<", "&lt;")


def acceptance_table(rows: Sequence[Row]) -> str:
    header = ("prompts", "drafts", "acceptance length", "of drafts", "expected", "accepted at 1…K")
    return _by_setting(header, [(row, _acceptance(row[1])) for row in rows])


def _by_setting(header: Sequence[str], lines: Sequence[tuple[Row, Sequence[object]]]) -> str:
    """A table whose rows begin with the run and how it was measured."""
    cells = [cell for (_, cell), _ in lines]
    shown = [name for name, of in SETTING.items() if name not in VARIED or len({of(cell) for cell in cells}) > 1]
    settings = ((number, *(SETTING[name](cell) for name in shown)) for (number, cell), _ in lines)
    rows = ((*setting, *line) for setting, (_, line) in zip(settings, lines, strict=True))
    return table(("run", *shown, *header), rows)


def _acceptance(cell: Cell) -> tuple[object, ...]:
    return (
        cell.num_prompts,
        cell.draft_sampling,
        _emphasized(cell.acceptance_length),
        mean(cell.drafted_acceptance_length or cell.acceptance_length),
        mean(cell.expected_acceptance_length),
        " ".join(f"{rate:.2f}" for rate in cell.accepted_at) or None,
    )


def _emphasized(interval: Interval | None) -> str | None:
    """An acceptance length with its mean in bold."""
    if interval is None:
        return None
    mean, _, rest = length(interval).partition(" ")
    return f"**{mean}** {rest}".rstrip()


def convention_table(rows: Sequence[Row]) -> str:
    """What other tools would call the acceptance length of each cell; empty where no cell says."""

    def lengths(cell: Cell) -> dict[str, str]:
        return {name: number(value) for name, value in cell.acceptance_length_by_convention.items()}

    return _spread(rows, lengths, least=1)


def category_table(rows: Sequence[Row]) -> str:
    """The acceptance length by category, with its number of prompts; empty where there is but one category."""

    def lengths(cell: Cell) -> dict[str, str]:
        measured = {name: found for name, found in cell.by_category.items() if found}
        return {name: number(i.mean) + (f" ({i.prompts})" if i.prompts else "") for name, i in measured.items()}

    return _spread(rows, lengths, least=2)


def _spread(rows: Sequence[Row], texts: Callable[[Cell], dict[str, str]], least: int) -> str:
    """A column for each name that a cell has a text for; empty where there are fewer than `least`."""
    names = list(dict.fromkeys(name for _, cell in rows for name in texts(cell)))
    if len(names) < least:
        return ""
    return _by_setting(names, [(row, [texts(row[1]).get(name, number(None)) for name in names]) for row in rows])


def speed_table(rows: Sequence[Row]) -> str:
    """Throughput and latencies; empty where no cell compares with plain decoding."""
    header = ("tokens/s", "plain", "speed-up", "TTFT / TPOT / ITL ms")
    lines = [(row, _speed(row[1])) for row in rows if row[1].times_faster is not None]
    return _by_setting(header, lines) if lines else ""


def _speed(cell: Cell) -> tuple[object, ...]:
    return (
        number(cell.tokens_per_second, ".1f"),
        number(cell.baseline_tokens_per_second, ".1f"),
        length(cell.speedup_interval) if cell.speedup_interval else number(cell.times_faster, ".2f"),
        latencies(cell),
    )


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
