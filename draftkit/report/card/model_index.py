"""The header of a model card: what the Hub's search, its model tree and its results tables read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit.errors import SourceError
from draftkit.hub.locate import locate_file
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import Provenance
from draftkit.results.cell import Cell, Interval
from draftkit.results.metrics import metrics_of
from draftkit.results.record import Result

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData


FEWEST_PROMPTS = 10  # of an entry in `model-index`, which people compare without its interval
MOST_LINES = 80  # of a header
SHOWN_ARGUMENTS = ("num_speculative_tokens", "num_prompts", "low", "high")  # of an entry; its name has more


@dataclass(frozen=True)
class Stated:
    """What only a publisher knows of a draft, in the words of the Hub.

    `base_model`: the target's id, where it was named by a folder. `datasets`: ids of what it was trained on.
    `languages`: codes, those of the target's card where none are given.
    """

    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()


def header(
    draft: Draft,
    results: Sequence[Result],
    *,
    name: str,
    target: str | None,
    start: str | None,
    license: dict[str, str],
    stated: Stated,
) -> ModelCardData:
    """The header, with a `model-index` of as many of the results as `MOST_LINES` hold.

    `name`: the draft's, or its path or Hub id. `start`: the checkpoint that a causal language model was trained from.
    """
    from huggingface_hub import ModelCardData

    base, relation = _base_model(draft, stated.base_model or target, start)

    def with_entries(entries: Sequence[EvalResult]) -> ModelCardData:
        return ModelCardData(
            base_model=base,
            base_model_relation=relation,
            datasets=list(stated.datasets) or None,
            language=list(stated.languages) or None,
            library_name="draftkit",
            pipeline_tag="text-generation",
            tags=["draftkit", "speculative-decoding", "draft-model", draft.spec.method],
            model_name=short_name(name) if entries else None,
            eval_results=list(entries) or None,
            **license,
        )

    entries = eval_results(results)
    for entry in entries:
        entry.metric_args = {name: entry.metric_args[name] for name in SHOWN_ARGUMENTS if name in entry.metric_args}
    counts = range(len(entries), 0, -1)
    made = (with_entries(entries[:count]) for count in counts)
    return next((data for data in made if len(str(data).splitlines()) <= MOST_LINES), with_entries(()))


def eval_results(results: Sequence[Result]) -> list[EvalResult]:
    """Acceptance length and speed-up of each cell of `FEWEST_PROMPTS` or more, for `model-index`."""
    cells = [(cell, result.provenance) for result in results for cell in result.cells if not of_too_few_prompts(cell)]
    entries = [entry for cell, provenance in cells for entry in _entries(cell, provenance)]
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for entry in entries:
        row = (entry.dataset_type, entry.metric_type, entry.metric_name)
        seen[row] += 1
        if seen[row] > 1:  # another run at the same setting
            entry.metric_name = f"{entry.metric_name}, run {seen[row]}"
    return entries


def of_too_few_prompts(cell: Cell) -> bool:
    return cell.num_prompts is not None and cell.num_prompts < FEWEST_PROMPTS


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
    return f"{cell.drafted}, T={cell.temperature:g}, concurrency={cell.concurrency}{context}{engine}"


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


def stated_of(folder: Path, provenance: Provenance, target: str | None, given: Stated) -> Stated:
    """What is `given`, and for the rest what the README.md of the draft in `folder` says; languages also from the card
    of its `target`."""
    own = _metadata(folder / "README.md")
    base = given.base_model or next(iter(_words(own.get("base_model"))), None)
    languages = given.languages or _words(own.get("language"))
    if not languages and (name := base or target) is not None:
        card = _card_of(name, provenance.target_revision if name == target else None)
        languages = () if card is None else _words(_metadata(card).get("language"))
    return Stated(base, given.datasets or _words(own.get("datasets")), languages)


def _words(value: object) -> tuple[str, ...]:
    """A value of a card's header that may be one word or a list of them."""
    return tuple(str(one) for one in (value if isinstance(value, list) else [value] if value else ()))


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
    card = _card_of(source, revision)
    return {} if card is None else _stated_in(card)


def _card_of(source: str, revision: str | None) -> Path | None:
    try:
        return locate_file(source, "README.md", revision)
    except SourceError:
        return None


def _stated_in(card: Path) -> dict[str, str]:
    metadata = _metadata(card)
    return {key: str(metadata[key]) for key in KEYS if metadata.get(key)}


def _metadata(card: Path) -> dict[str, object]:
    """The header of a card; nothing where there is none, or no valid one."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        return (metadata_load(card) if card.is_file() else None) or {}
    except (OSError, ValueError, YAMLError):
        return {}


def _named(metadata: dict[str, str]) -> str:
    name = metadata.get("license_name") or metadata.get("license", "")
    link = metadata.get("license_link")
    return f"[{name}]({link})" if link else f"`{name}`"
