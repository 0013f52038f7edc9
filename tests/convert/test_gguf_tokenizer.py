"""How llama.cpp calls a tokenizer's way to split a text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from draftkit.convert.formats.gguf.tokenizer import UNNAMED_SPLITS, splits_of

SMALL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + SMALL
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + SMALL


def described(splits: Any, *, ignore_merges: bool = False) -> dict[str, Any]:
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = splits
    return json.loads(tokenizer.to_str())  # type: ignore[no-any-return]


def by_pattern(pattern: str) -> Any:
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(
    ("splits", "ignore_merges", "name"),
    [
        (ByteLevel(add_prefix_space=False), False, "gpt-2"),
        (Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]), False, "smollm"),
        (by_pattern(LLAMA3), True, "llama-bpe"),
        (by_pattern(LLAMA3), False, "dbrx"),
        (by_pattern(QWEN2), False, "qwen2"),
        (by_pattern(QWEN2), True, UNNAMED_SPLITS),
        (by_pattern(r"\p{L}+"), False, UNNAMED_SPLITS),
        (ByteLevel(add_prefix_space=True), False, UNNAMED_SPLITS),
        (Sequence([Digits(individual_digits=False), ByteLevel(add_prefix_space=False)]), False, UNNAMED_SPLITS),
    ],
)
def test_what_is_known_is_named(splits: Any, ignore_merges: bool, name: str) -> None:
    assert splits_of(described(splits, ignore_merges=ignore_merges)) == name
