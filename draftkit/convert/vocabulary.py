"""The map from draft vocabulary to target vocabulary: one checked representation, `d2t`.

`d2t` int64 [Vd] holds offsets, target id = i + d2t[i]; `t2d` bool [V] marks the target ids that the draft keeps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.operations import integers
from draftkit.errors import FormatError


def check_vocabulary_map(checkpoint: Checkpoint, vocab_size: int, draft_vocab_size: int) -> None:
    """Check that `d2t` lands inside the target vocabulary, without repeats, and agrees with `t2d` where both exist.

    Raises `FormatError` naming the first offending entry.
    """
    if draft_vocab_size > vocab_size:
        raise _error(checkpoint, f"draft_vocab_size {draft_vocab_size} exceeds vocab_size {vocab_size}")
    if "d2t" not in checkpoint.tensors:
        if draft_vocab_size < vocab_size:
            raise _error(checkpoint, f"d2t is missing, but the draft has {draft_vocab_size} of {vocab_size} tokens")
        _check_mask(checkpoint, vocab_size, range(vocab_size))
        return
    ids = [i + offset for i, offset in enumerate(_offsets(checkpoint, draft_vocab_size))]
    outside = [i for i, token in enumerate(ids) if not 0 <= token < vocab_size]
    if outside:
        raise _error(checkpoint, f"d2t[{outside[0]}] maps to token {ids[outside[0]]}, outside 0…{vocab_size - 1}")
    if len(set(ids)) < len(ids):
        raise _error(checkpoint, f"d2t maps {len(ids) - len(set(ids))} draft tokens to a target token that another has")
    if draft_vocab_size == vocab_size and ids != list(range(vocab_size)):
        raise _error(checkpoint, "d2t permutes a full vocabulary, which no engine applies")
    _check_mask(checkpoint, vocab_size, ids)


def _check_mask(checkpoint: Checkpoint, vocab_size: int, ids: Sequence[int]) -> None:
    """Check that `t2d`, where there is one, marks the target ids that the draft has."""
    if "t2d" not in checkpoint.tensors:
        return
    mask = checkpoint.tensors["t2d"]
    if (mask.dtype, mask.shape) != ("BOOL", (vocab_size,)):
        raise _error(checkpoint, f"t2d is {mask.dtype} {list(mask.shape)}, not BOOL [{vocab_size}]")
    flags = b"".join(bytes(chunk) for chunk in mask.chunks())
    marked = set(compress(range(vocab_size), flags))
    if marked != set(ids):
        raise _error(checkpoint, f"t2d marks {len(marked)} tokens, the draft has {len(ids)}, and they differ")


def _offsets(checkpoint: Checkpoint, draft_vocab_size: int) -> array[int]:
    handle = checkpoint.tensors["d2t"]
    if (handle.dtype, handle.shape) != ("I64", (draft_vocab_size,)):
        raise _error(checkpoint, f"d2t is {handle.dtype} {list(handle.shape)}, not I64 [{draft_vocab_size}]")
    return integers(handle)


def _error(checkpoint: Checkpoint, problem: str) -> FormatError:
    return FormatError(
        f"the draft vocabulary is inconsistent: {problem}",
        where=checkpoint.source.path,
        hint="fetch the checkpoint again, or ask its author for the vocabulary map it was trained with",
    )
