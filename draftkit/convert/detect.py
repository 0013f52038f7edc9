"""Finding the format of a checkpoint: every module of `draftkit.convert.formats` is asked."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

from draftkit.convert import formats
from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.convert.quantization import refuse_unread_weights
from draftkit.convert.unsupported import refuse_by_name
from draftkit.errors import FormatError
from draftkit.io.records import did_you_mean
from draftkit.layout.target import TargetFacts


class Format(Protocol):
    """What a module in `draftkit/convert/formats/` provides.

    One of weights that are kept as they lie, however they are quantized, has `VERBATIM = True` too.
    """

    NAME: str
    TITLE: str

    def recognize(self, checkpoint: Checkpoint) -> int:
        """How specific a match the checkpoint is, from its tensor names first: 0 is none.

        1 goes to a layout that others build on; a trainer's own marks make it 2 or more. The highest wins.
        """

    def plan(self, checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
        """The conversion into the unified layout. Raises `DraftkitError` for what cannot be converted."""


def all_formats() -> list[Format]:
    """The known formats in alphabetical order."""
    names = (module.name for module in pkgutil.iter_modules(formats.__path__))
    modules: list[Format] = [importlib.import_module(f"{formats.__name__}.{name}") for name in names]
    return sorted(modules, key=lambda module: module.NAME)


def format_named(name: str) -> Format:
    """The format that the user names. Raises `FormatError` for an unknown name."""
    known = {format.NAME: format for format in all_formats()}
    if name not in known:
        raise FormatError(
            f"there is no format {name}{did_you_mean(name, known)}",
            expected="one of " + ", ".join(known),
            hint="draftkit formats",
        )
    return known[name]


def detect(checkpoint: Checkpoint) -> Format:
    """The format that recognizes the checkpoint best. Raises `FormatError` when none or several do."""
    refuse_by_name(checkpoint)
    known = all_formats()
    scores = {format.NAME: format.recognize(checkpoint) for format in known}
    matches = [format for format in known if scores[format.NAME] == max(scores.values()) > 0]
    if len(matches) == 1:
        return matches[0]
    refuse_unread_weights(checkpoint)  # whose names may be those of no format
    if matches:
        names = ", ".join(format.NAME for format in matches)
        raise FormatError(
            f"the checkpoint could be any of: {names}", where=checkpoint.source.path, hint="say which with --from"
        )
    sample = [*list(checkpoint.tensors)[:6], *(["…"] if len(checkpoint.tensors) > 6 else [])]
    called = ", ".join(checkpoint.kind_names)
    raise FormatError(
        (f"config.json calls this {called}, and " if called else "")
        + f"no known draft format has these {len(checkpoint.tensors)} tensors: {', '.join(sample)}",
        where=checkpoint.source.path,
        hint="draftkit formats lists what can be read",
    )
