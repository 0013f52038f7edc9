"""Gemma-4's assistant as Google publishes it; every name is kept.

Source: transformers 5.23 (`gemma4_assistant`, `gemma4_unified_assistant`) and vLLM 0.32 (`gemma4_mtp.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.operations import Move, copy, drop
from draftkit.convert.plan import Plan, common_dtype, make_plan
from draftkit.errors import FormatError
from draftkit.io.handles import TensorHandle
from draftkit.io.jsonfile import read_object
from draftkit.layout.families.gemma4_assistant import Gemma4AssistantSpec
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts, language_model

NAME = "gemma4-assistant"
TITLE = "Gemma-4's assistant (transformers layout)"

GENERATION = "generation_config.json"  # where vLLM looks for the tokens that are never drafted
CENTROIDS = "masked_embedding.centroids.weight"
KEYS_AND_VALUES = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.\w+")


def recognize(checkpoint: Checkpoint) -> int:
    return 2 * ({"pre_projection.weight", "post_projection.weight"} <= checkpoint.tensors.keys())


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    config = checkpoint.config
    layer_types = language_model(config).get("layer_types")
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise FormatError(f"text_config.layer_types is {layer_types!r}", where=checkpoint.config_path)
    queries = tuple(
        checkpoint.matrix(f"model.layers.{layer}.self_attn.q_proj.weight")[0] for layer in range(len(layer_types))
    )
    vocab_size, hidden_size = checkpoint.matrix("model.embed_tokens.weight")
    ordered = facts.optional("use_ordered_embeddings", bool) or False
    generation = checkpoint.source.path / GENERATION
    suppressed = _suppressed(facts, generation) if generation.is_file() else ()
    facts.record("config", str(config.get("model_type")), "stated", "the assistant's, kept verbatim")
    facts.record("layer_types", str(layer_types), "stated", "config text_config.layer_types")
    facts.record("query_sizes", str(list(queries)), "from tensors")
    facts.record("suppressed_tokens", str(list(suppressed)), "stated", GENERATION if suppressed else "none are")
    architecture = Gemma4AssistantSpec(
        config=config,
        vocab_size=facts.record("vocab_size", vocab_size, "from tensors"),
        target_hidden_size=facts.record(
            "target_hidden_size",
            checkpoint.matrix("post_projection.weight")[0],
            "from tensors",
            "rows of the projection",
        ),
        hidden_size=facts.record("hidden_size", hidden_size, "from tensors"),
        intermediate_size=facts.record(
            "intermediate_size", checkpoint.matrix("model.layers.0.mlp.gate_proj.weight")[0], "from tensors"
        ),
        layer_types=tuple(layer_types),
        query_sizes=queries,
        attention_bias=facts.record(
            "attention_bias", "model.layers.0.self_attn.q_proj.bias" in checkpoint.tensors, "from tensors"
        ),
        num_centroids=facts.record(
            "num_centroids", checkpoint.matrix(CENTROIDS)[0] if ordered else 0, "from tensors" if ordered else "stated"
        ),
        selected_centroids=_selected(facts) if ordered else facts.record("selected_centroids", 0, "stated"),
        tied=facts.stated_or("tie_word_embeddings", bool, True, "transformers' class", fact="tied"),
        suppressed_tokens=suppressed,
        concatenation="embedding_hidden",
        hidden_state="after_norm",
        position="state",
    )
    if target is not None:
        sizes = {"hidden_size": architecture.target_hidden_size, "vocab_size": vocab_size}
        checkpoint.check_target(target, **sizes)
    facts.keep_config()
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    moves = [_move(handle, architecture) for handle in checkpoint.tensors.values()]
    return make_plan(NAME, checkpoint, facts, spec, moves, [generation] if generation.is_file() else [])


def _suppressed(facts: Facts, path: Path) -> tuple[int, ...]:
    tokens = read_object(path).get("suppress_tokens")
    return () if tokens is None else facts.as_integers("suppress_tokens", tokens)


def _selected(facts: Facts) -> int:
    return facts.size("centroid_intermediate_top_k", 32, "transformers' class", fact="selected_centroids")


def _move(handle: TensorHandle, spec: Gemma4AssistantSpec) -> Move:
    """The move of a tensor; one that is stored and never read is dropped."""
    if KEYS_AND_VALUES.fullmatch(handle.name):
        return drop(handle, "its layers attend to the target's keys and values")
    if handle.name == "lm_head.weight" and spec.tied:
        return drop(handle, "tied to model.embed_tokens.weight")
    if handle.name.startswith("masked_embedding.") and not spec.num_centroids:
        return drop(handle, "the config has no use_ordered_embeddings")
    return copy(handle)
