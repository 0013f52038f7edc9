"""`d2t` in GGUF, which holds the target's ids themselves: read, and seen through where it holds offsets."""

from __future__ import annotations

from collections.abc import Sequence

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, integers
from draftkit.convert.vocabulary_map import mapped_tokens, problem_of_map
from draftkit.finding import Finding

OFFSETS = "offsets"


def read_ids(checkpoint: Checkpoint, facts: Facts, moves: Sequence[Move], vocab_size: int) -> list[Move]:
    """The moves with that of `d2t` as the user says it is stored (`--set d2t=offsets`); notes a map that is none."""
    handle = checkpoint.tensors.get("d2t")
    if handle is None:
        return list(moves)
    if facts.choice("d2t", (OFFSETS,)):
        return [copy(handle) if move.destination == "d2t" else move for move in moves]
    if problem := problem_of_map(integers(handle), vocab_size):
        as_offsets = problem_of_map(mapped_tokens(handle), vocab_size) is None
        name = "gguf-d2t-offsets" if as_offsets else "d2t"
        message = "d2t holds offsets, where llama.cpp reads the target's ids" if as_offsets else problem
        facts.problems.append(
            Finding(
                name,
                "error",
                message,
                where="tensor d2t",
                cost="proposals are other tokens than the draft means: nothing is accepted, and nothing is logged",
                fix="--set d2t=offsets reads it, and convert --to gguf writes ids" if as_offsets else "convert again",
                source="llama.cpp `src/models/eagle3.cpp`",
            )
        )
    return list(moves)
