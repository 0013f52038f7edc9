"""EAGLE-3 as SafeAILab publishes it.

Tensors without prefix, the one decoder layer under `midlayer.`; `fc` over three captured target states; its own head
over a reduced vocabulary with `d2t` (offsets) and `t2d` (mask). The captured layers are not in the config: the
reference hard-codes 2, N//2 and N−3. Source: SafeAILab/EAGLE `eagle/model/cnets.py`, `modeling_llama_kv.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle.reading import Dialect, plan_eagle3
from draftkit.convert.formats.eagle.writing import llama_config, plain_eagle3, reference_decoder, reference_rope_keys
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.errors import LayoutError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.target import TargetFacts

NAME = "eagle3"
TITLE = "EAGLE-3 (SafeAILab layout)"
DIALECT = Dialect(NAME, {"midlayer.": "layers.0."}, rope="reference")

DESTINATION = "eagle"
METHODS = ("eagle3",)


def recognize(checkpoint: Checkpoint) -> int:
    return int("midlayer.self_attn.o_proj.weight" in checkpoint.tensors)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return plan_eagle3(checkpoint, facts, target, DIALECT)


def export(outgoing: Outgoing) -> Export:
    """With `target_hidden_size` in the config the reference leaves the draft its own embedding."""
    eagle = outgoing.draft.spec.architecture.expect(EagleSpec)
    _refuse_inexpressible(outgoing, eagle)
    decoder = replace(reference_decoder(eagle.decoder), qkv_bias=False)
    runs = replace(plain_eagle3(eagle, decoder), feature_norm="none", feedback="pre_norm")
    config = llama_config(eagle, outgoing.dtype) | reference_rope_keys(eagle.decoder.rope)
    config["draft_vocab_size"] = eagle.draft_vocab_size
    if eagle.embed_tokens == "draft":
        config["target_hidden_size"] = eagle.target_hidden_size
    moves = kept(outgoing, runs, {"layers.0.": "midlayer."}, without=["lm_head.weight"])
    moves.append(outgoing.borrowed("lm_head.weight"))
    if eagle.reduced_vocabulary:
        moves.append(Move("offset_to_mask", ("d2t",), "t2d", "BOOL", (eagle.vocab_size,)))
    return Export(config, tuple(moves), losses(eagle, runs))


def _refuse_inexpressible(outgoing: Outgoing, eagle: EagleSpec) -> None:
    """Raise `LayoutError` for what its class has no place for."""
    problem = None
    layers = eagle.decoder.num_hidden_layers
    if layers > 1:
        problem = f"the draft has {layers} layers, and its class has one"
    elif eagle.aux_layer_ids is None or len(eagle.aux_layer_ids) != 3:
        problem = f"the draft captures layers {eagle.aux_layer_ids}, and its class captures three"
    elif outgoing.draft.spec.quantization is not None:
        problem = "the weights are quantized, and its class loads plain ones"
    else:
        target = outgoing.need_target("its number of layers, which decides what the reference captures")
        if (ids := target.default_aux_layer_ids()) != eagle.aux_layer_ids:
            problem = (
                f"the draft captures layers {list(eagle.aux_layer_ids)} of {target.name}, and its class {list(ids)}"
            )
    if problem:
        raise LayoutError(
            f"SafeAILab's layout cannot hold this draft: {problem}", where=outgoing.draft.path, hint="use --to unified"
        )
