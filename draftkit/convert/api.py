"""The two verbs of conversion, as the command line and other code call them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftkit.convert.checkpoint import Checkpoint, open_source
from draftkit.convert.detect import detect
from draftkit.convert.execute import execute
from draftkit.convert.plan import Plan
from draftkit.errors import LayoutError
from draftkit.hub import Located, locate
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.layout.target import TargetFacts, read_target_facts


@dataclass(frozen=True)
class Conversion:
    """A source and the plan to convert it; nothing has been written."""

    checkpoint: Checkpoint
    target: TargetFacts | None
    plan: Plan

    def write(self, out: Path, *, force: bool = False, on_bytes: Callable[[int], None] | None = None) -> Draft:
        """Carry the plan out and read the result back. Raises `DraftkitError`; then `out` is as it was."""
        execute(self.plan, self.checkpoint, self.target, out, force=force, on_bytes=on_bytes)
        return read_draft(out)

    @property
    def output_bytes(self) -> int:
        """Size of all tensors that will be written."""
        return sum(self.checkpoint.tensors[m.source].nbytes for m in self.plan.moves if m.destination is not None)


def plan_conversion(source: str, *, target: str | None = None, revision: str | None = None) -> Conversion:
    """Find a checkpoint, recognise its format and plan its conversion into the unified layout.

    `source` and `target` are paths, Hub ids (`org/name[@revision]`) or `zoo:NAME`. Of the target only `config.json`
    is read. Raises `DraftkitError`.
    """
    located = locate(source, revision=revision)
    if is_unified(located.path):
        raise LayoutError(
            f"{located.name} is a unified draft already", where=located.path, hint=f"draftkit inspect {source}"
        )
    return plan_located(located, target)


def plan_located(located: Located, target: str | None) -> Conversion:
    """Plan the conversion of a foreign checkpoint that is on this machine."""
    checkpoint = open_source(located)
    facts = _target_facts(target or located.default_target)
    return Conversion(checkpoint, facts, detect(checkpoint).plan(checkpoint, facts))


def convert_checkpoint(
    source: str,
    out: Path | None = None,
    *,
    target: str | None = None,
    revision: str | None = None,
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Draft:
    """Convert a draft checkpoint of any known format into the unified layout under `out`.

    Without `out`, a folder named after the source is made in the current one. Raises `DraftkitError`.
    """
    conversion = plan_conversion(source, target=target, revision=revision)
    return conversion.write(out or default_output(conversion), force=force, on_bytes=on_bytes)


def default_output(conversion: Conversion) -> Path:
    """The folder name for a source: its own with `-draftkit`.

    Any path with `eagle-` makes vLLM choose method `eagle`, so only EAGLE-1 drafts keep that substring.
    """
    source = conversion.checkpoint.source
    name = (source.repo.split("/")[1] if source.repo else Path(os.path.abspath(source.path)).name) + "-draftkit"
    if conversion.plan.require_spec(source.path).method == "eagle":
        return Path(name)
    return Path(re.sub("(?i)(eagle)-", r"\1_", name))


def inspect_checkpoint(source: str, *, target: str | None = None, revision: str | None = None) -> Draft | Conversion:
    """What a folder or repository holds: a validated `Draft`, or the `Conversion` that would make it one.

    A foreign checkpoint that lacks facts is not an error here; its plan lists them. Raises `DraftkitError` for what
    cannot be read or recognised.
    """
    located = locate(source, revision=revision)
    return read_draft(located.path) if is_unified(located.path) else plan_located(located, target)


def _target_facts(target: str | None) -> TargetFacts | None:
    if target is None:
        return None
    located = locate(target, weights=False, tokenizer=False)
    return read_target_facts(located.path, located.name, located.revision)
