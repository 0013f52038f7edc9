"""EAGLE-1 and HASS as the speculators library stored them until 0.4 (`speculators_model_type` `eagle`).

`fusion_fc` is EAGLE's `fc` and `transformer` its one layer. With `layernorms` the embedding, the layer's input and the
output are normed. Embedding, head and rope table were the target's. Source: vllm-project/speculators at 792b9e6c^,
`models/eagle.py`, `convert/eagle/eagle_converter.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.decoder import has_bias, read_decoder
from draftkit.convert.formats.eagle.eagle import fusion_spec
from draftkit.convert.formats.speculators import note_target, recognize_kinds
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.engines.speculators import KIND, LAYER_CONFIG
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "speculators-eagle"
TITLE = "EAGLE-1, HASS (the first speculators layout)"

NAMES = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embedding_layernorm.": "enorm.",
    "pre_lm_head_layernorm.": "norm.",
}


def recognize(checkpoint: Checkpoint) -> int:
    return recognize_kinds(checkpoint, ("eagle",))


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    facts.lift(LAYER_CONFIG)
    facts.drop(KIND, "names the format")
    facts.drop("transformer_layer_architecture", "the tensors tell the layer")
    note_target(facts)
    decoder = read_decoder(checkpoint, facts, "transformer.", num_layers=1)
    vocab_size = facts.size("vocab_size")
    if target is not None:
        checkpoint.check_target(target, hidden_size=decoder.hidden_size, vocab_size=vocab_size)
    normed = facts.optional("layernorms", bool) is True
    facts.record_from("layernorms", dict.fromkeys(("embedding_norm", "input_norm", "final_norm"), normed))
    if normed:
        facts.record("feedback", "pre_norm", "format default", "the library only trained; untested against a trainer")
    for module in ("embed_tokens", "lm_head"):
        facts.record(module, "target", "format default", "the format stores none")
    architecture = fusion_spec(
        decoder,
        vocab_size,
        fusion_bias=has_bias(checkpoint, facts, "fusion_bias", "fusion_fc.bias"),
        embedding_norm=normed,
        input_norm=normed,
        final_norm=normed,
        embed_tokens="target",
    )
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, rename(checkpoint, NAMES))
