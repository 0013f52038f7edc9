"""The token that stands for what is not drafted yet: one of the vocabulary that no text contains."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftkit.errors import DraftkitError, TargetError
from draftkit.targets.chat import load_tokenizer

RESERVED = re.compile(r"reserved|unused|extra_id|placeholder|mask", re.IGNORECASE)
HINT = "set mask_token_id to an id of the vocabulary that no text contains"


def pick_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int, used: Collection[int] = ()) -> int:
    """The last unused id below `vocab_size`: one without a token, or a special token whose name says that it is spare.

    Where there is neither, the last special token without a role that the chat template does not write, as SmolLM2's
    `<empty_output>`, which is for notebooks. Never one of `used`, nor a token with a role, as the end token. Raises
    `DraftkitError` where there is none.
    """
    known = set(tokenizer.get_vocab().values())
    idle = _idle_tokens(tokenizer)
    spare = {token for token, text in idle.items() if RESERVED.search(text)}
    for unused in (set(range(vocab_size)) - known | spare, set(idle)):
        if free := [token for token in unused if token < vocab_size and token not in used]:
            return max(free)
    raise DraftkitError("the tokenizer has no unused token", where=tokenizer.name_or_path, hint=HINT)


def _idle_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens that have no role and that no chat template writes, by id."""
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    templates = str(tokenizer.chat_template)  # a text, or several by name
    return {
        token: added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special and token not in roles and added.content not in templates
    }


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
