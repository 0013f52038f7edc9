"""Small tokenizers of the kinds that models have, made here, and tiny models that use them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pico
import torch
from templates import CHATML
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Model, Unigram, WordPiece
from transformers import PreTrainedTokenizerFast

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
WORDS = ("the", "cat", "sat", "on", "mat", "naïve", "42", "draft", "drafting", "sitting")
BYTES = [f"<0x{byte:02X}>" for byte in range(0x100)]


def byte_level(words: Sequence[str] = WORDS, extra: Sequence[AddedToken] = ()) -> PreTrainedTokenizerFast:
    """Qwen's kind: every byte, then words with and without a space; the special tokens come last."""
    spaced = [form for word in words for form in (word, " " + word)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    write = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(_merged(alphabet, ["".join(p for p, _ in write.pre_tokenize_str(s)) for s in spaced]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>"])
    tokenizer.add_tokens(list(extra))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def sentencepiece(words: Sequence[str] = WORDS, *, byte_fallback: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2's kind: special tokens, byte tokens, then text with ▁ for a space, one of which begins every text."""
    letters = sorted({letter for word in words for letter in word} | {"▁"})
    first = ["<unk>", "<s>", "</s>", *(BYTES if byte_fallback else [])]
    model = _merged([*first, *letters], ["▁" + word for word in words], byte_fallback=byte_fallback, unk_token="<unk>")
    return _with_spaces(model)


def unigram(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """The unigrams of SentencePiece, with byte fallback."""
    letters = sorted({letter for word in words for letter in word} | {"▁"})
    scored = [*[(word, -6.0) for word in letters], *[("▁" + word, -3.0) for word in words]]
    specials = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    return _with_spaces(Unigram([*specials, *[(byte, -20.0) for byte in BYTES], *scored], 0, byte_fallback=True))


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordPiece({"[UNK]": 0, "the": 1, "##cat": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]")


def save(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, padding: int = 0, seed: int = 0, **changes: object
) -> str:
    """A Llama with a row for each token and `padding` more (fewer, if negative), with its tokenizer."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = {"num_hidden_layers": 2} | ids
    model = pico.llama(seed, vocab_size=len(tokenizer) + padding, **(settings | changes))
    if "dtype" in changes:
        model = model.to(getattr(torch, str(changes["dtype"])))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _merged(alphabet: Sequence[str], words: Sequence[str], **options: object) -> BPE:
    """A BPE model that can build each of the words letter by letter."""
    vocabulary = {piece: index for index, piece in enumerate(alphabet)}
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end], len(vocabulary))
            merges.setdefault((word[: end - 1], word[end - 1]))
    return BPE(vocabulary, list(merges), **options)


def _with_spaces(model: Model) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=LLAMA2
    )
