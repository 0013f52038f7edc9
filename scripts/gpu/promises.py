"""What was promised of GPUs without one, and whether a day on one has kept it: a page from the figures of its sections.

`python -m scripts.gpu.promises FOLDER` reads what `scripts/gpu_day.sh` has left in FOLDER, NAME.txt and .json of each
section and NAME.code, the exit code of its command, and writes FOLDER/README.md. Sections that were not run are said to
be not measured; none of them is a failure. With `--dry-run` the page says of each promise only that it was tried.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from draftkit.evaluate.round_cost import DEVICES, Device, RoundCost
from scripts.bench.roofline import EAGLE3_8B, LLAMA_8B

ROOT = Path(__file__).parents[2]

NEAREST = 1.25  # times the arithmetic, as near as a published engine came (benchmarks/roofline.md)
OF_RATIO = 1.1  # times the arithmetic's ratio of a drafting round to a plain one, of the same weights and device
OF_COPY = 0.8  # of the speed of a copy, at which arithmetic has caches be read
LONG, FULL = 4096, 8  # entries and sequences from which on that is asked of attention
ROUNDS = {"plain": RoundCost(LLAMA_8B), "EAGLE-3": RoundCost(LLAMA_8B, EAGLE3_8B, 4, 4)}  # by draft
COUNTED = {"plain": "a plain round, greedy", "EAGLE-3": "a round of EAGLE-3, K = 4, greedy"}  # in launches.json
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")  # of a cell
KEPT = {True: "**kept**", False: "**not kept**", None: "not measured"}
# Sections whose command says by its exit code whether a promise is kept: where it stands, and what it is.
PROVED = {
    "kernels": ("benchmarks/kernels.md", "captured rounds, prompts, loading and training compute what they should"),
    "runtime": ("benchmarks/kernels.md", "every kernel runs as machine code and equals its reference"),
    "lossless": ("README", "the output with a draft is the target's"),
}  # fmt: skip


class Judged(NamedTuple):
    """A promise, where it stands, what it was and what was measured of it; `kept` None where nothing was."""

    where: str
    what: str
    promised: str
    measured: str
    kept: bool | None


@dataclass(frozen=True)
class Day:
    """What a folder has of a day's sections."""

    folder: Path
    dry: bool = False  # no GPU was there

    def code(self, section: str) -> int | None:
        """The exit code of a section's command; None where it was not run."""
        file = self.folder / f"{section}.code"
        return int(file.read_text()) if file.exists() else None

    def read(self, section: str) -> dict[str, Any]:
        """The figures of a section; empty where it has none."""
        file = self.folder / f"{section}.json"
        text = file.read_text(encoding="utf-8").strip() if file.exists() and self.code(section) == 0 else ""
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    @cached_property
    def sections(self) -> list[str]:
        """Those that were run, in the order of their end."""
        return [file.stem for file in sorted(self.folder.glob("*.code"), key=lambda file: file.stat().st_mtime)]

    @cached_property
    def figures(self) -> list[dict[str, Any]]:
        """The figures of all benchmarks."""
        return [figure for section in self.sections for figure in self.read(section).get("figures", ())]

    @cached_property
    def device(self) -> Device | None:
        """The GPU that was measured, by its data sheet; None for one that is not in the table."""
        names = [self.read(section).get("device", "") for section in self.sections]
        words = {word for name in names for word in name.upper().replace("-", " ").split()}
        return next((device for device in DEVICES if device.name.split()[0] in words), None)

    def cells(self, section: str, engine: str) -> dict[tuple[object, ...], dict[str, Any]]:
        """The cells of an engine in a measurement by draft, K and concurrency."""
        cells = (cell for cell in self.read(section).get("cells", ()) if cell["engine"] == engine)
        return {(c["draft"], c["num_speculative_tokens"], c["concurrency"]): c for c in cells}

    def beside(self, section: str) -> list[tuple[tuple[object, ...], dict[str, Any], dict[str, Any]]]:
        """What a measurement of both engines has of draftkit and of vLLM."""
        own, theirs = (self.cells(section, engine) for engine in ("draftkit", "vllm"))
        return [(key, own[key], theirs[key]) for key in own if key in theirs]


def judged(day: Day) -> list[Judged]:
    """All promises, in the order in which a reader wants them."""
    proofs = []
    for section, (where, what) in PROVED.items():
        code = day.code(section)
        said, kept = ("–", None) if code is None else (f"exit code {code}", code == 0)
        proofs.append(Judged(where, what, "exit code 0", said, kept))
    return [*proofs, same_counts(day), *launches(day), *round_times(day), *attention(day), *beside_vllm(day)]


def same_counts(day: Day) -> Judged:
    """vLLM's counts of drafts and of accepted tokens are draftkit's."""
    both = day.beside("counts")
    other = [f"{key[0]}: {name}" for key, own, theirs in both for name in COUNTS if own[name] != theirs[name]]
    said = f"{len(both)} cells, other counts: {', '.join(other) or 'none'}" if both else "–"
    return Judged("README", "the same counts as vLLM, in float32", "equal", said, not other if both else None)


def launches(day: Day) -> Iterator[Judged]:
    """Rounds launch no more kernels than were counted."""
    known = json.loads((ROOT / "benchmarks/launches.json").read_text(encoding="utf-8"))
    for draft, name in COUNTED.items():
        found = [one["of_a_round"] for one in day.figures if one["figure"] == "kernels" and one["draft"] == draft]
        most = max(found, default=None)
        said, kept = ("–", None) if most is None else (f"{most:,.0f}", most <= known[name])
        yield Judged("benchmarks/launches.md", f"kernels of {name}", f"at most {known[name]:,}", said, kept)


def round_times(day: Day) -> Iterator[Judged]:
    """Rounds take what arithmetic says, and drafting ones as many plain ones."""
    rounds = {(one["draft"], one["batch"]): one for one in day.figures if one["figure"] == "round"}
    found = [(draft, batch) for draft, batch in rounds if draft in ROUNDS]
    if not found or day.device is None:
        yield Judged("benchmarks/roofline.md", "rounds of an 8B", f"at most {NEAREST:g} × the arithmetic", "–", None)
        return
    for draft, batch in found:
        one = rounds[draft, batch]
        least = 1e3 * ROUNDS[draft].seconds(day.device, batch, one["positions"])
        most, said = f"at most {NEAREST:g} × {least:.2f} ms", f"{one['ms'] / least:.2f} × ({one['ms']:.2f} ms)"
        kept = one["ms"] <= NEAREST * least
        yield Judged("benchmarks/roofline.md", f"8B, {draft}, batch {batch}", most, said, kept)
        if draft != "plain" and ("plain", batch) in rounds:
            plain = rounds["plain", batch]
            ratio = least / (1e3 * ROUNDS["plain"].seconds(day.device, batch, plain["positions"]))
            taken = one["ms"] / plain["ms"]
            what, most = f"8B, {draft}, batch {batch}: pays from", f"at most {OF_RATIO:g} × {ratio:.2f}"
            yield Judged("benchmarks/launches.md", what, most, f"{taken:.2f}", taken <= OF_RATIO * ratio)


def attention(day: Day) -> Iterator[Judged]:
    """Caches are read nearly as fast as memory is copied."""
    found = [one for one in day.figures if one["figure"] == "attention"]
    found = [one for one in found if one["length"] >= LONG and one["batch"] >= FULL]
    slowest = min((one["of_copy"] for one in found), default=None)
    said, kept = ("–", None) if slowest is None else (f"{slowest:.2f}, the slowest of {len(found)}", slowest >= OF_COPY)
    what = f"attention over {FULL} sequences of {LONG:,} and more"
    yield Judged("benchmarks/roofline.md", what, f"{OF_COPY:g} of a copy's speed", said, kept)


def beside_vllm(day: Day) -> Iterator[Judged]:
    """No fewer tokens a second than vLLM, as `launches.md` names nothing that would slow a captured round."""
    both = day.beside("beside-vllm")
    if not both:
        yield Judged("benchmarks/launches.md", "tokens a second beside vLLM", "at least vLLM's", "–", None)
    for key, own, theirs in both:
        mine, other = own["tokens_per_second"], theirs["tokens_per_second"]
        what = f"tokens a second beside vLLM, {key[0]}, K = {key[1]}, batch {key[2]}"
        yield Judged("benchmarks/launches.md", what, f"at least {other:,.0f}", f"{mine:,.0f}", mine >= other)


def page(day: Day) -> str:
    """The page of a day, as Markdown."""
    found = [one._replace(kept=None) if day.dry else one for one in judged(day)]
    counts = {kept: sum(one.kept is kept for one in found) for kept in KEPT}
    names = sorted({read["device"] for section in day.sections if (read := day.read(section)).get("device")})
    lines = [
        f"# {'A day on a GPU, tried without one' if day.dry else ', '.join(names) or 'A day on a GPU'}", "",
        f"{counts[True]} promises kept, {counts[False]} not kept, {counts[None]} not measured.", "",
        "| promise | where | promised | measured | |", "|---|---|---|---|---|",
        *(f"| {one.what} | {one.where} | {one.promised} | {one.measured} | {KEPT[one.kept]} |" for one in found),
        "", "## Sections", "", "| section | exit code |", "|---|---|",
        *(f"| [{section}]({section}.txt) | {day.code(section)} |" for section in day.sections), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    folder, *options = arguments
    day = Day(Path(folder), dry="--dry-run" in options)
    (day.folder / "README.md").write_text(page(day), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
