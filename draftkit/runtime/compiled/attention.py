"""Attention of traced rows: a kernel in C++, which reads of each sequence the entries that its rows see, and no others.

S slots, B sequences, N query heads, G key/value heads, T rows, L entries, D and E widths of keys and values.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from draftkit.runtime.compiled.store import keep, place
from draftkit.runtime.ops.slot_attention import Scoring
from draftkit.runtime.slot_rows import Branches

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16)
NAME = "draftkit::attend_ranges"

torch.library.define(
    NAME,
    "(Tensor query, Tensor keys, Tensor values, Tensor slots, Tensor begin, Tensor end, Tensor? first, "
    "Tensor? visible, Tensor? sinks, float scaling, float softcap, int sink_tokens) -> Tensor",
)


def can_attend(scoring: Scoring) -> bool:
    """Whether a range of entries, and the sequence's first ones, are all that a row sees besides branches."""
    return scoring.chosen is None and scoring.seen is None and not (scoring.chunk and scoring.sink_tokens)


def attend_ranges(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, begin: Tensor, end: Tensor, scoring: Scoring,
    branches: Branches | None = None,
) -> Tensor:  # fmt: skip
    """Attention of `query` [B, N, T, D] over the `slots` int64 [B] of `keys` [S, G, L, D] and `values` [S, G, L, E], of
    one dtype of `DTYPES`: [B, N, T, E]. A row sees the entries from `begin` on, before `end`, both int64 [B, T], and
    before `end` the first `sink_tokens`; of `branches`, those that it sees. One that sees none gives zeros, as does a
    slot of −1. Of `scoring`, scaling, softcap, sinks and sink tokens are used. Scores and sums are float32.

    `load_kernel` comes first.
    """
    first = None if branches is None else branches.first
    visible = None if branches is None else branches.seen(*scoring.bounds).contiguous()
    sinks = None if scoring.sinks is None else scoring.sinks.float()
    out: Tensor = torch.ops.draftkit.attend_ranges(
        query, keys, values, slots, begin, end, first, visible, sinks, scoring.scaling, scoring.softcap or 0.0,
        scoring.sink_tokens,
    )  # fmt: skip
    return out


@cache
def load_kernel() -> None:
    """Give torch the kernel: one that is kept, else a new one. Raises `RuntimeError` where it cannot be compiled."""
    file = place(SOURCE.read_text(encoding="utf-8"), ".so")
    if not _loaded(file):
        with TemporaryDirectory() as folder:
            torch.ops.load_library(keep(_compiled(folder), file))


def _loaded(file: Path) -> bool:
    """Whether there is a kernel that is kept, and undamaged."""
    with suppress(OSError):
        torch.ops.load_library(file)
        return True
    return False


def _compiled(folder: str) -> Path:
    """The kernel, compiled for this machine."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions  # imports much
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchOptions(vec_isa=pick_vec_isa(), include_pytorch=True, warning_all=False)
    builder = CppBuilder("attention", str(SOURCE), options, folder)
    builder.build()
    return Path(builder.get_target_file_path())


@torch.library.register_fake(NAME)
def _shaped(query: Tensor, keys: Tensor, values: Tensor, *rest: object) -> Tensor:
    sequences, heads, rows, _ = query.shape
    return query.new_empty(sequences, rows, heads, values.shape[3]).transpose(1, 2)
