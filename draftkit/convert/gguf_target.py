"""The facts of a target that is a GGUF file."""

from __future__ import annotations

from pathlib import Path

from draftkit.convert.gguf_heads import HEADS
from draftkit.errors import FormatError
from draftkit.hub.gguf import folder_of_gguf
from draftkit.io.gguf_file import ARCHITECTURE, TOKENS, read_gguf
from draftkit.layout.target import TargetFacts, read_target_facts


def gguf_target_facts(file: Path, name: str) -> TargetFacts:
    """What transformers reads of it. Of types that it does not read from GGUF, and with whose heads llama.cpp drafts:
    the sizes by the file's own keys, and a config of its type alone. Raises as `folder_of_gguf`."""
    try:
        return read_target_facts(folder_of_gguf(file), name, None)
    except FormatError:
        metadata = read_gguf(file).metadata
        own = str(metadata.get(ARCHITECTURE))
        kind = next((kind for kind, names in HEADS.items() if names.architecture == own), None)
        hidden_size, vocab_size, blocks = (
            metadata.get(key) for key in (f"{own}.embedding_length", TOKENS, f"{own}.block_count")
        )
        if kind is None or hidden_size is None or vocab_size is None or blocks is None:
            raise
    return TargetFacts(
        name=name,
        revision=None,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_hidden_layers=blocks - metadata.get(f"{own}.nextn_predict_layers", 0),
        max_position_embeddings=metadata.get(f"{own}.context_length"),
        architectures=(),
        config={"model_type": kind},
    )
