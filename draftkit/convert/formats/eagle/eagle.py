"""EAGLE-1 and EAGLE-2 as SafeAILab publishes them, and HASS, which shares the layout.

One `pytorch_model.bin` or `model.safetensors` without prefix: `fc` over [embedding, hidden], and decoder layers of
which the first has no input norm; no final norm, the target's head. EAGLE-2 differs in its tree search only.
Source: SafeAILab/EAGLE `eagle/model/cnets1.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.destinations import Remedy
from draftkit.convert.export import PREFIX, Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.decoder import has_bias, read_decoder
from draftkit.convert.formats.eagle.reading import Owner
from draftkit.convert.formats.eagle.writing import llama_config, plain_eagle, reference_decoder, reference_rope_keys
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.layout.architecture import Architecture
from draftkit.layout.decoder import Decoder
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "eagle"
TITLE = "EAGLE-1, EAGLE-2, HASS (SafeAILab layout)"

DESTINATION = "eagle"
METHODS = ("eagle",)


def recognize(checkpoint: Checkpoint) -> int:
    """`fc` twice as wide as high, and a first layer with attention but without an input norm or a hidden norm."""
    tensors = checkpoint.tensors
    fc = tensors["fc.weight"].shape if "fc.weight" in tensors else ()
    norms = {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
    fuses = len(fc) == 2 and fc[1] == 2 * fc[0] and "layers.0.self_attn.q_proj.weight" in tensors
    return int(fuses and not tensors.keys() & norms and "lm_head.weight" not in tensors)


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    decoder = read_decoder(checkpoint, facts, "layers.0.", checkpoint.count_layers())
    vocab_size = facts.size("vocab_size")
    if target is not None:
        checkpoint.check_target(target, hidden_size=decoder.hidden_size, vocab_size=vocab_size)
    own_embedding = "embed_tokens.weight" in checkpoint.tensors
    architecture = fusion_spec(
        decoder,
        vocab_size,
        fusion_bias=has_bias(checkpoint, facts, "fusion_bias", "fc.bias", key="bias"),
        embed_tokens="draft" if own_embedding else "target",
        logit_scale=facts.stated_or("logit_scale", float, 1.0, "none"),  # vLLM's class reads it
    )
    facts.record("embed_tokens", architecture.embed_tokens, "from tensors")
    facts.record("lm_head", "target", "format default", "the format stores none")
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    return make_plan(NAME, checkpoint, facts, spec, rename(checkpoint))


def export(outgoing: Outgoing) -> Export:
    """HASS loads strictly and without the target's table, so a draft that did not come without one gets a copy."""
    eagle = outgoing.draft.spec.architecture.expect(EagleSpec)
    runs = plain_eagle(eagle, reference_decoder(eagle.decoder))
    config = llama_config(eagle, outgoing.dtype) | reference_rope_keys(eagle.decoder.rope)
    config |= {"bias": eagle.fusion_bias, "qkv_bias": eagle.decoder.qkv_bias}
    moves = kept(outgoing, runs, {}, without=["embed_tokens.weight"])
    if eagle.embed_tokens == "draft" or outgoing.draft.provenance.format != NAME:
        moves.append(outgoing.borrowed("embed_tokens.weight"))
    return Export(config, tuple(moves), losses(eagle, runs))


def fusion_spec(
    decoder: Decoder,
    vocab_size: int,
    *,
    fusion_bias: bool,
    embed_tokens: Owner,
    lm_head: Owner = "target",
    draft_vocab_size: int | None = None,
    embedding_norm: bool = False,
    hidden_norm: bool = False,
    input_norm: bool = False,
    final_norm: bool = False,
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm",
    logit_scale: float = 1.0,
) -> EagleSpec:
    """A draft that reads the target's last hidden state, of its own width; the defaults are EAGLE-1's."""
    return EagleSpec(
        decoder=decoder,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if draft_vocab_size is None else draft_vocab_size,
        target_hidden_size=decoder.hidden_size,
        aux_layer_ids=None,
        token_entry="fusion",
        concatenation="embedding_hidden",
        fusion_bias=fusion_bias,
        feature_norm="none",
        embedding_norm=embedding_norm,
        hidden_norm=hidden_norm,
        input_norm=input_norm,
        norm_before_residual=False,
        final_norm=final_norm,
        feedback=feedback,
        logit_scale=logit_scale,
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        parallel=None,
    )


def remedy_for_vllm(architecture: Architecture) -> Remedy | None:
    """vLLM drops `fc.bias`, which can be folded into an embedding table of the draft's own.

    That is exact but for the rounding of the table's dtype.
    """
    eagle = architecture.expect(EagleSpec)
    if not eagle.fusion_bias or eagle.token_entry != "fusion":
        return None
    note = "fc.bias is folded into embed_tokens for vLLM"
    return Remedy(
        what="folds fc.bias into the embedding",
        architecture=replace(eagle, fusion_bias=False, embed_tokens="draft"),
        changed=(
            FactOrigin(name="fusion_bias", value="False", origin="from tensors", note=note),
            FactOrigin(name="embed_tokens", value="draft", origin="from tensors", note=note),
        ),
        moves=_folded,
    )


def _folded(outgoing: Outgoing) -> list[Move]:
    table = "embed_tokens.weight"
    source = outgoing.tensor(table if table in outgoing.draft.tensors else PREFIX + table)
    fold = Move("fold_bias", (source.name, "fc.weight", "fc.bias"), table, source.dtype, source.shape)
    return [*outgoing.renamed({}, without=(table, "fc.bias")), fold]
