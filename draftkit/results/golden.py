"""Acceptance lengths that other projects' CI has as references, read and written in the files in which they keep them.

TensorRT-LLM (`tests/integration/defs/accuracy/references/acceptance_length.yaml`) has for a test `ref_al`, and
`min_al`, below which the test fails: 0.95 of it. Its length is the mean over iterations of the tokens that each gave,
an average of batch averages. InferenceX (`golden_al_distribution/*.yaml`) has for a model, thinking on or off and K a
length with two decimals, 1 + accepted / drafts over all requests, as here. Neither says how well it is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftkit.errors import DraftkitError, SettingError
from draftkit.io.yaml_text import read_texts, with_text
from draftkit.results.cell import Cell
from draftkit.results.gate import DEAD, sums_of
from draftkit.results.metrics import length
from draftkit.results.record import Result
from draftkit.results.statistics import length_over_prompts

GoldenKind = Literal["trt", "inferencex"]
CONVENTIONS: dict[GoldenKind, str] = {
    "trt": "TensorRT-LLM's: the mean over iterations of the tokens that each gave, an average of batch averages",
    "inferencex": "InferenceX's: 1 + accepted / drafts over all requests, as draftkit's, with two decimals",
}
TOLERATED = 0.95  # of the reference, by TensorRT-LLM's rule
SHAPE = "trt:KEY=FILE or inferencex:FILE"


@dataclass(frozen=True)
class GoldenFile:
    """A file of references in another project's layout. `key`: the test whose length it is, for TensorRT-LLM."""

    kind: GoldenKind
    path: Path
    key: str = ""

    @classmethod
    def of(cls, text: str) -> GoldenFile | None:
        """`trt:KEY=FILE` or `inferencex:FILE`; None for what names a result. Raises `SettingError`."""
        kind, colon, rest = text.partition(":")
        if not colon or kind not in CONVENTIONS:
            return None
        key, _, path = rest.rpartition("=")
        if kind == "trt" and not (key and path):
            raise SettingError(f"{text} names no test and file", "against", expected="trt:KEY=FILE")
        return cls("trt", Path(path), key) if kind == "trt" else cls("inferencex", Path(rest))

    def lengths(self, result: Result) -> tuple[list[tuple[Cell, float]], list[str]]:
        """The settings of a result that the file has a length of, and notes. Raises `DraftkitError` where it has none,
        or that of a draft that does nothing."""
        cells = self._cells(result)
        texts = [read_texts(self.path, path) for path in (self._path(result, cell) for cell in cells)]
        found = [(cell, self._number(text)) for cell, text in zip(cells, texts, strict=True) if text is not None]
        if not found:
            wanted = " or ".join(" → ".join(self._path(result, cell)) for cell in cells)
            raise DraftkitError(f"the file has no length for {wanted}", where=self.path)
        left = [cell.name for cell, text in zip(cells, texts, strict=True) if text is None]
        notes = [
            f"the reference is {CONVENTIONS[self.kind]}; how well it is known it does not say: as well as the new one"
        ]
        return found, notes + ([f"not in {self.path.name}, and not compared: {'; '.join(left)}"] if left else [])

    def edited(self, result: Result) -> str:
        """The file with the entries of a result, and everything else as it is. Raises `DraftkitError` where it cannot
        be edited."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for cell in self._cells(result):
            mean = length_over_prompts(sums_of(cell))
            path = self._path(result, cell)
            if self.kind == "inferencex":
                text = with_text(text, path, f"{mean.mean:.2f}", self.path)
            else:
                known = (
                    f"1 + accepted / rounds, {length(mean)}, {mean.prompts} prompts, K = {cell.num_speculative_tokens}"
                )
                text = with_text(text, path, f"{mean.mean:.6f}  # {known}", self.path)
                text = with_text(text, (self.key, "min_al"), f"{TOLERATED * mean.mean:.6f}", self.path)
        return text

    def _cells(self, result: Result) -> Sequence[Cell]:
        if self.kind == "trt" and len(result.cells) > 1:
            raise DraftkitError(
                f"{self.key} is one length, and {result.path} has {len(result.cells)} settings",
                hint="measure the one that it is of by itself",
            )
        return result.cells

    def _path(self, result: Result, cell: Cell) -> tuple[str, ...]:
        """The keys that lead to the length of a cell."""
        if self.kind == "trt":
            return self.key, "ref_al"
        return self._model(cell), f"thinking_{self._thinking(result)}", str(cell.num_speculative_tokens)

    def _model(self, cell: Cell) -> str:
        """The model of a file that has one; of another the target's name, as the project writes it."""
        name = cell.target.partition("@")[0].rpartition("/")[2].rpartition(":")[2].lower()
        models = read_texts(self.path, ()) if self.path.exists() else {}
        known = list(models) if isinstance(models, dict) else []
        return known[0] if len(known) == 1 else name

    def _thinking(self, result: Result) -> str:
        dataset = result.provenance.get("dataset")
        thinking = dataset.get("thinking") if isinstance(dataset, dict) else None
        if not isinstance(thinking, bool):
            raise DraftkitError(
                "the file has lengths with thinking and without, and the result leaves that to the chat template",
                where=result.path or self.path,
                hint="measure with --set thinking=true or false",
            )
        return "on" if thinking else "off"

    def _number(self, text: object) -> float:
        number = float(text) if isinstance(text, str) and re.fullmatch(r"\d+(\.\d*)?", text) else 0.0
        if number < DEAD:
            raise DraftkitError(
                f"the reference is {text}, which is the length of a draft that does nothing",
                where=self.path,
                expected=f"at least {DEAD}",
            )
        return number
