"""The map from draft vocabulary to target vocabulary: one checked representation, `d2t`.

`d2t` int64 [Vd] holds offsets, target id = i + d2t[i]; `t2d` bool [V] marks the target ids that the draft keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, carry_out, copy, drop, integers, marked
from draftkit.errors import FormatError
from draftkit.finding import Finding
from draftkit.io.handles import TensorHandle

INCONSISTENT = "the draft vocabulary is inconsistent"
AGAIN = "fetch the checkpoint again, or ask its author for the vocabulary map it was trained with"
FROM_MASK = "from_t2d"
MEND = f"--set d2t={FROM_MASK} takes the tokens that t2d marks, in ascending order as trainers number them"


def read_vocabulary_map(checkpoint: Checkpoint, facts: Facts, vocab_size: int, draft_vocab_size: int) -> Move | None:
    """How `d2t` comes about: as it is, widened from int32, or from `t2d` where the user says so. None without one.

    It must land inside the target vocabulary, without repeats, and agree with `t2d` where both exist; else the first
    offending entry is the problem `d2t`. Raises `FormatError` for a draft vocabulary larger than the target's.
    """
    if draft_vocab_size > vocab_size:
        raise FormatError(
            f"{INCONSISTENT}: draft_vocab_size {draft_vocab_size} exceeds vocab_size {vocab_size}",
            where=checkpoint.source.path,
            hint=AGAIN,
        )
    move = _move(checkpoint, facts, draft_vocab_size)
    moves = [] if move is None else [move]
    handles = {handle.name: handle for handle in checkpoint.tensors.values()}
    mapped = replace(checkpoint, tensors=checkpoint.tensors | carry_out(moves, handles))
    mask_problem = _mask_problem(checkpoint, vocab_size)
    map_problem = _map_problem(mapped, vocab_size, draft_vocab_size)
    if mask_problem is None and "t2d" in checkpoint.tensors:
        kept = marked(checkpoint.tensors["t2d"])
        if map_problem is None:
            map_problem, mask_problem = _disagreement(mapped, vocab_size, kept)
        mends = map_problem is not None and len(kept) == draft_vocab_size
    else:
        mends = False
    if problem := map_problem or mask_problem:
        message, fix = f"{INCONSISTENT}: {problem}", MEND if mends else AGAIN
        facts.problems.append(Finding("d2t", "error", message, fix=fix, source="the checkpoint itself"))
    return move


def mapped_tokens(d2t: TensorHandle) -> list[int]:
    """The target's id of each draft token."""
    return [i + offset for i, offset in enumerate(integers(d2t))]


def problem_of_map(ids: Sequence[int], vocab_size: int) -> str | None:
    """Why these target ids of the draft's tokens are no map into a vocabulary of this size, None where they are one."""
    outside = next((i for i, token in enumerate(ids) if not 0 <= token < vocab_size), None)
    if outside is not None:
        return f"d2t[{outside}] maps to token {ids[outside]}, outside 0…{vocab_size - 1}"
    if len(set(ids)) < len(ids):
        return f"d2t maps {len(ids) - len(set(ids))} draft tokens to a target token that another has"
    return None


def with_map(moves: Sequence[Move], checkpoint: Checkpoint, vocabulary_map: Move | None) -> list[Move]:
    """The moves with this one for `d2t`, unless they drop it; a `d2t` that it does not read is dropped."""
    if vocabulary_map is None:
        return list(moves)
    handle = checkpoint.tensors.get("d2t")
    if vocabulary_map.operation == "mask_to_offset":
        others = [move for move in moves if handle is None or move.sources != (handle.name,)]
        unread = [] if handle is None else [drop(handle, "made from t2d instead")]
        return [*others, *unread, vocabulary_map]
    return [vocabulary_map if move.destination == "d2t" else move for move in moves]


def _move(checkpoint: Checkpoint, facts: Facts, draft_vocab_size: int) -> Move | None:
    if facts.choice("d2t", (FROM_MASK,)):
        if "t2d" not in checkpoint.tensors:
            raise FormatError(f"d2t is to be made {FROM_MASK}, and there is no t2d", where=checkpoint.source.path)
        return Move("mask_to_offset", (checkpoint.tensors["t2d"].name,), "d2t", "I64", (draft_vocab_size,))
    handle = checkpoint.tensors.get("d2t")
    if handle is None:
        return None
    return Move("widen", (handle.name,), "d2t", "I64", handle.shape) if handle.dtype == "I32" else copy(handle, "d2t")


def _map_problem(checkpoint: Checkpoint, vocab_size: int, draft_vocab_size: int) -> str | None:
    """What of `d2t` is wrong by itself."""
    handle = checkpoint.tensors.get("d2t")
    if handle is None:
        missing = f"d2t is missing, but the draft has {draft_vocab_size} of {vocab_size} tokens"
        return missing if draft_vocab_size < vocab_size else None
    if (handle.dtype, handle.shape) != ("I64", (draft_vocab_size,)):
        return f"d2t is {handle.dtype} {list(handle.shape)}, not I64 [{draft_vocab_size}]"
    ids = mapped_tokens(handle)
    if len(ids) != draft_vocab_size:
        return f"t2d marks {len(ids)} tokens, the draft has {draft_vocab_size}"
    if problem := problem_of_map(ids, vocab_size):
        return problem
    if draft_vocab_size == vocab_size and ids != list(range(vocab_size)):
        return "d2t permutes a full vocabulary, which no engine applies"
    return None


def _mask_problem(checkpoint: Checkpoint, vocab_size: int) -> str | None:
    """What of `t2d` is wrong by itself."""
    mask = checkpoint.tensors.get("t2d")
    if mask is None or (mask.dtype, mask.shape) == ("BOOL", (vocab_size,)):
        return None
    return f"t2d is {mask.dtype} {list(mask.shape)}, not BOOL [{vocab_size}]"


def _disagreement(checkpoint: Checkpoint, vocab_size: int, kept: list[int]) -> tuple[str | None, str | None]:
    """Where `d2t` has other tokens than `t2d` marks (`kept`): what is wrong with the map, or with either."""
    handle = checkpoint.tensors.get("d2t")
    offsets = [0] * vocab_size if handle is None else list(integers(handle))
    if {i + offset for i, offset in enumerate(offsets)} == set(kept):
        return None, None
    if handle is not None and len(offsets) < vocab_size and not any(offsets):
        return f"d2t is all zero, as if it was never set, and t2d marks {len(kept)} other tokens", None
    return None, f"t2d marks {len(kept)} tokens, the draft has {len(offsets)}, and they differ"
