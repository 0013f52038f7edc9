"""The tokenizer's keys of a GGUF file: those of another file, or made from the `tokenizer.json` of a folder.

A draft's file needs all of them to load, and llama.cpp takes the size of its vocabulary from there; texts are split by
the target's file. Source: llama.cpp `conversion/base.py`, gguf-py `vocab.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from draftkit.errors import FormatError
from draftkit.hub.locate import locate
from draftkit.io.gguf_file import TOKENIZER, TOKENS, read_typed
from draftkit.io.jsonfile import read_object

# How a text is split is named in a list of llama.cpp's converter; only targets' files need it to be the right one.
UNNAMED_SPLITS = "default"
KINDS = {"normal": 1, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}  # `TokenType` of the package
MASK_KEY = "tokenizer.ggml.mask_token_id"


def tokenizer_of(source: str, revision: str | None, vocab_size: int) -> dict[str, object]:
    """The keys `tokenizer.*` that state the tokenizer of a source: a GGUF file, a folder or a Hub id.

    Raises `FormatError` for a tokenizer that cannot be told in GGUF.
    """
    located = locate(source, revision=revision, weights=False, as_file=True)
    if located.path.is_file():
        return dict(read_typed(located.path, TOKENIZER))
    return tokenizer_in(located.path, vocab_size)


def tokenizer_in(folder: Path, vocab_size: int) -> dict[str, object]:
    """The same of a folder with a `tokenizer.json`, filled up to the rows that the model's tables have."""
    described = read_object(folder / "tokenizer.json")
    model: Any = described.get("model") or {}
    if model.get("type") != "BPE":
        raise FormatError(
            f"the tokenizer is of type {model.get('type')}, which draftkit does not write to GGUF",
            where=folder / "tokenizer.json",
            expected="BPE",
            hint="pass the target as a GGUF file with --target FILE.gguf, as llama.cpp's converter writes it",
        )
    if max(model["vocab"].values()) >= vocab_size:
        raise FormatError(
            f"the tokenizer has {max(model['vocab'].values()) + 1:,} tokens", where=folder, expected=f"{vocab_size:,}"
        )
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [KINDS["unused"]] * vocab_size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, KINDS["byte" if _is_byte(text) else "normal"]
    added: Any = described.get("added_tokens") or []
    for token in added:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = KINDS["control" if token["special"] else "user_defined"]
    found: dict[str, object] = {TOKENS: tokens, "tokenizer.ggml.token_type": kinds}
    if model.get("byte_fallback"):  # a tokenizer of SentencePiece, whose ids are its ranks
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-float(n) for n in range(vocab_size)]}
    else:
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": UNNAMED_SPLITS}
    return found | _special(folder, vocab_size)


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _special(folder: Path, vocab_size: int) -> dict[str, object]:
    """The merges, the ids with a meaning and the chat template, as the package finds them in a folder."""
    from gguf import SpecialVocab

    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)  # it warns of templates for pairs of texts
    special = SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    found: dict[str, object] = {"tokenizer.ggml.merges": special.merges}
    found |= {f"tokenizer.ggml.{_spelled(name)}_token_id": number for name, number in special.special_token_ids.items()}
    found |= {f"tokenizer.ggml.add_{name}_token": flag for name, flag in special.add_special_token.items()}
    return found | (
        {"tokenizer.chat_template": special.chat_template} if isinstance(special.chat_template, str) else {}
    )


def _spelled(name: str) -> str:
    """A kind of token in GGUF's own spelling."""
    return {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(name, name)
