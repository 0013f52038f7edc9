"""A target's multi-token prediction heads for the terminal and as JSON: what is promised, held, damaged, and used."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from draftkit.checks.evidence import Evidence, Stored
from draftkit.checks.registry import findings
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.formats.mtp.heads import TargetHeads
from draftkit.engines.serving import uses_of_heads
from draftkit.errors import command
from draftkit.finding import Finding
from draftkit.io.records import to_dict


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
