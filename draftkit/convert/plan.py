"""A conversion as data: the spec it arrives at, and one move for every source tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.errors import FormatError, LayoutError
from draftkit.layout.dtypes import FLOATS
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.schema import check_tensors
from draftkit.layout.spec import DraftSpec

Operation = Literal["copy", "drop"]


@dataclass(frozen=True)
class Move:
    """What happens to one source tensor: `copy` streams its bytes to `destination`; `drop` states the `reason`."""

    operation: Operation
    source: str
    destination: str | None
    dtype: str
    shape: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything a conversion will do, before it does any of it.

    `spec` is None while facts are missing (`missing`: fact and what to pass). `dropped_keys`: config key → reason.
    """

    format: str
    spec: DraftSpec | None
    moves: tuple[Move, ...]
    facts: tuple[FactOrigin, ...]
    missing: tuple[tuple[str, str], ...]
    dropped_keys: dict[str, str]
    copied_files: tuple[Path, ...] = ()

    def require_spec(self, where: object) -> DraftSpec:
        """The spec. Raises `LayoutError` that lists the missing facts and how to give them."""
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
    """Assemble a plan and check it: every tensor has one move, every config key is accounted for, the result fits.

    Raises `FormatError`/`LayoutError` with everything that does not.
    """
    facts.check_all_used()
    moved = [move.source for move in moves]
    if sorted(moved) != sorted(checkpoint.tensors):
        raise AssertionError(f"{format_name} must plan each tensor once: {sorted(moved)}")
    if spec is not None:
        results = {m.destination: (m.dtype, m.shape) for m in moves if m.destination is not None}
        check_tensors(
            spec,
            results,
            checkpoint.source.path,
            hint="config.json and the weights disagree, or the file is incomplete: fetch the checkpoint again",
        )
    return Plan(
        format=format_name,
        spec=spec,
        moves=tuple(moves),
        facts=tuple(facts.found),
        missing=tuple(facts.missing),
        dropped_keys=facts.dropped,
        copied_files=tuple(copied_files),
    )


def rename(checkpoint: Checkpoint, old: str = "", new: str = "", dropped: dict[str, str] | None = None) -> list[Move]:
    """Moves for every tensor: names that begin with `old` begin with `new`, those in `dropped` go for that reason."""
    moves = []
    for name, handle in checkpoint.tensors.items():
        if dropped and name in dropped:
            moves.append(Move("drop", name, None, handle.dtype, handle.shape, dropped[name]))
        else:
            destination = new + name.removeprefix(old) if name.startswith(old) else name
            moves.append(Move("copy", name, destination, handle.dtype, handle.shape))
    return moves


def common_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of the weights: that of most bytes among the floating-point tensors."""
    sizes: dict[str, int] = {}
    for handle in checkpoint.tensors.values():
        if handle.dtype in FLOATS:
            sizes[handle.dtype] = sizes.get(handle.dtype, 0) + handle.nbytes
    if not sizes:
        raise FormatError("no floating-point tensor among the weights", where=checkpoint.source.path)
    return max(sizes, key=lambda dtype: sizes[dtype])
