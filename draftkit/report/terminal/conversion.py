"""Checkpoints, plans and conversions as terminal tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftkit.checks.checkpoint import findings_of_draft, findings_of_reading
from draftkit.checks.evidence import Evidence, Stored
from draftkit.checks.registry import findings
from draftkit.convert.api import UNKNOWN, Conversion, Reading
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.destinations import UNIFIED, VLLM, destination_of, remedy_for_vllm
from draftkit.convert.detect import all_formats
from draftkit.convert.formats.mtp.heads import TargetHeads
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.engines.serving import serve_commands, uses_of_heads
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.engines.vllm.serve import loaded_wrongly, method_note
from draftkit.errors import command
from draftkit.finding import Finding
from draftkit.io.handles import TensorHandle
from draftkit.io.records import excerpt, to_dict
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin


def show_conversion(console: Console, conversion: Conversion) -> None:
    """A planned conversion: the way into the layout, and the way out of it where the destination is another."""
    if conversion.reading is not None:
        show_reading(console, conversion.reading)
    if conversion.export is not None:
        console.print(_moves_table(conversion.export.moves, f"written as {conversion.destination.name}"))
    _show_losses(console, conversion.losses)


def report_conversion(console: Console, conversion: Conversion, out: Path) -> None:
    """What was written, what had to be assumed, and how to serve it."""
    draft = conversion.require_draft()
    read_as = conversion.reading.plan.format if conversion.reading else "unified"
    console.print(
        f"{conversion.source.name} ({read_as}) → {out} ({conversion.destination.name}): {draft.spec.method}, "
        f"{len(draft.tensors)} tensors"
    )
    assumed = [
        fact for fact in draft.provenance.facts if fact.assumed or fact.origin not in ("stated", "format default")
    ]
    _show(console, facts_table(assumed, "facts that the config does not state"))
    if conversion.reading is not None:
        _show_findings(console, findings_of_reading(conversion.reading))
    _show_losses(console, conversion.losses)
    if conversion.export is None and (reason := refusal_by_vllm(draft.spec)):
        remedy = remedy_for_vllm(draft.spec)
        console.print(
            f"vLLM would run this draft wrongly ({reason}), so the folder is marked: vLLM refuses to load it."
            + (f" But {remedy}." if remedy else "")
        )
    elif reason := loaded_wrongly(draft.spec, conversion.destination.name):
        console.print(f"Do not serve this folder with vLLM, but one of --to unified: {reason}.")
    target = conversion.target.name if conversion.target else None
    if draft.spec.architecture.own_model and target == conversion.source.name:
        console.print("This is the target itself: pass it with --target where its drafts are converted and measured.")
        return
    commands = serve_commands(draft, out, layout=conversion.destination.name, target=target, local=True)
    for engine, serving in commands.items():
        console.print(f"{engine}: {serving}", soft_wrap=True, markup=False)
    for note in method_note(draft.spec, conversion.destination.name):
        console.print(note, soft_wrap=True)


def show_reading(console: Console, reading: Reading) -> None:
    """A foreign checkpoint: facts with their origins, tensors with their moves, what is dropped, missing or defect."""
    plan, source = reading.plan, reading.checkpoint.source
    method = plan.spec.method if plan.spec else "not known yet"
    console.print(f"{source.name}: format {plan.format}, method {method}")
    _show(console, facts_table(plan.facts))
    if plan.format == UNKNOWN:
        _show(console, _config_table(reading.checkpoint.config))
    if plan.moves:
        console.print(_moves_table(plan.moves, f"{len(reading.checkpoint.tensors)} tensors"))
    else:
        console.print(_tensors_table(reading.checkpoint.tensors))
    if plan.dropped_keys:
        dropped = Table("config key", "why it is not in the spec", title="dropped config keys")
        for key, reason in sorted(plan.dropped_keys.items()):
            dropped.add_row(key, reason)
        console.print(dropped)
    _show_findings(console, findings_of_reading(reading))
    for fact, hint in plan.missing:
        console.print(f"missing: {fact} ({hint})")


def show_draft(console: Console, draft: Draft) -> None:
    """A unified draft: where it came from, its facts, tensors and defects."""
    console.print(f"{draft.path}: unified draft, method {draft.spec.method}")
    console.print(f"converted from {draft.provenance.source} ({draft.provenance.format})")
    if reason := refusal_by_vllm(draft.spec):
        remedy = remedy_for_vllm(draft.spec)
        console.print(f"marked so that vLLM refuses it: {reason}" + (f"; {remedy}" if remedy else ""))
    for note in method_note(draft.spec):
        console.print(note, soft_wrap=True)
    _show(console, facts_table(draft.provenance.facts))
    console.print(_tensors_table(draft.tensors))
    _show_findings(console, findings_of_draft(draft))
    _show_losses(console, draft.provenance.losses)


def facts_table(facts: Iterable[FactOrigin], title: str = "facts") -> Table:
    table = Table("fact", "value", "origin", "note", title=title)
    for fact in facts:
        table.add_row(fact.name, fact.value, fact.origin, fact.note)
    return table


def _config_table(config: Mapping[str, object]) -> Table:
    table = Table("config key", "value", title="config")
    for key, value in config.items():
        table.add_row(escape(key), escape(excerpt(value)))
    return table


def formats_table() -> Table:
    table = Table("format", "what it is", "written by", title="formats that convert reads and writes")
    for format in all_formats():
        destination = destination_of(format)
        table.add_row(format.NAME, format.TITLE, f"--to {destination}" if destination else "")
    table.caption = f"every draft is also written --to {UNIFIED}, the default, and what vLLM runs --to {VLLM}"
    return table


def conversion_json(conversion: Conversion) -> dict[str, object]:
    """A planned conversion: what `reading_json` has, or `draft_json` for a unified source, and the way out."""
    if conversion.reading is not None:
        source = reading_json(conversion.reading)
    else:
        source = draft_json(conversion.require_draft())
    export = conversion.export
    written = export and {"config": export.config, "moves": [to_dict(move) for move in export.moves]}
    return source | {"to": conversion.destination.name, "export": written, "losses": list(conversion.losses)}


def reading_json(reading: Reading) -> dict[str, object]:
    plan = reading.plan
    return {
        "schema": 1,
        "source": reading.checkpoint.source.name,
        "revision": reading.checkpoint.source.revision,
        "format": plan.format,
        "spec": plan.spec.to_dict() if plan.spec else None,
        "facts": [to_dict(fact) for fact in plan.facts],
        "missing": _missing(plan),
        "dropped_keys": plan.dropped_keys,
        "moves": [to_dict(move) for move in plan.moves],
        "tensors": _tensors_json(reading.checkpoint.tensors),
        "findings": [to_dict(finding) for finding in findings_of_reading(reading)],
    } | ({"config": reading.checkpoint.config} if plan.format == UNKNOWN else {})


def draft_json(draft: Draft) -> dict[str, object]:
    return {
        "schema": 1,
        "source": str(draft.path),
        "format": "unified",
        "spec": draft.spec.to_dict(),
        "provenance": to_dict(draft.provenance),
        "tensors": _tensors_json(draft.tensors),
        "findings": [to_dict(finding) for finding in findings_of_draft(draft)],
    }


def _show(console: Console, table: Table) -> None:
    """A table, unless it is empty."""
    if table.row_count:
        console.print(table)


def _tensors_table(tensors: Mapping[str, TensorHandle]) -> Table:
    table = Table("tensor", "dtype", "shape", title=f"{len(tensors)} tensors")
    for handle in tensors.values():
        table.add_row(handle.name, handle.dtype, _shape(handle.shape))
    return table


def _tensors_json(tensors: Mapping[str, TensorHandle]) -> dict[str, object]:
    return {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in tensors.items()}


def _missing(plan: Plan) -> list[dict[str, str]]:
    return [{"fact": fact, "next": hint} for fact, hint in plan.missing]


def _moves_table(moves: Sequence[Move], title: str) -> Table:
    table = Table("tensor", "dtype", "shape", "becomes", title=title)
    for move in moves:
        becomes = move.destination if move.destination is not None else f"dropped: {move.reason}"
        operation = "" if move.operation in ("copy", "drop") else f" ({move.operation})"
        table.add_row(" + ".join(move.sources), move.dtype, _shape(move.shape), becomes + operation)
    return table


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    table = Table("severity", "defect", "finding", "what to do", "source", title="findings")
    for finding in findings:
        table.add_row(finding.severity, finding.name, finding.message, finding.fix, finding.source)
    console.print(table)


def _show_losses(console: Console, losses: Sequence[str]) -> None:
    for loss in losses:
        console.print(f"lost: {loss}")


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def findings_of_heads(checkpoint: Checkpoint, heads: TargetHeads, *, read: bool) -> list[Finding]:
    """What is wrong with the heads; `read` looks at the numbers in their tensors too."""
    evidence = Evidence(config=checkpoint.config, heads=heads, stored=Stored(checkpoint.tensors) if read else None)
    return findings(evidence, "target_heads")


def show_heads(
    console: Console, checkpoint: Checkpoint, heads: TargetHeads, found: Sequence[Finding], *, read: bool
) -> None:
    """Print what `heads_json` has; `read` as in `findings_of_heads`."""
    source = checkpoint.source.name
    size = sum(handle.nbytes for handle in heads.tensors.values())
    console.print(
        f"{source}: a target ({checkpoint.config.get('model_type')}) whose config promises {heads.promised} "
        f"multi-token prediction head(s); its weights hold {heads.count}: {len(heads.tensors)} tensors, "
        f"{size / 1e6:,.1f} MB",
        soft_wrap=True,
    )
    if heads.trunk and heads.tensors:
        console.print(f"compared with the target's own layer {heads.trunk.removesuffix('.')}")
    table = Table("engine", "what it does with them", title="engines")
    for engine, use in _uses(checkpoint, heads).items():
        table.add_row(engine, use)
    console.print(table)
    if found:
        table = Table("severity", "finding", "what it costs", "what to do", title="findings")
        for finding in found:
            table.add_row(finding.severity, finding.message, finding.cost, finding.fix)
        console.print(table)
    elif heads.tensors:
        console.print("nothing is missing, nothing is stored otherwise than in the target's own layers")
    if heads.tensors and not read:
        told = "told from names, shapes and dtypes; to read the numbers too"
        console.print(f"{told}: {command('draftkit', 'inspect', source, '--check')}", soft_wrap=True)
    if heads.tensors:
        take = command("draftkit", "convert", source, "HEADS", "--part", "mtp")
        console.print(f"to take them out: {take}", soft_wrap=True)
    whole = command("draftkit", "inspect", source, "--from", "causal-lm")
    console.print(f"to see the whole model as a draft: {whole}", soft_wrap=True)


def heads_json(checkpoint: Checkpoint, heads: TargetHeads, found: Sequence[Finding]) -> dict[str, object]:
    return {
        "schema": 1,
        "source": checkpoint.source.name,
        "revision": checkpoint.source.revision,
        "format": "target",
        "promised": heads.promised,
        "held": heads.count,
        "prefixes": list(heads.prefixes),
        "like": heads.trunk,
        "tensors": {
            name: {"dtype": handle.dtype, "shape": list(handle.shape)} for name, handle in heads.tensors.items()
        },
        "engines": _uses(checkpoint, heads),
        "findings": [to_dict(finding) for finding in found],
    }


def _uses(checkpoint: Checkpoint, heads: TargetHeads) -> dict[str, str]:
    return uses_of_heads(heads.kind, max(heads.promised, 1), str(checkpoint.config.get("model_type")))
