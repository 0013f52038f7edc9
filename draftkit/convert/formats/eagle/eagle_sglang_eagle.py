"""EAGLE-1 and EAGLE-2 as SGLang serves them.

SafeAILab's tensors under the architecture `LlamaForCausalLMEagle`, whose `fc` always has a bias and whose attention has
biases in all four projections or in none: what a draft lacks is written as zeros, since SGLang leaves it as
initialized. Source: SGLang `python/sglang/srt/models/llama_eagle.py`, `llama.py`.
"""

from __future__ import annotations

from dataclasses import replace

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.export import Export, Outgoing, kept, losses
from draftkit.convert.facts import Facts
from draftkit.convert.formats.eagle import eagle as reference
from draftkit.convert.formats.eagle.writing import engine_decoder, engine_rope_keys, llama_config, plain_eagle
from draftkit.convert.operations import Move
from draftkit.convert.plan import Plan
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "sglang-eagle"
TITLE = "EAGLE-1, EAGLE-2 (SGLang layout)"

DESTINATION = "sglang"
METHODS = ("eagle",)
ARCHITECTURE = "LlamaForCausalLMEagle"


def recognize(checkpoint: Checkpoint) -> int:
    return 2 if ARCHITECTURE in checkpoint.architectures and reference.recognize(checkpoint) else 0


def plan(checkpoint: Checkpoint, facts: Facts, target: TargetFacts | None) -> Plan:
    return replace(reference.plan(checkpoint, facts, target), format=NAME)


def export(outgoing: Outgoing) -> Export:
    eagle = outgoing.draft.spec.architecture.expect(EagleSpec)
    runs = plain_eagle(eagle, engine_decoder(eagle.decoder))
    biased = eagle.decoder.qkv_bias or eagle.decoder.output_bias
    config = llama_config(eagle, outgoing.dtype) | engine_rope_keys(eagle.decoder.rope)
    config |= {"architectures": [ARCHITECTURE], "attention_bias": biased}
    return Export(config, (*kept(outgoing, runs, {}), *_zero_biases(outgoing, runs, biased)), losses(eagle, runs))


def _zero_biases(outgoing: Outgoing, runs: EagleSpec, attention: bool) -> list[Move]:
    """The biases that SGLang's class has and this draft has not."""
    decoder = replace(runs.decoder, qkv_bias=attention, output_bias=attention)
    loaded = DraftSpec(architecture=replace(runs, decoder=decoder, fusion_bias=True), dtype=outgoing.draft.spec.dtype)
    why = "SGLang leaves an absent bias as initialized"
    return [
        Move("fill", (), name, loaded.dtype, tensor.shape, reason=why, number=0)
        for name, tensor in loaded.tensors().items()
        if name.endswith(".bias") and name not in outgoing.draft.tensors
    ]
