"""Checkpoints, plans and conversions as terminal tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
from draftkit.engines.serving import answers, release_notes, serve_commands, serve_notes, uses_of_heads
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.engines.vllm.serve import loaded_wrongly, method_note
from draftkit.errors import command
from draftkit.finding import Finding
from draftkit.io.handles import TensorHandle
from draftkit.io.records import excerpt, to_dict
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin, trained_tokens
from draftkit.layout.quantization import name_of_format
from draftkit.layout.stored_weights import stored_weights
from draftkit.layout.target import TargetFacts
from draftkit.report.terminal.screen import columns, labelled, named_table, severity


def show_conversion(console: Console, conversion: Conversion, *, verbose: bool = False) -> None:
    """A planned conversion: the way into the layout, and the way out of it where the destination is another."""
    draft, reading = conversion.draft, conversion.reading
    if draft is not None:
        console.print(labelled("would be written", _written(draft, conversion.destination.name), "green"))
    elif reading is not None:
        console.print(_verdict(reading.checkpoint.source.name, _format_title(reading.plan.format), reading.plan, []))
    _show_losses(console, conversion.losses)
    if conversion.draft is not None:
        for note in release_notes(conversion.draft.spec, conversion.destination.name):
            console.print(note, soft_wrap=True)
    _show_findings(console, _findings_of(conversion))
    if reading is not None:
        _show_facts(console, reading.plan.facts, verbose=verbose)
        _show_moves(console, reading)
        _show_missing(console, reading.plan)
    if conversion.export is not None:
        console.print(_moves_table(conversion.export.moves, f"written as {conversion.destination.name}"))


def report_conversion(console: Console, conversion: Conversion, out: Path, *, verbose: bool = False) -> None:
    """Print what was written, what had to be assumed, and how to serve it."""
    draft = conversion.require_draft()
    read_as = conversion.reading.plan.format if conversion.reading else "unified"
    written = f"{_written(draft, conversion.destination.name, out)}; from {conversion.source.name} ({read_as})"
    console.print(labelled("written", written, "green"), soft_wrap=True)
    _show_quantized(console, draft)
    _show_losses(console, conversion.losses)
    _show_findings(console, _findings_of(conversion))
    _show_facts(console, draft.provenance.facts, verbose=verbose)
    if conversion.export is None and (reason := refusal_by_vllm(draft.spec)):
        remedy = remedy_for_vllm(draft.spec)
        console.print(
            f"vLLM runs this draft wrongly or not at all ({reason}), so the folder is marked: vLLM refuses to load it."
            + (f" But {remedy}." if remedy else "")
        )
    elif reason := loaded_wrongly(draft.spec, conversion.destination.name):
        console.print(f"Do not serve this folder with vLLM, but one of --to unified: {reason}.")
    target = conversion.target.name if conversion.target else None
    if draft.spec.architecture.own_model and target == conversion.source.name:
        console.print("This is the target itself: pass it with --target where its drafts are converted and measured.")
        return
    layout = conversion.destination.name
    for note in release_notes(draft.spec, layout):
        console.print(note, soft_wrap=True)
    commands = serve_commands(draft, out, layout=layout, target=target, local=True)
    for engine, serving in commands.items():
        console.print(f"{engine}: {serving}", soft_wrap=True, markup=False)
    for note in serve_notes(draft.spec, layout):
        console.print(note, soft_wrap=True)


def _findings_of(conversion: Conversion) -> list[Finding]:
    """What is found in the source; of a unified one whose target is known, beside it."""
    if conversion.reading is not None:
        return findings_of_reading(conversion.reading)
    return findings_of_draft(conversion.require_draft(), conversion.target)


def _show_quantized(console: Console, draft: Draft) -> None:
    """How the weights are quantized, how many, and which matrices are not."""
    stated = draft.spec.quantization
    if stated is None:
        return
    found = {name: (handle.dtype, handle.shape) for name, handle in draft.tensors.items()}
    weights = {weight.name for weight in stored_weights(found, stated).values()}
    matrices = {n for n, (_, shape) in draft.plain_tensors.items() if len(shape) == 2 and n.endswith(".weight")}
    plain = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in matrices - weights})
    name = name_of_format(stated) or str(stated.get("quant_method"))
    left = f"; plain: {', '.join(plain)}" if plain else ""
    console.print(f"quantized: {len(weights)} of {len(matrices)} matrices ({name}), {draft.nbytes / 1e6:,.2f} MB{left}")


def show_reading(console: Console, reading: Reading, *, verbose: bool = False) -> None:
    """A foreign checkpoint: whether it is sound, its defects and what is missing, its facts by doubt; with `verbose`
    the tensors with their moves and what is dropped too."""
    plan, source = reading.plan, reading.checkpoint.source
    found = findings_of_reading(reading)
    console.print(_verdict(source.name, _format_title(plan.format), plan, found))
    for note in [] if plan.spec is None else release_notes(plan.spec):
        console.print(f"as draftkit convert writes it, {note}", soft_wrap=True)
    _show_missing(console, plan)
    _show_findings(console, found)
    if plan.format == UNKNOWN and verbose:
        _show(console, _config_table(reading.checkpoint.config))
    _show_facts(console, plan.facts, verbose=verbose)
    if verbose:
        _show_moves(console, reading)
    else:
        counts = [f"format {plan.format}", f"{len(plan.facts)} facts", f"{len(reading.checkpoint.tensors)} tensors"]
        if plan.dropped_keys:
            counts.append(f"{len(plan.dropped_keys)} dropped config keys")
        console.print(f"{', '.join(counts)}: -v shows all")


def show_draft(console: Console, draft: Draft, target: TargetFacts | None = None, *, verbose: bool = False) -> None:
    """A unified draft: whether it is sound, where it came from, its defects and its facts by doubt; all facts and
    tensors where it is `verbose`."""
    found = findings_of_draft(draft, target)
    facts = draft.provenance.facts
    title = f"unified draft of the method {draft.spec.method}"
    console.print(_verdict(str(draft.path), title, None, found, facts))
    console.print(f"converted from {draft.provenance.source} ({draft.provenance.format})")
    if (longest := trained_tokens(facts)) is not None:
        console.print(f"trained up to {longest:,} tokens")
    _show_quantized(console, draft)
    if reason := refusal_by_vllm(draft.spec):
        remedy = remedy_for_vllm(draft.spec)
        console.print(f"marked so that vLLM refuses it: {reason}" + (f"; {remedy}" if remedy else ""))
    for note in (*release_notes(draft.spec), *method_note(draft.spec)):
        console.print(note, soft_wrap=True)
    _show_losses(console, draft.provenance.losses)
    _show_findings(console, found)
    _show_facts(console, facts, verbose=verbose)
    if verbose:
        console.print(_tensors_table(draft.tensors))
    else:
        console.print(f"{len(facts)} facts, {len(draft.tensors)} tensors: -v shows all")


def after_inspecting(found: Reading | Draft, source: str, target: str | None) -> tuple[object, ...]:
    """The command that is likely wanted after `inspect`."""
    if isinstance(found, Draft):
        return "eval", "--target", target or found.provenance.target or "TARGET", "--draft", source
    default = found.checkpoint.source.default_target
    named = target or default or "TARGET"
    if found.plan.spec is not None and found.plan.spec.architecture.own_model:
        return "eval", "--target", "TARGET", "--draft", source
    if found.plan.missing and target is None:
        return "inspect", source, "--target", named
    sets = [word for fact, _ in found.plan.missing for word in ("--set", f"{fact}=VALUE")]
    return "convert", source, "OUT", "--target", named, *sets


def _written(draft: Draft, layout: str, out: Path | None = None) -> str:
    """A phrase that says what a conversion makes and where it is written."""
    made = f"{draft.spec.method}, {len(draft.tensors)} tensors, "
    return made + (f"{out} ({layout})" if out is not None else f"in the layout {layout}")


def _format_title(name: str) -> str:
    """The title of a format, in words."""
    known = {format.NAME: format.TITLE for format in all_formats()}
    return known.get(name, "no draft of a known format" if name == UNKNOWN else name)


def _verdict(
    source: str,
    title: str,
    plan: Plan | None,
    found: Sequence[Finding],
    facts: Sequence[FactOrigin] = (),
) -> Text:
    """The first line: what a checkpoint is, and whether anything is wrong with it."""
    facts = plan.facts if plan else facts
    defects = sum(finding.severity in ("error", "warning") for finding in found)
    assumed = sum(fact.assumed for fact in facts)
    if plan is not None and plan.refusal is not None:
        state = Text("not convertible as it is", "bold red")
    elif defects:
        state = Text(f"{defects} known defect{'s' if defects > 1 else ''}", "bold yellow")
    elif plan is not None and plan.missing:
        state = Text("not complete", "bold yellow").append(
            ": it does not state all that a conversion needs", "not bold"
        )
    else:
        state = Text("sound", "bold green").append(": no known defects", "not bold")
    tail = f"; {assumed} fact{'s' if assumed != 1 else ''} assumed" if assumed else ""
    return Text.assemble(f"{source}: {title}, ", state, tail)


def _show_missing(console: Console, plan: Plan) -> None:
    for fact, hint in plan.missing:
        console.print(labelled("missing", f"{fact} ({hint})", "yellow"))


def _show_facts(console: Console, facts: Sequence[FactOrigin], *, verbose: bool) -> None:
    """Print the facts that were assumed and would cost acceptance if wrong, or all if `verbose`; the most doubtful
    first."""
    ordered = sorted(facts, key=lambda fact: fact.certainty)
    doubtful = [fact for fact in ordered if fact.doubtful]
    if verbose:
        _show(console, facts_table(ordered, "facts, the most doubtful first"))
    elif doubtful:
        console.print("assumed; a wrong one costs acceptance (--set FACT=VALUE); most doubtful first:")
        rows = columns()
        for fact in doubtful:
            rows.add_row("", Text(fact.name, "yellow"), fact.value, fact.note)
        console.print(rows)


def _show_moves(console: Console, reading: Reading) -> None:
    """Print what becomes of each tensor, and which config keys are dropped."""
    plan = reading.plan
    if plan.moves:
        console.print(_moves_table(plan.moves, f"{len(reading.checkpoint.tensors)} tensors"))
    else:
        console.print(_tensors_table(reading.checkpoint.tensors))
    if plan.dropped_keys:
        dropped = named_table("config key", "why it is not in the spec", title="dropped config keys")
        for key, reason in sorted(plan.dropped_keys.items()):
            dropped.add_row(key, reason)
        console.print(dropped)


def facts_table(facts: Iterable[FactOrigin], title: str = "facts") -> Table:
    table = named_table("fact", "value", "origin", "note", title=title)
    for fact in facts:
        table.add_row(fact.name, fact.value, fact.origin, fact.note)
    return table


def _config_table(config: Mapping[str, object]) -> Table:
    table = named_table("config key", "value", title="config")
    for key, value in config.items():
        table.add_row(Text(key), Text(excerpt(value)))
    return table


def formats_table() -> Table:
    table = named_table("format", "what it is", "written by", title="formats that convert reads and writes")
    for format in all_formats():
        destination = destination_of(format)
        table.add_row(format.NAME, format.TITLE, f"--to {destination}" if destination else "")
    table.caption = f"every draft is also written --to {UNIFIED}, the default, and what vLLM runs --to {VLLM}"
    return table


def formats_json() -> dict[str, object]:
    formats = [{"name": one.NAME, "title": one.TITLE, "written_by": destination_of(one)} for one in all_formats()]
    return {"schema": 1, "formats": formats}


def conversion_json(conversion: Conversion) -> dict[str, object]:
    """A planned conversion: what `reading_json` has, or `draft_json` for a unified source, and the way out."""
    if conversion.reading is not None:
        source = reading_json(conversion.reading)
    else:
        source = draft_json(conversion.require_draft(), conversion.target)
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
        "engines": {} if plan.spec is None else answers(plan.spec),
        "findings": [to_dict(finding) for finding in findings_of_reading(reading)],
    } | ({"config": reading.checkpoint.config} if plan.format == UNKNOWN else {})


def draft_json(draft: Draft, target: TargetFacts | None = None) -> dict[str, object]:
    return {
        "schema": 1,
        "source": str(draft.path),
        "format": "unified",
        "spec": draft.spec.to_dict(),
        "provenance": to_dict(draft.provenance),
        "tensors": _tensors_json(draft.tensors),
        "engines": answers(draft.spec),
        "findings": [to_dict(finding) for finding in findings_of_draft(draft, target)],
    }


def _show(console: Console, table: Table) -> None:
    """Print a table, unless it is empty."""
    if table.row_count:
        console.print(table)


def _tensors_table(tensors: Mapping[str, TensorHandle]) -> Table:
    table = named_table("tensor", "dtype", "shape", title=f"{len(tensors)} tensors")
    for handle in tensors.values():
        table.add_row(handle.name, handle.dtype, _shape(handle.shape))
    return table


def _tensors_json(tensors: Mapping[str, TensorHandle]) -> dict[str, object]:
    return {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in tensors.items()}


def _missing(plan: Plan) -> list[dict[str, str]]:
    return [{"fact": fact, "next": hint} for fact, hint in plan.missing]


def _moves_table(moves: Sequence[Move], title: str) -> Table:
    table = named_table("tensor", "dtype", "shape", "becomes", title=title)
    for move in moves:
        becomes = move.destination if move.destination is not None else f"dropped: {move.reason}"
        operation = "" if move.operation in ("copy", "drop") else f" ({move.operation})"
        table.add_row(" + ".join(move.sources), move.dtype, _shape(move.shape), becomes + operation)
    return table


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print each finding in its severity's color: what is wrong, what mends it, and where it is documented."""
    rows = columns()
    for finding in findings:
        named = f" [{'; '.join(text for text in (finding.name, finding.source) if text)}]"
        rows.add_row(severity(finding.severity), finding.message + named)
        for label, text in (("if ignored", finding.cost), ("mend", finding.fix)):
            if text:
                rows.add_row("", f"{label}: {text}")
    _show(console, rows)


def _show_losses(console: Console, losses: Sequence[str]) -> None:
    for loss in losses:
        console.print(f"lost: {loss}")


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def findings_of_heads(checkpoint: Checkpoint, heads: TargetHeads, *, read: bool) -> list[Finding]:
    """The findings about a target's heads; `read` looks at the numbers in their tensors too."""
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
    rows = columns()
    for engine, use in _uses(checkpoint, heads).items():
        rows.add_row(f"{engine}:", use)
    console.print(rows)
    _show_findings(console, found)
    if not found and heads.tensors:
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
