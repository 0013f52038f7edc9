"""`--to vllm`: the unified layout of a draft that vLLM loads, made so where it can be done without loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

from draftkit.convert.export import Outgoing
from draftkit.convert.operations import Move, carry_out
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import LayoutError
from draftkit.layout.architecture import Architecture
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts


@dataclass(frozen=True)
class Remedy:
    """How a draft that vLLM would run wrongly becomes one that it runs rightly, without loss.

    `what`: in words, after "convert --to vllm". `architecture`: the facts afterwards, of which `changed` are other than
    before. `moves`: the tensors, from those of the draft and of the target.
    """

    what: str
    architecture: Architecture
    changed: tuple[FactOrigin, ...]
    moves: Callable[[Outgoing], list[Move]]


def for_vllm(draft: Draft, target: TargetFacts | None) -> Draft:
    """The draft as vLLM 0.32 runs it. Raises `LayoutError` when there is no such draft."""
    reason = refusal_by_vllm(draft.spec)
    if reason is None:
        return draft
    remedy = _remedy(draft.spec)
    if remedy is not None:
        reason = refusal_by_vllm(_mended(draft.spec, remedy))
    if remedy is None or reason is not None:
        raise LayoutError(f"vLLM 0.32 cannot run this draft: {reason}", where=draft.path, hint="use --to unified")
    outgoing = Outgoing(draft, target, "vllm")
    moves = remedy.moves(outgoing)
    sources = {name: outgoing.tensor(name) for move in moves for name in move.sources}
    changed = {fact.name for fact in remedy.changed}
    others = (fact for fact in draft.provenance.facts if fact.name not in changed)
    return replace(
        draft,
        spec=_mended(draft.spec, remedy),
        provenance=replace(draft.provenance, facts=(*others, *remedy.changed)),
        tensors=carry_out(moves, sources),
    )


def remedy_for_vllm(spec: DraftSpec) -> str | None:
    """What `--to vllm` does so that vLLM runs a draft which it must not load as it is; None where it cannot."""
    remedy = None if refusal_by_vllm(spec) is None else _remedy(spec)
    if remedy is None or refusal_by_vllm(_mended(spec, remedy)) is not None:
        return None
    return f"draftkit convert --to vllm {remedy.what}"


def _remedy(spec: DraftSpec) -> Remedy | None:
    """That of the draft's family: `remedy_for_vllm` in `formats/FAMILY.py`, where it has one."""
    family = f"draftkit.convert.formats.{spec.architecture.family}"
    if find_spec(family) is None:
        return None
    find: Callable[[Architecture], Remedy | None] | None
    find = getattr(importlib.import_module(family), "remedy_for_vllm", None)
    return None if find is None else find(spec.architecture)


def _mended(spec: DraftSpec, remedy: Remedy) -> DraftSpec:
    return replace(spec, architecture=remedy.architecture)
