"""The token that stands for what is not drafted yet: one of the vocabulary that no text contains."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftkit.errors import DraftkitError, TargetError
from draftkit.models.chat import load_tokenizer

RESERVED = re.compile(r"reserved|unused|extra_id|placeholder|mask", re.IGNORECASE)
HINT = "set mask_token_id to an id of the vocabulary that no text contains"


def pick_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int, used: Collection[int] = ()) -> int:
    """The last unused id below `vocab_size`: one without a token, or a special token whose name says that it is spare.

    Never one of `used`, nor a token with a role, as the end token. Raises `DraftkitError` where there is none.
    """
    known = set(tokenizer.get_vocab().values())
    for token in reversed(range(vocab_size)):
        if token not in used and (token not in known or _spare(tokenizer, token)):
            return token
    raise DraftkitError("the tokenizer has no unused token", where=tokenizer.name_or_path, hint=HINT)


def _spare(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return added is not None and added.special and token not in roles and RESERVED.search(added.content) is not None


def default_mask_token(folder: str | Path, vocab_size: int) -> int:
    """`pick_mask_token` with the tokenizer in `folder`. Raises `DraftkitError`."""
    try:
        tokenizer = load_tokenizer(folder, "target")
    except TargetError as error:
        raise DraftkitError("no tokenizer to pick a mask token from", where=folder, hint=HINT) from error
    return pick_mask_token(tokenizer, vocab_size)


def check_mask_token(token: int, vocab_size: int) -> None:
    """Raise `DraftkitError` for a mask token outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise DraftkitError(f"mask_token_id {token}", expected=f"0 to {vocab_size - 1}")
