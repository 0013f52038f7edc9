"""The model card of a draft, from its spec, its provenance and its measurements. The template is `model_card.md`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from draftkit.checks.checkpoint import findings_of_draft
from draftkit.convert.destinations import remedy_for_vllm
from draftkit.engines import sglang
from draftkit.engines.serving import most_tokens, refusal_notes, serve_commands, serve_trees
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.engines.vllm.serve import method_note
from draftkit.errors import DraftkitError, command
from draftkit.hub.local_paths import names_of_paths
from draftkit.io.finite import FLOATING
from draftkit.io.jsonfile import read_object
from draftkit.io.yaml_text import read_yaml_file
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import trained_tokens
from draftkit.report.card.markdown import (
    NumberedCell,
    acceptance_table,
    category_table,
    convention_table,
    plain,
    runs_table,
    speed_table,
    table,
)
from draftkit.report.card.model_index import (
    FEWEST_PROMPTS,
    License,
    Stated,
    header,
    is_hub_id,
    of_too_few_prompts,
    short_name,
)
from draftkit.results.cell import Cell
from draftkit.results.record import Result, named_result, read_result, result_from
from draftkit.results.verdict import ResultVerdict, verdicts, well_known
from draftkit.runtime.tree_kinds import read_tree

TEMPLATE = Path(__file__).with_name("model_card.md")
CONVENTION = (
    "Acceptance length = 1 + accepted draft tokens / rounds, with the 95 % interval over prompts; expected: from the "
    "probabilities of the same forward passes; at each position: accepted / rounds."
)
# Engine → the layout that it takes where it cannot load a unified draft, and the end of its name.
CONVERTED = {"SGLang": (sglang.layout_of, "-sglang"), "llama.cpp": (lambda _: "gguf", ".gguf")}
# What `draftkit train` leaves beside a draft, and which of its settings a card shows.
TRAIN_FILE = "train.yaml"
SHOWN_SETTINGS = (
    "recipe", "draft", "data", "draft_vocab_size", "tokens_per_row", "seed", "optimization.optimizer",
    "optimization.lr", "optimization.schedule", "optimization.epochs", "optimization.max_steps",
    "optimization.accumulation", "optimization.precision", "lora", "options",
)  # fmt: skip


@dataclass(frozen=True)
class CardInput:
    """What a card is made from.

    `results`: of this draft only (`own_part`). `name`: what users load, a Hub id or a folder. `figures`: paths
    in the repository. `sha256`: the draft's digest.
    """

    draft: Draft
    results: Sequence[Result]
    license: License
    stated: Stated
    name: str
    sha256: str
    figures: Sequence[str] = ()

    @property
    def rows(self) -> list[NumberedCell]:
        """Every cell, with the number of its run."""
        return [(number, cell) for number, result in enumerate(self.results, start=1) for cell in result.cells]

    @property
    def target(self) -> str | None:
        return target_of(self.draft, self.results)

    @property
    def served_target(self) -> str:
        """The target in a command that any reader can paste: its Hub id, or TARGET for their own copy of it."""
        stated = None if self.draft.spec.architecture.own_model else self.stated.base_model
        return next((name for name in (stated, self.target) if name is not None and is_hub_id(name)), "TARGET")


def target_of(draft: Draft, results: Sequence[Result]) -> str | None:
    """The target that a draft was made for, or else measured with."""
    return draft.provenance.target or next((cell.target for result in results for cell in result.cells), None)


def render_card(given: CardInput) -> str:
    """README.md: the metadata that the Hub shows, and the card. The same input gives the same text."""
    from huggingface_hub import ModelCard

    rows, found = given.rows, _verdicts(given)
    settings = _read_settings(given.draft.path)
    card = ModelCard.from_template(
        header(
            given.draft,
            given.results,
            name=given.name,
            target=given.target,
            start=str(settings["draft"]) if settings.get("draft") else None,
            license=given.license.metadata,
            stated=given.stated,
        ),
        template_path=str(TEMPLATE),
        name=plain(short_name(given.name)),
        summary=_summary(given),
        facts="\n".join(f"| {name} | {value} |" for name, value in _facts(given).items()),
        acceptance=acceptance_table(rows) if rows else "",
        convention=CONVENTION,
        by_convention=convention_table(rows),
        by_category=category_table(rows),
        speed=speed_table(rows),
        advice=_advice(given),
        runs=runs_table(given.results),
        figures=[(path, Path(path).stem.replace("-", " ")) for path in given.figures],
        verdicts=[verdict.sentence for verdict in found],
        sooner=any(verdict.kind == "use" for verdict in found),
        trained_for=_trained_for(given),
        doubts=_doubts(given),
        commands=_commands(given),
        serving_notes=_serving_notes(given.draft),
        measure=command("draftkit", "eval", "--target", given.served_target, "--draft", given.name),
        placeholder="" if given.served_target != "TARGET" else _linked(given.target),
        training=_training(given.draft),
        settings=_settings(settings),
        limitations=_limitations(given),
        license=given.license.text,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _linked(name: str | None) -> str:
    if name is None:
        return "unknown"
    return f"[{name}](https://huggingface.co/{name})" if is_hub_id(name) else f"`{plain(name)}`"


def _summary(given: CardInput) -> str:
    return (
        f"{given.draft.spec.architecture.title}. It proposes tokens that {_linked(given.target)} then verifies "
        "(speculative decoding), in the unified layout of draftkit."
    )


def _facts(given: CardInput) -> dict[str, str]:
    """The table at the head of the card."""
    draft, spec = given.draft, given.draft.spec
    floats = [handle for handle in draft.tensors.values() if handle.dtype in FLOATING]
    size = sum(handle.nbytes for handle in draft.tensors.values())
    facts = {
        "method": spec.method,
        "target": _linked(given.target),
        "target revision": f"`{draft.provenance.target_revision}`" if draft.provenance.target_revision else "not fixed",
        "parameters": f"{sum(prod(handle.shape) for handle in floats):,} in {spec.dtype}, {size / 1e6:,.1f} MB",
    }
    architecture = spec.architecture
    vocabulary, whole = getattr(architecture, "draft_vocab_size", None), getattr(architecture, "vocab_size", None)
    if vocabulary is not None and whole is not None:
        facts["draft vocabulary"] = f"{vocabulary:,} of {whole:,} tokens"
    facts |= architecture.card_facts()
    facts["SHA-256 of spec and weights"] = f"`{given.sha256}`"
    facts["made by"] = f"draftkit {draft.provenance.draftkit_version}"
    return facts


def _verdicts(given: CardInput) -> tuple[ResultVerdict, ...]:
    """The verdicts of all runs together, without draft lengths that the draft was not trained for."""
    most = most_tokens(given.draft)
    cells = [cell for _, cell in given.rows if most is None or cell.num_speculative_tokens <= most]
    return verdicts([replace(cell, draft=given.name) for cell in cells])


def _advice(given: CardInput) -> str:
    """The best K by the speed models of the results, where no speed-up was measured: a card names one K."""
    if any(verdict.kind != "unmeasured" for verdict in _verdicts(given)):
        return ""
    most = most_tokens(given.draft)
    for result in given.results:
        for model in result.speed_models:
            if model.withheld is None and model.best_k is not None and (most is None or model.best_k <= most):
                stop = model.stop_above
                end = "" if stop is None else f"; above {stop} requests together, plain decoding is faster"
                context = "" if model.context is None else f" in a context of {model.context} tokens"
                return f"By the times of its rounds, K = {model.best_k} is best{context}{end}."
    return ""


def _trained_for(given: CardInput) -> str:
    """The limit on what is compared, where some lengths measured are beyond it."""
    most = most_tokens(given.draft)
    beyond = most is not None and any(cell.num_speculative_tokens > most for _, cell in given.rows)
    return f"The draft was trained for {most} tokens a round; longer ones are not considered." if beyond else ""


def _doubts(given: CardInput) -> list[str]:
    """The warnings of all runs, which name the draft by where it was measured."""
    found: dict[str, None] = {}
    for result in given.results:
        for warning in result.warnings:
            message = warning.message
            for name in {cell.draft for cell in result.cells}:
                message = message.replace(name, given.name)
            found[plain(message)] = None
    return list(found)


def _commands(given: CardInput) -> dict[str, str]:
    """Engine → the commands that serve the target with this draft; where a tree is to be used, that of the engines that
    draft it."""
    draft = given.draft
    judged = next((verdict for verdict in _verdicts(given) if verdict.kind != "unmeasured"), None)
    k = None if judged is None or judged.tree is not None else judged.num_speculative_tokens
    commands = serve_commands(draft, given.name, target=given.served_target, k=k)
    known = {cell.engine for _, cell in given.rows} | ({"SGLang"} if sglang.serves(draft.spec) else set())
    for engine, (layout_of, ending) in CONVERTED.items():
        if engine in known and engine not in commands:
            out, layout = short_name(given.name) + ending, layout_of(draft.spec)
            served = serve_commands(draft, Path(out), layout=layout, target=given.served_target, k=k)[engine]
            options = ("--to", layout, "--target", given.served_target)
            commands[engine] = f"{command('draftkit', 'convert', given.name, out, *options)}\n{served}"
    return commands | (_tree_commands(given, judged) if judged is not None and judged.kind == "use" else {})


def _tree_commands(given: CardInput, judged: ResultVerdict) -> dict[str, str]:
    """The commands of the engines that draft the tree of a verdict; none of a chain's."""
    tree = None if judged.tree is None else read_tree(judged.tree).dynamic
    if tree is None:
        return {}
    layout_of, ending = CONVERTED["SGLang"]
    out = short_name(given.name) + ending
    served = serve_trees(given.draft, Path(out), tree, target=given.served_target)
    options = ("--to", layout_of(given.draft.spec), "--target", given.served_target)
    convert = command("draftkit", "convert", given.name, out, *options)
    return {engine: f"{convert}\n{line}" for engine, line in served.items()}


def _serving_notes(draft: Draft) -> list[str]:
    reason, remedy = refusal_by_vllm(draft.spec), remedy_for_vllm(draft.spec)
    if reason is None:
        return [*refusal_notes(draft.spec), *method_note(draft.spec)]
    instead = f" But {remedy}." if remedy else ""
    return [f"vLLM: not served, and the folder is marked so that vLLM refuses it: {reason}.{instead}"]


def _training(draft: Draft) -> str:
    """A sentence of the card that says where the weights come from."""
    provenance = draft.provenance
    if provenance.format == "trained":
        return f"Trained with draftkit {provenance.draftkit_version} for {_linked(provenance.target)}."
    revision = f" at revision `{provenance.source_revision}`" if provenance.source_revision else ""
    return (
        f"Not trained by draftkit: converted from {_linked(provenance.source)}{revision} (format {provenance.format}). "
        "Its data and recipe are what that source says of them."
    )


def _settings(settings: Mapping[str, object]) -> str:
    """The recipe of a draft that draftkit trained, as a table; empty for any other."""
    lines = []
    for name in SHOWN_SETTINGS:
        value: object = settings
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in (None, "", 0, {}, []):
            lines.append((name, Path(value).name if name == "data" and isinstance(value, str) else value))
    return table(("setting", "value"), lines) if lines else ""


def _read_settings(folder: Path) -> dict[str, object]:
    try:
        settings = read_yaml_file(folder / TRAIN_FILE)
    except DraftkitError:
        return {}
    return settings if isinstance(settings, dict) else {}


def _limitations(given: CardInput) -> list[str]:
    draft, spec = given.draft, given.draft.spec
    found = [f"It fits {_linked(given.target)} only; with a fine-tune of it, fewer tokens are accepted."]
    found += spec.architecture.limitations()
    if (limit := spec.architecture.max_positions) is not None:
        runner = f"vLLM's model runner {limit.runner}"
        found.append(f"It is made for {limit.tokens:,} tokens of prompt and answer; beyond, {runner} does not draft.")
    if (longest := trained_tokens(draft.provenance.facts)) is not None:
        found.append(f"Its longest sample in training had {longest:,} tokens; how it does beyond was not taught.")
    if rows := given.rows:
        temperatures = sorted({cell.temperature for _, cell in rows})
        datasets = dict.fromkeys(plain(cell.dataset) for _, cell in rows)
        found.append(
            f"It was measured on {', '.join(datasets)} at temperature {', '.join(f'{t:g}' for t in temperatures)}; "
            "other text, languages, lengths and temperatures give other figures."
        )
    if any(of_too_few_prompts(cell) for _, cell in given.rows):
        found.append(f"What was measured on fewer than {FEWEST_PROMPTS} prompts is not in the metadata.")
    found += [f"Lost in conversion: {plain(loss)}." for loss in draft.provenance.losses]
    found += [f"{finding.severity.capitalize()}: {plain(finding.message)}." for finding in findings_of_draft(draft)]
    assumed = [fact.name for fact in draft.provenance.facts if fact.assumed]
    if assumed:
        found.append(f"Its source does not state {', '.join(assumed)}; the defaults of its format were taken.")
    return found


EVAL_FOLDER = "eval"  # in a draft's folder: what was measured with it
ABOUT_SPEED = ("speed-unexplained", "speed-disturbed", "unequal-baseline")  # warnings, each of one cell


def own_part(path: Path, folder: Path, sha256: str, name: str) -> tuple[Result, dict[str, object]]:
    """The part of a result file that was measured with the draft in `folder`, whose digest is `sha256`.

    As a result, and as the file has it, with fields that a later version may have added; without paths of this machine.
    All its cells carry the digest, and call the draft `name`. Raises `SourceError`/`FormatError` for a file that is no
    result, `DraftkitError` when nothing in it was measured with this draft.
    """
    measured = read_result(path)
    places = [i for i, cell in enumerate(measured.cells) if _belongs(cell, folder, sha256)]
    if not places:
        raise _not_measured(measured, path, folder)
    stored = named_result(read_object(path))
    result = result_from(stored, path)
    names = {result.cells[i].draft for i in places}
    models = [i for i, model in enumerate(result.speed_models) if model.draft in names]
    part: dict[str, Any] = stored | {
        "cells": [stored["cells"][i] | {"draft_sha256": sha256, "draft": name} for i in places],
        "speed_models": [stored["speed_models"][i] | {"draft": name} for i in models],
    }
    others = {cell.draft for cell in result.cells} - names
    part["warnings"] = [
        warning | {"message": _renamed(read.message, names, name)}
        for warning, read in zip(stored.get("warnings", []), result.warnings, strict=True)
        if not read.message.startswith(_beginnings(others))
    ]
    part.pop("verdicts", None)  # they compare all drafts
    return result_from(part, path), part


def _beginnings(drafts: Iterable[str]) -> tuple[str, ...]:
    """The words with which messages about one of these drafts begin."""
    return tuple(f"{draft}{after}" for draft in drafts for after in (", ", " "))


def _renamed(message: str, drafts: Iterable[str], name: str) -> str:
    """A message with another name for one of these drafts, where it is about one."""
    called = next((draft for draft in drafts if message.startswith(_beginnings([draft]))), None)
    return message if called is None else name + message.removeprefix(called)


def with_sure_speeds(result: Result) -> Result:
    """The result without speed-ups that have no interval, as those of one pass, or that their run has doubts of, and
    without warnings of them: a card's reader cannot look at the run, and two runs one after the other may differ by
    what else the machine did.
    """
    cells = tuple(cell if _is_sure(cell) else _untimed(cell) for cell in result.cells)
    shown = tuple(cell.name for cell in cells if cell.speedup is not None)
    warnings = tuple(w for w in result.warnings if w.name not in ABOUT_SPEED or w.message.startswith(shown))
    return replace(result, cells=cells, warnings=warnings)


def _is_sure(cell: Cell) -> bool:
    return cell.speedup_interval is not None and cell.speedup_interval.bounds is not None and well_known(cell)


def _untimed(cell: Cell) -> Cell:
    return replace(cell, speedup=None, speedup_interval=None, baseline_tokens_per_second=None)


def _belongs(cell: Cell, folder: Path, sha256: str) -> bool:
    return _is_named(cell, folder) if cell.draft_sha256 is None else cell.draft_sha256 == sha256


def _is_named(cell: Cell, folder: Path) -> bool:
    own = os.path.realpath(folder)
    return os.path.realpath(os.path.expanduser(cell.draft)) == own or cell.draft == names_of_paths([own]).get(own)


def _not_measured(result: Result, path: Path, folder: Path) -> DraftkitError:
    """Why no cell belongs to the draft."""
    own = [cell for cell in result.cells if _is_named(cell, folder)] or result.cells
    measure = command("draftkit", "eval", "--target", own[0].target, "--draft", folder, "--json")
    measure += f" > {command(path.name)}"
    if path.parent == folder / EVAL_FOLDER:
        return DraftkitError(
            f"{path.name} was measured with other weights or facts than {folder} holds now",
            where=path,
            hint=f"remove the file, or measure again: {measure}",
        )
    drafts = ", ".join(sorted({cell.draft for cell in result.cells}))
    return DraftkitError(
        f"{path.name} has no measurement of this draft",
        where=folder,
        expected=f"a cell with its folder or its digest; the drafts in the file: {drafts}",
        hint=measure,
    )
