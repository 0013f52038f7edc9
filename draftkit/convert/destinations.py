"""Where a draft can go: the unified layout, vLLM, and the layouts that a format module knows to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeGuard

from draftkit.convert.detect import Format, all_formats
from draftkit.convert.export import PREFIX, Export, Outgoing, results, write_export
from draftkit.convert.facts import with_values
from draftkit.convert.formats.gguf.writing import file_tensors, write_file
from draftkit.convert.operations import Move, carry_out
from draftkit.convert.unified import OnBytes, write_draft
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, LayoutError
from draftkit.io.handles import TensorHandle
from draftkit.io.records import did_you_mean
from draftkit.layout.architecture import Architecture
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

UNIFIED, VLLM, GGUF = "unified", "vllm", "gguf"


class Exporter(Format, Protocol):
    """A format module that can also write its layout.

    `DESTINATION`: the name that `--to` takes; several modules may share one. `METHODS`: the drafts it writes.
    """

    DESTINATION: str
    METHODS: tuple[str, ...]

    def export(self, outgoing: Outgoing) -> Export:
        """Plan the way out. Raises `LayoutError` for what cannot be written even with losses."""


class Destination:
    """Where a draft can go. This one is the unified layout, in a folder."""

    def __init__(self, name: str = UNIFIED) -> None:
        self.name = name

    def plan(self, draft: Draft, target: TargetFacts | None) -> tuple[Draft, Export | None]:
        """The draft that goes there, and how its layout becomes the other one; None where it is not another.

        Raises `LayoutError` for a draft that cannot go there.
        """
        return draft, None

    def without_loss(self, draft: Draft, target: TargetFacts | None) -> list[str]:
        """Other destinations that lose nothing of this draft, where this one may lose something."""
        return []

    def nbytes(self, outgoing: Outgoing, export: Export | None) -> int:
        """Size of all tensors that will be written."""
        return sum(tensor.nbytes for tensor in outgoing.draft.tensors.values())

    def write(
        self, out: Path, outgoing: Outgoing, export: Export | None, *, force: bool, on_bytes: OnBytes | None
    ) -> None:
        """Write what `plan` has planned. Raises `DraftkitError`; then `out` is as it was."""
        write_draft(out, outgoing.draft, force=force, on_bytes=on_bytes)

    def default_name(self, source: str, method: str) -> str:
        """The name of the output, after that of the source.

        Any path with `eagle-` makes vLLM choose method `eagle`, so only EAGLE-1 drafts keep that substring.
        """
        name = f"{source}-{'draftkit' if self.name == UNIFIED else self.name}"
        return name if method == "eagle" else re.sub("(?i)(eagle)-", r"\1_", name)


class ForVllm(Destination):
    """The unified layout of a draft that vLLM loads, made so where it can be done without loss."""

    def plan(self, draft: Draft, target: TargetFacts | None) -> tuple[Draft, Export | None]:
        return for_vllm(draft, target), None


class Layout(Destination):
    """The layout of a folder that format modules know to write."""

    def plan(self, draft: Draft, target: TargetFacts | None) -> tuple[Draft, Export | None]:
        return draft, self.export(draft, target)

    def export(self, draft: Draft, target: TargetFacts | None) -> Export:
        """The export of a draft. Raises `LayoutError` when the destination has no layout for this method.

        Written back in the format it came from, a draft gets the config keys again that the layout has no place for.
        """
        method = draft.spec.method
        for exporter in _exporters():
            if self.name == exporter.DESTINATION and method in exporter.METHODS:
                export = _exported(exporter, Outgoing(draft, target, self.name))
                if draft.provenance.format == exporter.NAME:
                    export = replace(export, config=with_values(export.config, draft.provenance.dropped_config))
                return export
        others = [UNIFIED, *sorted({e.DESTINATION for e in _exporters() if method in e.METHODS})]
        raise LayoutError(f"there is no {method} in the layout of {self.name}", where=draft.path, hint=_any_of(others))

    def without_loss(self, draft: Draft, target: TargetFacts | None) -> list[str]:
        others = (e for e in _exporters() if self.name != e.DESTINATION and _exact(e, draft, target))
        return [UNIFIED, *(exporter.DESTINATION for exporter in others)]

    def nbytes(self, outgoing: Outgoing, export: Export | None) -> int:
        assert export is not None
        return sum(tensor.nbytes for tensor in results(outgoing, export).values())

    def write(
        self, out: Path, outgoing: Outgoing, export: Export | None, *, force: bool, on_bytes: OnBytes | None
    ) -> None:
        assert export is not None
        write_export(out, outgoing, export, force=force, on_bytes=on_bytes)


class GgufLayout(Layout):
    """One GGUF file. `stored`: the type of its matrices, as `q8_0`; None for the draft's own."""

    def __init__(self, stored: str | None = None) -> None:
        super().__init__(GGUF)
        self.stored = stored

    def nbytes(self, outgoing: Outgoing, export: Export | None) -> int:
        assert export is not None
        return sum(tensor.nbytes for tensor in file_tensors(outgoing, export, self.stored))

    def write(
        self, out: Path, outgoing: Outgoing, export: Export | None, *, force: bool, on_bytes: OnBytes | None
    ) -> None:
        assert export is not None
        write_file(out, outgoing, export, self.stored, force=force, on_bytes=on_bytes)

    def default_name(self, source: str, method: str) -> str:
        return f"{source}.gguf"


def destinations() -> list[str]:
    """Every name that `--to` takes."""
    return [UNIFIED, VLLM, *sorted({exporter.DESTINATION for exporter in _exporters()})]


def destination_named(name: str, stored: str | None = None) -> Destination:
    """The destination that the user names. Raises `DraftkitError` for an unknown name, and for `stored` elsewhere."""
    if name == GGUF:
        return GgufLayout(stored)
    if stored is not None:
        raise DraftkitError(f"--type {stored} is for GGUF files", expected=f"--to {GGUF}")
    known = destinations()
    if name not in known:
        raise LayoutError(f"there is no destination {name}{did_you_mean(name, known)}", hint=_any_of(known))
    return {UNIFIED: Destination, VLLM: ForVllm}.get(name, Layout)(name)


def _any_of(names: Iterable[str]) -> str:
    return "use " + " or ".join(f"--to {name}" for name in names)


class _Considered(Outgoing):
    """An export that is only looked at: the target's tensors, whose files may have to be fetched, stay closed."""

    def tensor(self, name: str) -> TensorHandle:
        if not name.startswith(PREFIX):
            return super().tensor(name)
        target = self.need_target(f"a copy of its {name.removeprefix(PREFIX)}")
        shape = (target.vocab_size, target.hidden_size)
        return TensorHandle(name, self.draft.spec.dtype, shape, self.draft.path, lambda _: iter(()))


def _exported(exporter: Exporter, outgoing: Outgoing) -> Export:
    """The export of a draft. No layout but the unified one says which tokens layers see besides a window."""
    draft = outgoing.draft
    if not draft.spec.architecture.sink_tokens:
        return exporter.export(outgoing)
    spec = replace(draft.spec, architecture=with_facts(draft.spec.architecture, sink_tokens=0))
    export = exporter.export(replace(outgoing, draft=replace(draft, spec=spec)))
    lost = f"sink_tokens is {draft.spec.architecture.sink_tokens}, and its layers see none besides their window"
    return replace(export, losses=(*export.losses, lost))


def _exact(exporter: Exporter, draft: Draft, target: TargetFacts | None) -> bool:
    if draft.spec.method not in exporter.METHODS:
        return False
    try:
        return not _exported(exporter, _Considered(draft, target, exporter.DESTINATION)).losses
    except DraftkitError:
        return False


def _exporters() -> list[Exporter]:
    return [module for module in all_formats() if _is_exporter(module)]


def _is_exporter(module: Format) -> TypeGuard[Exporter]:
    return hasattr(module, "DESTINATION")


def destination_of(module: Format) -> str | None:
    """The name of the destination that a format module writes, if it writes one."""
    return module.DESTINATION if _is_exporter(module) else None


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
    """The draft as vLLM runs it. Raises `LayoutError` when there is no such draft."""
    reason = refusal_by_vllm(draft.spec)
    if reason is None:
        return draft
    remedy = _remedy(draft.spec)
    if remedy is not None:
        reason = refusal_by_vllm(_mended(draft.spec, remedy))
    if remedy is None or reason is not None:
        raise LayoutError(f"vLLM cannot run this draft: {reason}", where=draft.path, hint="use --to unified")
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
    """The remedy that the format with the name of the draft's family has (`remedy_for_vllm`), if any."""
    named = (format for format in all_formats() if format.__name__.endswith(f".{spec.architecture.family}"))
    find: Callable[[Architecture], Remedy | None] | None
    find = getattr(next(named, None), "remedy_for_vllm", None)
    return None if find is None else find(spec.architecture)


def _mended(spec: DraftSpec, remedy: Remedy) -> DraftSpec:
    return replace(spec, architecture=remedy.architecture)
