"""The facts of a target that is a GGUF file."""

from __future__ import annotations

from pathlib import Path

from draftkit.convert.gguf_heads import HEADS
from draftkit.errors import FormatError
from draftkit.hub.gguf import folder_of_gguf
from draftkit.io.gguf_file import ARCHITECTURE, TOKENS, read_header
from draftkit.layout.target import TargetFacts, read_target_facts


def gguf_target_facts(file: Path, name: str) -> TargetFacts:
    """What transformers reads of it. Of types that it does not read from GGUF, and with whose heads llama.cpp drafts:
    the sizes by the file's own keys, and a config of its type alone. Raises as `folder_of_gguf`."""
    try:
        return read_target_facts(folder_of_gguf(file), name, None)
    except FormatError:
        header = read_header(file)
        own = str(header.value(ARCHITECTURE, str))
        kind = next((kind for kind, names in HEADS.items() if names.architecture == own), None)
        hidden_size, blocks = (header.value(f"{own}.{key}", int) for key in ("embedding_length", "block_count"))
        vocab_size = header.length(TOKENS)
        if kind is None or hidden_size is None or vocab_size is None or blocks is None:
            raise
    return TargetFacts(
        name=name,
        revision=None,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_hidden_layers=blocks - (header.value(f"{own}.nextn_predict_layers", int) or 0),
        max_position_embeddings=header.value(f"{own}.context_length", int),
        architectures=(),
        config={"model_type": kind},
    )
