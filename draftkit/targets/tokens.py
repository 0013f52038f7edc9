"""What tokens stand for: the same bytes are the same token, whichever alphabet a tokenizer writes them in.

Byte-level tokenizers (GPT-2, Llama 3, Qwen) write each byte as one character of an alphabet of their own. Tokenizers of
the SentencePiece kind (Llama 2, Mistral, Gemma) write text with ▁ for a space, and bytes that are no token of theirs as
<0xNN>.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftkit.errors import TargetError
from draftkit.io.tensors import gguf_file, open_checkpoint
from draftkit.targets.devices import use_device
from draftkit.targets.finite import require_finite
from draftkit.targets.pretrained import empty_model, load_pretrained, read_model_config, require_plain, stored_names

SPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# How byte-level tokenizers write bytes: printable ones as they are, the others from U+0100 on.
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(0x100)) - set(PRINTABLE)))
}
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
Name = bytes | str  # of a token: its bytes, or a special token's name


TOKENIZERS = ("tokenizer.", "tekken.", "vocab.", "spiece.")  # how the files begin that tokenizers are loaded from


def token_names(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[Name, int]:
    """What each token below `vocab_size` stands for; of several that stand for the same, the one that text becomes."""
    names: dict[Name, int] = {}
    for token, name in named_tokens(tokenizer, vocab_size):
        names.setdefault(name, token)
    return names


def named_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[tuple[int, Name]]:
    """Every token below `vocab_size` and what it stands for: words, then single bytes <0xNN>, then added tokens.

    Where a word and a byte token stand for the same byte, text becomes the word, which is why words come first.
    """
    added = {token: extra for token, extra in tokenizer.added_tokens_decoder.items() if token < vocab_size}
    words = words_of(tokenizer)
    byte_level = is_byte_level(words.values())
    known = sorted((token, word) for token, word in words.items() if token < vocab_size)
    if byte_level:
        named: list[tuple[int, Name]] = [(token, _byte_level(word)) for token, word in known]
    else:
        known.sort(key=lambda entry: BYTE_TOKEN.fullmatch(entry[1]) is not None)
        named = [(token, _sentencepiece(word)) for token, word in known]
    return named + [(token, e.content if e.special else e.content.encode()) for token, e in sorted(added.items())]


def words_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that were not added to the vocabulary, as the tokenizer writes them."""
    added = tokenizer.added_tokens_decoder
    return {token: word for word, token in tokenizer.get_vocab().items() if token not in added}


def is_byte_level(words: Iterable[str]) -> bool:
    """Whether all are written in the alphabet of byte-level tokenizers."""
    return all(character in BYTE_OF for word in words for character in word)


def same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, vocab_size: int) -> bool:
    """Whether both give the same ids to the same text; special tokens may have other names."""
    return _text_tokens(target, vocab_size) == _text_tokens(draft, vocab_size)


def _text_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[Name, int]:
    return {name: token for name, token in token_names(tokenizer, vocab_size).items() if isinstance(name, bytes)}


def _byte_level(word: str) -> bytes:
    return bytes(BYTE_OF[character] for character in word)


def _sentencepiece(word: str) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(word):
        return bytes.fromhex(byte[1])
    return word.replace(SPACE, " ").encode()


class TargetEmbeddings(PreTrainedModel):
    """A target that cannot be run: only its embedding and its output layer are there.

    `size`: parameters of the whole target.
    """

    def __init__(self, config: PretrainedConfig, embedding: nn.Module, output: nn.Module, size: int):
        super().__init__(config)
        self.embedding = embedding
        self.output = output
        self._size = size

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def num_parameters(self, *_: object, **__: object) -> int:
        return self._size


def load_embeddings(
    folder: Path, config: PretrainedConfig | None = None, *, device: str, dtype: torch.dtype
) -> TargetEmbeddings:
    """The embedding and the output layer of the target in a folder, of any architecture that transformers can build.
    Nothing else is read, except of a GGUF file, which is read whole.

    `config` is that of `read_model_config`, where it has been read. `device` becomes the current one. Raises
    `DraftkitError`.
    """
    config = read_model_config(folder, whole=False) if config is None else config
    if gguf_file(folder) is not None:
        whole = load_pretrained(folder, config, device="cpu", dtype=dtype, attention=None)
        embedding, output = whole.get_input_embeddings(), whole.get_output_embeddings()
        return TargetEmbeddings(config, embedding, output, whole.num_parameters()).to(device).eval()
    use_device(device)
    model = empty_model(config, dtype)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output.weight is embedding.weight
    tensors = open_checkpoint(folder)
    stored = stored_names(model, tensors)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in (embedding,) if tied else (embedding, output):
        missing = [names[parameter] for parameter in module.parameters() if names[parameter] not in stored]
        if missing:
            raise TargetError(f"the target's checkpoint has no tensor {missing[0]}", where=folder)
        weights = {own: tensors[stored[names[parameter]]] for own, parameter in module.named_parameters()}
        require_plain(weights.values(), tensors, folder)
        module.to_empty(device=device)
        model._init_weights(module)  # what is no weight, as the scale of Gemma's embedding
        loaded = {own: handle.load().to(device, dtype) for own, handle in weights.items()}
        require_finite(((weights[own].name, tensor) for own, tensor in loaded.items()), folder)
        module.load_state_dict(loaded, strict=True, assign=True)
    if tied:
        output.weight = embedding.weight
    return TargetEmbeddings(config, embedding, output, model.num_parameters()).eval().requires_grad_(False)
