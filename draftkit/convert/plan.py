"""A conversion into the layout as data: the spec it arrives at, and how every tensor of it comes about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, drop
from draftkit.errors import DraftkitError, FormatError, LayoutError
from draftkit.finding import Finding
from draftkit.io.dtypes import FLOATS
from draftkit.io.handles import TensorHandle
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec

# What transformers once saved beside the weights and computes by itself today.
ROPE_BUFFER = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
MASK_BUFFER = re.compile(r"(.*\.)?(attn|attention)\.(bias|masked_bias)")
MASK_DIMENSIONS = (0, 4)  # a learned bias of that name would have one


@dataclass(frozen=True)
class Plan:
    """Everything a conversion into the layout will do, before it does any of it.

    `spec` is None while facts are missing (`missing`: fact and what to pass). `dropped_keys`: config key → reason.
    `losses`: what the checkpoint has and the layout cannot hold; `agreed_losses`: what the user said to ignore.
    `problems`, where it contradicts itself, are described and stop a conversion; `refusal` is why there is no plan for
    the rest.
    """

    format: str
    spec: DraftSpec | None
    moves: tuple[Move, ...]
    facts: tuple[FactOrigin, ...]
    missing: tuple[tuple[str, str], ...]
    dropped_keys: dict[str, str]
    losses: tuple[str, ...] = ()
    agreed_losses: tuple[str, ...] = ()
    copied_files: tuple[Path, ...] = ()
    problems: tuple[Finding, ...] = ()
    refusal: DraftkitError | None = None

    def require_spec(self, where: object) -> DraftSpec:
        """The spec. Raises `FormatError` for the problems, `LayoutError` that lists the missing facts."""
        if self.problems:
            raise FormatError(
                "\n    ".join(problem.message for problem in self.problems),
                where=where,
                hint="; ".join(dict.fromkeys(problem.fix for problem in self.problems)),
            )
        if self.spec is None:
            raise LayoutError(
                "the checkpoint does not state " + " or ".join(name for name, _ in self.missing),
                where=where,
                hint="; ".join(dict.fromkeys(hint for _, hint in self.missing)),
            )
        return self.spec


def make_plan(
    format_name: str,
    checkpoint: Checkpoint,
    facts: Facts,
    spec: DraftSpec | None,
    moves: Sequence[Move],
    copied_files: Sequence[Path] = (),
) -> Plan:
    """Assemble a plan and check it: every tensor and every config key is accounted for, and the result fits the spec.

    Facts that the user overrides replace those of `spec`. Raises `FormatError`/`LayoutError` with everything wrong.
    """
    facts.check_all_used()
    moves = [_without_buffer(checkpoint, move) for move in moves]
    moved = {name for move in moves for name in move.sources}
    if unmoved := checkpoint.tensors.keys() - moved:
        raise FormatError(
            f"tensors that this format does not define: {', '.join(sorted(unmoved))}",
            where=checkpoint.source.path,
            hint="draftkit inspect --formats lists what can be read",
        )
    if spec is not None:
        facts.record_definition(spec)
        spec = facts.overridden(spec)
        results = {m.destination: (m.dtype, m.shape) for m in moves if m.destination is not None}
        if not facts.problems:
            spec.check_tensors(
                results,
                checkpoint.source.path,
                hint="config.json and the weights disagree, or the file is incomplete: fetch the checkpoint again",
            )
    plan = planned_so_far(format_name, facts)
    return replace(plan, spec=spec, moves=tuple(moves), copied_files=tuple(copied_files))


def planned_so_far(format_name: str, facts: Facts, refusal: DraftkitError | None = None) -> Plan:
    """What is known of a checkpoint before its tensors are looked at, or when they cannot be."""
    return Plan(
        format=format_name,
        spec=None,
        moves=(),
        facts=tuple(facts.found),
        missing=tuple(facts.missing),
        dropped_keys=facts.dropped,
        losses=tuple(facts.losses),
        agreed_losses=tuple(facts.agreed_losses.values()),
        problems=tuple(facts.problems),
        refusal=refusal,
    )


def _without_buffer(checkpoint: Checkpoint, move: Move) -> Move:
    handle = checkpoint.tensors[move.sources[0]] if move.sources else None
    reason = None if handle is None else _computed(handle)
    return move if handle is None or reason is None else drop(handle, reason)


def _computed(handle: TensorHandle) -> str | None:
    """The facts that a tensor is computed from, where it is not a weight; None where it is one."""
    if ROPE_BUFFER.fullmatch(handle.name):
        return "a buffer: computed from the rope parameters of the config"
    if MASK_BUFFER.fullmatch(handle.name) and len(handle.shape) in MASK_DIMENSIONS:
        return "a buffer: the causal mask"
    return None


def rename(
    checkpoint: Checkpoint, renames: Mapping[str, str] | None = None, dropped: Mapping[str, str] | None = None
) -> list[Move]:
    """A move for every tensor: the first of `renames` (prefix → new prefix) that fits; `dropped`: name → reason."""
    moves = []
    for name, handle in checkpoint.tensors.items():
        if dropped and name in dropped:
            moves.append(drop(handle, dropped[name]))
        else:
            moves.append(copy(handle, renamed(name, renames or {})))
    return moves


def renamed(name: str, renames: Mapping[str, str]) -> str:
    """A tensor name with the first prefix that fits replaced."""
    for old, new in renames.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def common_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the weights: that of most bytes among the floating-point tensors."""
    sizes: dict[str, int] = {}
    for handle in checkpoint.tensors.values():
        if handle.dtype in FLOATS and _computed(handle) is None:
            sizes[handle.dtype] = sizes.get(handle.dtype, 0) + handle.nbytes
    if not sizes:
        raise FormatError("no floating-point tensor among the weights", where=checkpoint.source.path)
    return max(sizes, key=lambda dtype: sizes[dtype])
