"""The header of a model card: what the Hub's search, its model tree and its results tables read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from draftkit.layout.folder import Draft
from draftkit.results.cell import Cell, Interval
from draftkit.results.metrics import metrics_of
from draftkit.results.record import Result

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData
from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import SourceError
from draftkit.hub.locate import locate_file
from draftkit.layout.provenance import Provenance


def header(
    draft: Draft,
    results: Sequence[Result],
    *,
    name: str,
    target: str | None,
    start: str | None,
    license: dict[str, str],
) -> ModelCardData:
    """The header, with a `model-index` of the results.

    `name`: the draft's, or its path or Hub id. `start`: the checkpoint that a causal language model was trained from.
    """
    from huggingface_hub import ModelCardData

    base, relation = _base_model(draft, target, start)
    return ModelCardData(
        base_model=base,
        base_model_relation=relation,
        library_name="draftkit",
        pipeline_tag="text-generation",
        tags=["draftkit", "speculative-decoding", "draft-model", draft.spec.method],
        model_name=short_name(name) if results else None,
        eval_results=eval_results(results) or None,
        **license,
    )


def eval_results(results: Sequence[Result]) -> list[EvalResult]:
    """Acceptance length and speed-up of each cell, for `model-index`."""
    entries = [entry for result in results for cell in result.cells for entry in _entries(cell, result.provenance)]
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for entry in entries:
        row = (entry.dataset_type, entry.metric_type, entry.metric_name)
        seen[row] += 1
        if seen[row] > 1:  # another run at the same setting
            entry.metric_name = f"{entry.metric_name}, run {seen[row]}"
    return entries


def _entries(cell: Cell, provenance: Mapping[str, object]) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    said = provenance.get("dataset")
    dataset: dict[str, str] = said if isinstance(said, dict) else {}
    name, source = dataset.get("name") or cell.dataset or "unknown", dataset.get("source") or ""
    settings = {
        "num_speculative_tokens": cell.num_speculative_tokens,
        "temperature": cell.temperature,
        "draft_sampling": cell.draft_sampling,
        "concurrency": cell.concurrency,
        "context": cell.context,
        "num_prompts": cell.num_prompts,
        "max_new_tokens": cell.max_new_tokens,
        "engine": cell.engine,
        "hardware": provenance.get("hardware") or provenance.get("device"),
        "convention": provenance.get("convention"),
    }
    metrics = [(metric.name, metric.value(cell)) for metric in metrics_of("model-index", [cell])]
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=source if is_hub_id(source) else name,
            dataset_name=name,
            dataset_split=dataset.get("split"),
            dataset_revision=dataset.get("revision"),
            metric_type=metric,
            metric_name=f"{metric.replace('_', ' ')} ({_setting(cell)})",
            metric_value=round(value.mean if isinstance(value, Interval) else value, 4),
            metric_args={key: setting for key, setting in settings.items() if setting is not None} | _bounds(value),
        )
        for metric, value in metrics
        if value is not None
    ]


def _setting(cell: Cell) -> str:
    """What tells the rows of a table of results apart."""
    context = "" if cell.context is None else f", context={cell.context}"
    engine = "" if cell.other_engine is None else f", {cell.engine}"
    return f"K={cell.num_speculative_tokens}, T={cell.temperature:g}, concurrency={cell.concurrency}{context}{engine}"


def _bounds(value: object) -> dict[str, float]:
    if not isinstance(value, Interval) or value.bounds is None:
        return {}
    low, high = value.bounds
    return {"low": round(low, 4), "high": round(high, 4)}


def _base_model(draft: Draft, target: str | None, start: str | None) -> tuple[str | None, str | None]:
    """What the Hub links the draft to, and how; only Hub ids can be linked.

    Heads belong to their target, and `adapter` is what the Hub calls a model that runs only with its base. A causal
    language model is a model of its own, which comes from the checkpoint that it was converted or trained from.
    """
    own_model = draft.spec.architecture.own_model
    base = (start or draft.provenance.source) if own_model else target
    relation = "finetune" if own_model else "adapter"
    return (base, relation) if base is not None and is_hub_id(base) else (None, None)


def short_name(name: str) -> str:
    """A draft's own name: the end of its path or Hub id."""
    return name.rpartition("/")[2]


def is_hub_id(name: str) -> bool:
    """`org/name` that is no folder here."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None and name[0] != "." and not os.path.exists(name)


KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class License:
    """`metadata`: the keys of the card's header, none when unknown. `text`: what the card says, a sentence or two."""

    metadata: dict[str, str]
    text: str


def find_license(provenance: Provenance, folder: Path, given: str | None = None, target: str | None = None) -> License:
    """The license of the draft in `folder`.

    `given` goes first, then what the folder's README.md says, then the cards of the source and of the `target`, read
    from the Hub or from their folders. A card that cannot be had counts as one that says nothing.
    """
    origins = {}
    if provenance.format != "trained":
        origins[f"its source, {provenance.source}"] = provenance.source, provenance.source_revision
    if target is not None:
        origins[f"its target, {target}"] = target, provenance.target_revision
    inherited = {name: _stated_by(*origin) for name, origin in origins.items()}
    name, metadata = next(((n, found) for n, found in inherited.items() if found), ("", {}))
    own = {"license": given} if given else _stated_in(folder / "README.md")
    if own and own != metadata:
        return License(own, f"{_named(own)}, as its publisher states.")
    if metadata:
        return License(metadata, f"{_named(metadata)}, inherited from {name}.")
    return License({}, f"Unknown: none is stated by {' or '.join(inherited) or 'anyone'}.")


def _stated_by(source: str, revision: str | None) -> dict[str, str]:
    """What the card of a path, a Hub repository or a zoo model says."""
    try:
        card = locate_file(source, "README.md", revision)
    except SourceError:
        return {}
    return {} if card is None else _stated_in(card)


def _stated_in(card: Path) -> dict[str, str]:
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        metadata = metadata_load(card) if card.is_file() else None
    except (OSError, ValueError, YAMLError):
        return {}
    return {key: str(metadata[key]) for key in KEYS if metadata.get(key)} if metadata else {}


def _named(metadata: dict[str, str]) -> str:
    name = metadata.get("license_name") or metadata.get("license", "")
    link = metadata.get("license_link")
    return f"[{name}]({link})" if link else f"`{name}`"
