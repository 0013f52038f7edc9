"""EAGLE-1 as NVIDIA Model-Optimizer exports it, from Megatron or through Hugging Face.

SafeAILab's names with the norms that `eagle_config` switches on: `enorm` and `hnorm` before `fc`, `input_layernorm` in
layer 0, `norm` before the head, whose output is also fed back; a head of its own where the vocabulary is reduced.
Source: NVIDIA/Model-Optimizer `modelopt/torch/export/plugins/mcore_llama.py`,
`modelopt/torch/speculative/plugins/megatron_eagle.py`.
"""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.formats.decoder import has_bias, read_decoder
from draftkit.convert.formats.eagle.eagle import fusion_spec
from draftkit.convert.formats.eagle.eagle_modelopt import eagle_config, extra_heads, is_marked
from draftkit.convert.formats.eagle.reading import read_eagle_config
from draftkit.convert.formats.vocabulary_map import read_vocabulary_map, with_map
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "modelopt-eagle"
TITLE = "EAGLE-1 (NVIDIA ModelOpt export)"

NORMS = {"enorm.weight", "hnorm.weight", "layers.0.input_layernorm.weight", "norm.weight"}


def recognize(checkpoint: Checkpoint) -> int:
    """`fc` twice as wide as high beside its config, or beside norms that EAGLE-1 does not have."""
    tensors = checkpoint.tensors
    fc = tensors["fc.weight"].shape if "fc.weight" in tensors else ()
    fuses = len(fc) == 2 and fc[1] == 2 * fc[0] and "layers.0.self_attn.o_proj.weight" in tensors
    marked = is_marked(checkpoint) and eagle_config(checkpoint).get("use_aux_hidden_state") is False
    named = "LlamaForCausalLMEagle" in checkpoint.architectures and bool(NORMS & tensors.keys())
    return 3 if fuses and (marked or named) and "layers.0.hidden_norm.weight" not in tensors else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    tensors = checkpoint.tensors
    stated = read_eagle_config(facts)
    decoder = read_decoder(checkpoint, facts, "layers.0.", checkpoint.count_layers(), "config")
    vocab_size = facts.size("vocab_size")
    draft_vocab_size = facts.size("draft_vocab_size", vocab_size, "absent means the target's vocabulary")
    if target is not None:
        checkpoint.check_target(target, hidden_size=decoder.hidden_size, vocab_size=vocab_size)
    vocabulary_map = read_vocabulary_map(checkpoint, facts, vocab_size, draft_vocab_size)
    embedding_norm = _has_norm(checkpoint, facts, "embedding_norm", "enorm.weight", stated.paired_norms)
    hidden_norm = _has_norm(checkpoint, facts, "hidden_norm", "hnorm.weight", stated.paired_norms)
    input_norm = _has_norm(checkpoint, facts, "input_norm", "layers.0.input_layernorm.weight", stated.first_norm)
    final_norm = _has_norm(checkpoint, facts, "final_norm", "norm.weight", stated.last_norm)
    note = "its trainer under Megatron; the one under Hugging Face feeds back the state before the norm"
    facts.record("feedback", "post_norm" if final_norm else "pre_norm", "format default", note if final_norm else "")
    for module in ("embed_tokens", "lm_head"):
        facts.record(module, "draft" if f"{module}.weight" in tensors else "target", "from tensors")
    architecture = fusion_spec(
        decoder,
        vocab_size,
        draft_vocab_size=draft_vocab_size,
        fusion_bias=has_bias(checkpoint, facts, "fusion_bias", "fc.bias", key="bias"),
        embedding_norm=embedding_norm,
        hidden_norm=hidden_norm,
        input_norm=input_norm,
        final_norm=final_norm,
        feedback="post_norm" if final_norm else "pre_norm",
        embed_tokens="draft" if "embed_tokens.weight" in tensors else "target",
        lm_head="draft" if "lm_head.weight" in tensors or draft_vocab_size < vocab_size else "target",
    )
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    moves = with_map(rename(checkpoint, dropped=extra_heads(checkpoint, facts)), checkpoint, vocabulary_map)
    return make_plan(NAME, checkpoint, facts, spec, moves)


def _has_norm(checkpoint: Checkpoint, facts: Facts, name: str, tensor: str, stated: bool | None) -> bool:
    """Whether a norm is there: where `eagle_config` says so, or the file has its weight."""
    if stated:
        return facts.record(name, True, "stated", "eagle_config")
    return facts.record(name, tensor in checkpoint.tensors, "from tensors", tensor)
