"""A plain causal language model as draft, in the layout of transformers."""

from __future__ import annotations

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import Facts
from draftkit.convert.plan import Plan, common_dtype, make_plan, rename
from draftkit.errors import TargetError
from draftkit.layout.spec import CausalLMSpec, DraftSpec
from draftkit.layout.target import TargetFacts

NAME = "causal-lm"
TITLE = "causal language model (transformers layout)"
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "generation_config.json",
)


# These mark PARD and PARD-2, which have the same tensors and draft all tokens in one pass.
PARALLEL = {"pard_token", "spd_type", "pard2"}


def recognise(checkpoint: Checkpoint) -> bool:
    names = checkpoint.tensors.keys()
    is_causal_lm = "model.embed_tokens.weight" in names and "model.norm.weight" in names
    return is_causal_lm and not checkpoint.config.keys() & PARALLEL


def plan(checkpoint: Checkpoint, target: TargetFacts | None) -> Plan:
    facts = Facts(checkpoint.config, checkpoint.source.path / "config.json")
    vocab_size = facts.size("vocab_size")
    if target is not None and target.vocab_size != vocab_size:
        raise TargetError(
            f"{checkpoint.source.name} has {vocab_size} tokens, {target.name} has {target.vocab_size}",
            where=checkpoint.source.path,
            hint="pass a draft with the target's vocabulary",
        )
    facts.record("config", str(checkpoint.config.get("model_type")), "stated", "kept verbatim")
    for key in checkpoint.config:
        facts.drop(key, "kept verbatim in the spec's config")
    architecture = CausalLMSpec(config=checkpoint.config, vocab_size=vocab_size, parallel=None, target_features=None)
    spec = DraftSpec(architecture=architecture, dtype=common_dtype(checkpoint))
    files = sorted({path for pattern in COPIED for path in checkpoint.source.path.glob(pattern)})
    return make_plan(NAME, checkpoint, facts, spec, rename(checkpoint), files)
