"""The tokenizer's keys of a GGUF file: those of another file, or made from the `tokenizer.json` of a folder.

A draft's file needs all of them to load, and llama.cpp takes the size of its vocabulary from there; texts are split by
the target's file. Source: llama.cpp `conversion/base.py`, gguf-py `vocab.py`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.errors import FormatError
from draftkit.hub.locate import locate
from draftkit.io.gguf_file import TOKENIZER, TOKENS, read_typed
from draftkit.io.jsonfile import read_object
from draftkit.layout.target import TargetFacts

# How llama.cpp calls the ways to split a text before merging (`src/llama-vocab.cpp`, which has each pattern beside its
# own). Its converter tells them by the hash of a text's tokens; here it is the `pre_tokenizer` of tokenizer.json, and
# whether the vocabulary is asked for a piece before its merges are. Files of drafts never split a text.
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START, ENDING, SLASHED = (
    r"[^\r\n\p{L}\p{N}]?",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1),
)
BYTES = "ByteLevel"
SPLITS = {
    ((BYTES,), False): "gpt-2",
    (("Digits", BYTES), False): "smollm",
    ((WORDS + r"|\p{N}{1,3}" + TAIL,), True): "llama-bpe",
    ((WORDS + r"|\p{N}{1,3}" + TAIL,), False): "dbrx",
    ((WORDS + r"|\p{N}" + TAIL,), False): "qwen2",
    (
        (WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+") + r"|\p{N}" + TAIL.replace(r"\p{N}", r"\p{M}\p{N}"),),
        False,
    ): "qwen35",
    ((f"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*" + r"|\p{N}" + SLASHED,), True): "tekken",
    ((f"{START}{UPPER}*{LOWER}+{ENDING}|{START}{UPPER}+{LOWER}*{ENDING}" + r"|\p{N}{1,3}" + SLASHED,), False): "gpt-4o",
}
UNNAMED_SPLITS = "default"
KINDS = {"normal": 1, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}  # `TokenType` of the package
KINDS_KEY = "tokenizer.ggml.token_type"
SPLITS_KEY = "tokenizer.ggml.pre"
MASK_KEY = "tokenizer.ggml.mask_token_id"


def tokenizer_of(target: TargetFacts, vocab_size: int) -> dict[str, object]:
    """The keys `tokenizer.*` that state the tokenizer of a target: a GGUF file, a folder or a Hub id.

    Raises `FormatError` for a tokenizer that cannot be told in GGUF.
    """
    if target.path.is_file():
        return dict(read_typed(target.path, TOKENIZER))
    if target.revision is not None:
        locate(target.name, revision=target.revision, weights=False)
    return tokenizer_in(target.path, vocab_size)


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
    found: dict[str, object] = {TOKENS: tokens, KINDS_KEY: kinds}
    if model.get("byte_fallback"):  # a tokenizer of SentencePiece, whose ids are its ranks
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-float(n) for n in range(vocab_size)]}
    else:
        found |= {"tokenizer.ggml.model": "gpt2", SPLITS_KEY: splits_of(described)}
    return found | _special(folder, vocab_size)


def splits_of(described: Mapping[str, Any]) -> str:
    """llama.cpp's name of how a `tokenizer.json` splits a text; `UNNAMED_SPLITS` where it is not known."""
    steps = _steps(described.get("pre_tokenizer"))
    return SPLITS.get((steps, bool(described["model"].get("ignore_merges"))), UNNAMED_SPLITS)


def _steps(step: Any) -> tuple[str, ...]:
    """What splits, one thing after the other: a pattern, digits, or the pattern of GPT-2; in other words what nobody
    knows."""
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        return tuple(itertools.chain.from_iterable(map(_steps, step["pretokenizers"])))
    if kind == BYTES and not step.get("add_prefix_space"):
        return (BYTES,) if step.get("use_regex", True) else ()
    if kind == "Digits" and step.get("individual_digits"):
        return ("Digits",)
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return (str(step["pattern"].get("Regex")),)
    return (str(step),)


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
