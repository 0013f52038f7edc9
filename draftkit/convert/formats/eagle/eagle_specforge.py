"""EAGLE-3 as SpecForge trains it and SGLang serves it.

SafeAILab's tensors, `architectures` `LlamaForCausalLMEagle3`, nested layer ids that number outputs, and `d2t`/`t2d`
even for a full vocabulary. Written for SGLang since its EAGLE-3.1 support (sgl-project/sglang #24663 and #32334, May
and July 2026): older versions ignore the norms before `fc`, a normed feedback and layers beyond the first.
Source: sgl-project/SpecForge `specforge/modeling/draft/llama3_eagle.py`, SGLang `llama_eagle3.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import Dialect, norms_of_deeper_layers, plan_eagle3
from draftkit.convert.formats.eagle.writing import engine_decoder, engine_rope_keys, llama_config, plain_eagle3
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.engines.sglang import window_of
from draftkit.errors import LayoutError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.stored_weights import modules_with_scales
from draftkit.layout.target import TargetFacts

NAME = "specforge"
TITLE = "EAGLE-3 (SpecForge, SGLang layout)"

DESTINATION = "sglang"
METHODS = ("eagle3",)
ARCHITECTURE = "LlamaForCausalLMEagle3"


def recognize(checkpoint: Checkpoint) -> int:
    is_eagle3 = "midlayer.self_attn.o_proj.weight" in checkpoint.tensors
    return 2 if is_eagle3 and ARCHITECTURE in checkpoint.architectures else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    renames = {"midlayer.": "layers.0."} | norms_of_deeper_layers(checkpoint, "layers.")
    return plan_eagle3(checkpoint, facts, target, Dialect(NAME, renames))


def export(outgoing: Outgoing) -> Export:
    eagle = outgoing.draft.spec.architecture.expect(EagleSpec)
    _refuse_quantized_fusion(outgoing)
    decoder = replace(engine_decoder(eagle.decoder), sliding_window=window_of(eagle), qkv_bias=False, output_bias=False)
    runs = plain_eagle3(eagle, decoder)
    moves = kept(outgoing, runs, _names(eagle), without=["lm_head.weight"])
    moves += [outgoing.borrowed("lm_head.weight"), *_vocabulary_map(eagle)]
    return Export(_config(outgoing, eagle), tuple(moves), losses(eagle, runs))


def _config(outgoing: Outgoing, eagle: EagleSpec) -> dict[str, object]:
    """The config. `norm_output` is left out where it would be false: SpecForge before 2026-09-15 takes that for raw
    logits, and every version takes an absent one for EAGLE-3's way."""
    config = llama_config(eagle, outgoing.dtype) | engine_rope_keys(eagle.decoder.rope)
    config |= {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": eagle.draft_vocab_size,
        "target_hidden_size": eagle.target_hidden_size,
        "eagle_config": _layer_outputs(eagle),
    }
    if eagle.aux_layer_ids is not None and len(eagle.aux_layer_ids) != 3:
        config["num_aux_hidden_states"] = len(eagle.aux_layer_ids)
    if eagle.feature_norm == "per_layer":
        config["fc_norm"] = True
    if eagle.feature_norm == "joint":
        config["norm_before_fc"] = True
    if eagle.feedback == "post_norm":
        config["norm_output"] = True
    if window_of(eagle) is not None:  # SGLang is told it by a flag; it is here for other readers
        config |= {"layer_types": eagle.decoder.layer_types, "sliding_window": window_of(eagle)}
    if outgoing.draft.spec.quantization is not None:
        config["quantization_config"] = outgoing.draft.spec.quantization
    return config


def _layer_outputs(eagle: EagleSpec) -> dict[str, object]:
    """The captured layers by the number of the layer whose output they are."""
    if eagle.aux_layer_ids is None:
        return {"use_aux_hidden_state": False}
    return {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in eagle.aux_layer_ids],
    }


def _names(eagle: EagleSpec) -> dict[str, str]:
    """SGLang calls the first norm of every layer `hidden_norm`."""
    deeper = range(1, eagle.decoder.num_hidden_layers)
    return {"layers.0.": "midlayer."} | {f"layers.{i}.input_layernorm.": f"layers.{i}.hidden_norm." for i in deeper}


def _vocabulary_map(eagle: EagleSpec) -> list[Move]:
    """The tensors `d2t` and `t2d` as far as the draft lacks them: SpecForge's class loads both, whatever the
    vocabulary."""
    whole = (eagle.vocab_size,)
    if eagle.reduced_vocabulary:
        return [Move("offset_to_mask", ("d2t",), "t2d", "BOOL", whole)]
    why = "stands for the whole vocabulary"
    return [
        Move("fill", (), "d2t", "I64", whole, reason=why, number=0),
        Move("fill", (), "t2d", "BOOL", whole, reason=why, number=1),
    ]


def _refuse_quantized_fusion(outgoing: Outgoing) -> None:
    """Raise `LayoutError` where `fc` is quantized: SGLang loads it as a plain matrix."""
    if "fc" in modules_with_scales(outgoing.draft.tensors):
        raise LayoutError(
            "fc is quantized, and SGLang loads it as a plain matrix",
            where=outgoing.draft.path,
            hint="use --to vllm, or a draft whose fc is not quantized",
        )
