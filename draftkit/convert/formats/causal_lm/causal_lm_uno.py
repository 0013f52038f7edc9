"""UNO: a LoRA adapter of the target that lets it draft for itself, several tokens in one pass over noise.

Its files are those of any adapter (`adapter_config.json`, `adapter_model.safetensors`), and nothing in them says what
they are for. Merged it is no draft: it is the target's, and what it computes has a meaning on rows of noise alone. So
it is called by its name, where its own or its card says UNO and where `--from uno` does, and not converted.
Source: SGLang `srt/speculative/uno_lora.py`, `uno_worker_v2.py`.
"""

from __future__ import annotations

import re

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan
from draftkit.engines.known import known
from draftkit.engines.sglang import ENGINE, serve_uno
from draftkit.errors import FormatError
from draftkit.layout.target import TargetFacts

NAME = "uno"
TITLE = "UNO: a LoRA adapter with which a target drafts for itself; named, not converted"

WIDTH = 8  # rows of a round to start from
IN_NAME = re.compile(r"(?i)(?<![a-z])uno(?![a-z])")
IN_CARD = re.compile(r"\bUNO\b")
CARD_BYTES = 1 << 16


def recognize(checkpoint: Checkpoint) -> int:
    """As specific as the name is; 1 for any adapter, which may be one."""
    return 0 if checkpoint.adapter is None else 10 if _says_so(checkpoint) else 1


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    """Raises `FormatError`, which names what serves it."""
    del facts
    source = checkpoint.source
    if checkpoint.adapter is None:
        raise FormatError("this is no adapter, and UNO is one", where=source.path, hint="leave out --from uno")
    base = checkpoint.adapter.base.name if target is None else target.name
    serving = [str(release) for release in known()[ENGINE] if "UNO" in release.methods]
    raise FormatError(
        f"this is a UNO adapter of {base}: the target drafts with it for itself, and merged it is no draft",
        where=source.path,
        expected=f"{', '.join(serving)}: {serve_uno(base, source.name, WIDTH)}",
        hint="--from lora merges it all the same, where it is another kind of adapter",
    )


def _says_so(checkpoint: Checkpoint) -> bool:
    """Whether the name of an adapter, or its card, calls it UNO."""
    source, card = checkpoint.source, checkpoint.source.path / "README.md"
    if IN_NAME.search((source.repo or source.path.name).rpartition("/")[2]):
        return True
    if not card.is_file():
        return False
    with card.open("rb") as file:
        return IN_CARD.search(file.read(CARD_BYTES).decode("utf-8", "replace")) is not None
