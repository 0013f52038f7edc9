"""The settings with which a result was measured, so that another draft is measured in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftkit.data.rows import SUFFIXES
from draftkit.errors import DraftkitError
from draftkit.io.records import read_as
from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.results.cell import Cell
from draftkit.results.record import Result
from draftkit.results.settings import Settings, Sweep

GROUPS = {"sampling": SamplingParameters, "draft_sampling": DraftSampling}
# What decides nothing of acceptance: how often the prompts were run to know the speed, and on what.
LEFT = ("repeats", "device", "dtype", "slices")


def settings_again(result: Result, folder: Path, device: str | None = None) -> Sweep:
    """The settings of a result's cells, each once: prompts, K, T, sampling, seeds, batch and context.

    A file of prompts is looked for where the command runs, and then in `folder`. The dtype is that of the result on its
    device. Speed is not measured. Raises `DraftkitError` where the result does not say how it was measured.
    """
    said = result.provenance.get("settings")
    prompts = result.provenance.get("prompts")
    if not isinstance(said, dict) or not isinstance(prompts, str):
        raise DraftkitError(
            "the result does not say how it was measured",
            where=result.path,
            expected="settings and prompts in its provenance, as this version writes",
            hint="measure it again with draftkit eval --out, or give the new result by its name",
        )
    shared = _settings(said, result.path)
    if prompts.endswith(SUFFIXES):
        prompts = _file_of_prompts(prompts, folder)
    dtype = result.provenance.get("dtype")
    shared = replace(shared, prompts=prompts, repeats=0, device=device, dtype=dtype if isinstance(dtype, str) else None)
    each: list[Settings] = []
    for cell in result.cells:
        settings = _of_cell(shared, cell)
        each += [] if settings in each else [settings]
    return Sweep(tuple(each))


def _file_of_prompts(name: str, folder: Path) -> str:
    found = next((place for place in (Path(name), folder / name) if place.exists()), None)
    if found is None:
        raise DraftkitError(
            f"the prompts of the result, {name}, are not here",
            where=folder / name,
            hint="put the file beside the result",
        )
    return str(found)


def _settings(said: Mapping[str, object], where: str) -> Settings:
    groups = {name: _read(cls, said.get(name) or {}, where) for name, cls in GROUPS.items()}
    others = {name: value for name, value in said.items() if name not in (*GROUPS, *LEFT)}
    settings = _read(Settings, others, where)
    return replace(settings, **groups)


def _read(cls: type, values: object, where: str) -> Any:
    found, problems = read_as(cls, values, "settings")
    if problems:
        raise DraftkitError("its settings are none of this version: " + "; ".join(problems), where=where)
    return found


def _of_cell(shared: Settings, cell: Cell) -> Settings:
    return shared.at(
        num_speculative_tokens=cell.num_speculative_tokens,
        concurrency=cell.concurrency,
        temperature=cell.temperature,
        context=cell.context or 0,
        draft_confidence=cell.min_confidence or 0.0,
    )
