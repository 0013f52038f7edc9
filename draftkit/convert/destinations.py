"""Where a draft can go: the unified layout, vLLM, and the layouts that a format module knows to write."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeGuard

from draftkit.convert.detect import Format, all_formats
from draftkit.convert.export import Export, Outgoing
from draftkit.convert.facts import with_values
from draftkit.convert.target_tensors import PREFIX
from draftkit.errors import DraftkitError, LayoutError
from draftkit.io.handles import TensorHandle
from draftkit.io.records import did_you_mean
from draftkit.layout.folder import Draft
from draftkit.layout.target import TargetFacts

UNIFIED, VLLM, GGUF = "unified", "vllm", "gguf"  # the last is one file, and the others folders


class Exporter(Format, Protocol):
    """A format module that can also write its layout.

    `DESTINATION`: the name that `--to` takes; several modules may share one. `METHODS`: the drafts it writes.
    """

    DESTINATION: str
    METHODS: tuple[str, ...]

    def export(self, outgoing: Outgoing) -> Export:
        """Plan the way out. Raises `LayoutError` for what cannot be written even with losses."""


def destinations() -> list[str]:
    """Every name that `--to` takes."""
    return [UNIFIED, VLLM, *sorted({exporter.DESTINATION for exporter in _exporters()})]


def export_to(destination: str, draft: Draft, target: TargetFacts | None) -> Export:
    """The export of a draft. Raises `LayoutError` when the destination has no layout for this method.

    Written back in the format it came from, a draft gets the config keys again that the layout has no place for.
    """
    method = draft.spec.method
    for exporter in _exporters():
        if destination == exporter.DESTINATION and method in exporter.METHODS:
            export = exporter.export(Outgoing(draft, target, destination))
            if draft.provenance.format == exporter.NAME:
                export = replace(export, config=with_values(export.config, draft.provenance.dropped_config))
            return export
    others = [UNIFIED, *sorted({e.DESTINATION for e in _exporters() if method in e.METHODS})]
    known = destination in destinations()
    raise LayoutError(
        f"there is no {method} in the layout of {destination}"
        if known
        else f"there is no destination {destination}{did_you_mean(destination, destinations())}",
        where=draft.path,
        hint="use " + " or ".join(f"--to {name}" for name in (others if known else destinations())),
    )


def alternatives(draft: Draft, target: TargetFacts | None, destination: str) -> list[str]:
    """Other destinations that take this draft without a loss."""
    return [
        UNIFIED,
        *(e.DESTINATION for e in _exporters() if destination != e.DESTINATION and _exact(e, draft, target)),
    ]


class _Considered(Outgoing):
    """An export that is only looked at: the target's tensors, whose files may have to be fetched, stay closed."""

    def tensor(self, name: str) -> TensorHandle:
        if not name.startswith(PREFIX):
            return super().tensor(name)
        target = self.need_target(f"a copy of its {name.removeprefix(PREFIX)}")
        shape = (target.vocab_size, target.hidden_size)
        return TensorHandle(name, self.draft.spec.dtype, shape, self.draft.path, lambda _: iter(()))


def _exact(exporter: Exporter, draft: Draft, target: TargetFacts | None) -> bool:
    if draft.spec.method not in exporter.METHODS:
        return False
    try:
        return not exporter.export(_Considered(draft, target, exporter.DESTINATION)).losses
    except DraftkitError:
        return False


def _exporters() -> list[Exporter]:
    return [module for module in all_formats() if _is_exporter(module)]


def _is_exporter(module: Format) -> TypeGuard[Exporter]:
    return hasattr(module, "DESTINATION")


def destination_of(module: Format) -> str | None:
    """The name of the destination that a format module writes, if it writes one."""
    return module.DESTINATION if _is_exporter(module) else None
