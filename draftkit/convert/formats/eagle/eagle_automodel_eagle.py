"""EAGLE-1 and EAGLE-2 as NVIDIA NeMo Automodel trains them.

SafeAILab's names with the usual norm in every layer and a norm of the output, which is what the target's head reads and
what is fed back. The config is the whole of the target's with the draft's keys beside. Source: NVIDIA-NeMo/Automodel
`nemo_automodel/components/speculative/eagle/draft_llama_v12.py`, `core_v12.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.decoder import read_decoder, read_windows
from draftkit.convert.formats.eagle.eagle import fusion_spec
from draftkit.convert.formats.eagle.eagle_automodel import LAYER_KEYS, check_rope
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "automodel-eagle"
TITLE = "EAGLE-1, EAGLE-2 (NeMo Automodel layout)"

NORMS = {"layers.0.input_layernorm.weight", "norm.weight"}
OTHERS = {"enorm.weight", "hnorm.weight", "layers.0.hidden_norm.weight", "lm_head.weight"}


def recognize(checkpoint: Checkpoint) -> int:
    """`fc` twice as wide as high with both norms, or its class's name as well."""
    tensors = checkpoint.tensors
    fc = tensors["fc.weight"].shape if "fc.weight" in tensors else ()
    fuses = len(fc) == 2 and fc[1] == 2 * fc[0] and tensors.keys() >= NORMS and not OTHERS & tensors.keys()
    return (3 if "LlamaEagleDraftModel" in checkpoint.architectures else 1) if fuses else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    check_rope(checkpoint, facts)
    for key in sorted(checkpoint.config.keys() - LAYER_KEYS):
        facts.drop(key, "not read by the draft's class: the target's, or about training")
    num_layers = checkpoint.count_layers()
    windows = read_windows(facts, num_layers, own=False)
    decoder = read_decoder(checkpoint, facts, "layers.0.", num_layers, "config", windows)
    vocab_size = facts.size("vocab_size")
    if target is not None:
        checkpoint.check_target(target, hidden_size=decoder.hidden_size, vocab_size=vocab_size)
    facts.record("features", "target's last hidden state after its final norm", "format default")
    facts.record("feedback", "post_norm", "format default", "its trainer predicts the target's normed state")
    own_embedding = "embed_tokens.weight" in checkpoint.tensors
    facts.record("embed_tokens", "draft" if own_embedding else "target", "from tensors")
    facts.record("lm_head", "target", "format default", "the format stores none")
    architecture = fusion_spec(
        decoder,
        vocab_size,
        fusion_bias=False,
        input_norm=True,
        final_norm=True,
        feedback="post_norm",
        embed_tokens="draft" if own_embedding else "target",
    )
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, rename(checkpoint))
