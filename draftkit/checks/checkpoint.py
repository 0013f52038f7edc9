"""Known defects of published drafts, as data: how each is recognized, what fixes it, and where it is documented.

Converters and engines pass all of these without a word; the draft then accepts fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from draftkit.convert.operations import carry_out, integers
from draftkit.convert.randomness import looks_random
from draftkit.io.handles import TensorHandle
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

if TYPE_CHECKING:
    from draftkit.convert.api import Reading

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A defect of one checkpoint. `fix`: the override or command that repairs it. `source`: where it is documented."""

    name: str
    severity: Severity
    message: str
    fix: str
    source: str


@dataclass(frozen=True)
class Evidence:
    """What defects are recognized from: the source's config, and the draft as the layout has it."""

    format: str
    config: Mapping[str, object]
    spec: DraftSpec
    facts: Mapping[str, FactOrigin]
    tensors: Mapping[str, TensorHandle]
    target: TargetFacts | None

    @property
    def eagle(self) -> EagleSpec | None:
        return self.spec.architecture if isinstance(self.spec.architecture, EagleSpec) else None


class Found(NamedTuple):
    message: str
    fix: str


@dataclass(frozen=True)
class Defect:
    """One known defect: `find` says what is wrong with a checkpoint and how to repair it, or None."""

    name: str
    severity: Severity
    source: str
    find: Callable[[Evidence], Found | None]


def findings_of_reading(reading: Reading) -> list[Finding]:
    """The defects of a foreign checkpoint; none can be told before its facts are complete."""
    plan, checkpoint = reading.plan, reading.checkpoint
    problems = [Finding(p.name, "error", p.message, p.fix, "the checkpoint itself") for p in plan.problems]
    if plan.spec is None:
        return problems
    tensors = carry_out(plan.moves, checkpoint.tensors)
    facts = {fact.name: fact for fact in plan.facts}
    found = _findings(Evidence(plan.format, checkpoint.config, plan.spec, facts, tensors, reading.target))
    told = {problem.name for problem in problems}
    return problems + [finding for finding in found if not (finding.name == "zero-d2t" and "d2t" in told)]


def findings_of_draft(draft: Draft, target: TargetFacts | None = None) -> list[Finding]:
    """The defects of a unified draft."""
    facts = {fact.name: fact for fact in draft.provenance.facts}
    config = draft.provenance.dropped_config
    return _findings(Evidence(draft.provenance.format, config, draft.spec, facts, draft.tensors, target))


def _findings(evidence: Evidence) -> list[Finding]:
    found = [(defect, defect.find(evidence)) for defect in DEFECTS]
    return [Finding(d.name, d.severity, f.message, f.fix, d.source) for d, f in found if f is not None]


def _zero_map(evidence: Evidence) -> Found | None:
    if "d2t" not in evidence.tensors or any(integers(evidence.tensors["d2t"])):
        return None
    return Found(
        "d2t is all zero over a reduced vocabulary: draft id i means target id i, as if the map was never set",
        "get the file with the map that the draft was trained with",
    )


def _shifted_default(evidence: Evidence, shift: int, *, nested: bool) -> tuple[int, ...] | None:
    """The default captured layers, where the file states ids, nested or not, that are these moved by `shift`."""
    fact = evidence.facts.get("aux_layer_ids")
    if evidence.eagle is None or evidence.target is None or fact is None or fact.origin != "stated":
        return None
    states = evidence.target.default_aux_layer_ids()
    is_nested = "eagle_config" in fact.note
    moved = tuple(i + shift for i in states)
    return states if nested == is_nested and evidence.eagle.aux_layer_ids == moved else None


def _outputs_as_states(evidence: Evidence) -> Found | None:
    """Top-level ids that are the default captured layers under the numbering of outputs."""
    states = _shifted_default(evidence, -1, nested=False)
    if states is None:
        return None
    return Found(
        f"eagle_aux_hidden_state_layer_ids {[i - 1 for i in states]} are the default layers numbered as outputs, and "
        "engines read this key as states: one layer early",
        "--set aux_layer_ids=" + ",".join(map(str, states)),
    )


def _states_as_outputs(evidence: Evidence) -> Found | None:
    """Nested ids, which number outputs, that are the default layers under the numbering of states."""
    states = _shifted_default(evidence, 1, nested=True)
    if states is None:
        return None
    return Found(
        f"eagle_config names layers {list(states)}, the default as states, where its authors number outputs",
        "--set aux_layer_ids=" + ",".join(map(str, states)),
    )


def _random_embedding(evidence: Evidence) -> Found | None:
    if evidence.eagle is None or "embed_tokens.weight" not in evidence.tensors:
        return None
    if not looks_random(evidence.tensors["embed_tokens.weight"]):
        return None
    return Found(
        "embed_tokens.weight looks like an initialization, not like a trained table; vLLM prefers it to the target's",
        "remove the tensor from the file if the draft was trained with the target's table",
    )


def _bias_as_attention_bias(evidence: Evidence) -> Found | None:
    eagle = evidence.eagle
    if eagle is None or eagle.decoder.qkv_bias or eagle.decoder.output_bias:
        return None
    keys = [key for key in ("bias", "attention_bias") if evidence.config.get(key) is True]
    if not keys or (keys == ["bias"] and eagle.token_entry != "fusion"):
        return None
    return Found(
        f"config {keys[0]} is true and the attention has no bias: vLLM and transformers would make one up",
        "serve the converted folder, whose config says what the tensors are",
    )


def _borrowed_head(evidence: Evidence) -> Found | None:
    eagle = evidence.eagle
    if eagle is None or eagle.token_entry != "attention" or eagle.lm_head != "target":
        return None
    return Found(
        "there is no lm_head.weight: vLLM uses the target's, SGLang leaves it random",
        "draftkit convert --to speculators stores a copy of the target's head",
    )


def _unused_rope_base(evidence: Evidence) -> Found | None:
    eagle, fact = evidence.eagle, evidence.facts.get("rope_theta")
    if eagle is None or (fact is not None and fact.origin == "overridden"):
        return None
    rope = eagle.decoder.rope
    if rope.declared_base is None or rope.declared_base == rope.base:
        return None
    return Found(
        f"the config says rope_theta {rope.declared_base:g}, and its trainer never read it: {rope.base:g} is used",
        f"--set rope_theta={rope.declared_base:g} if the draft was trained otherwise; the higher acceptance decides",
    )


def _doubtful_rope_base(evidence: Evidence) -> Found | None:
    eagle = evidence.eagle
    if eagle is None or evidence.format not in ("eagle3", "specforge") or eagle.decoder.rope.base == 10000.0:
        return None
    if eagle.decoder.rope.scaling is not None or evidence.facts["rope_theta"].origin == "overridden":
        return None
    return Found(
        f"rope_theta is {eagle.decoder.rope.base:g}; SafeAILab's trainer, and SpecForge before 2025-10-30, took 10000 "
        "whatever the config says",
        "--set rope_theta=10000 if the draft is of that age; the higher acceptance decides",
    )


def _double_norm(evidence: Evidence) -> Found | None:
    if evidence.format not in ("modelopt", "modelopt-megatron"):
        return None
    return Found(
        "ModelOpt since 2025-12-18 trains layer 0 with input_layernorm applied to the hidden state too, which no "
        "engine does: a draft of that age accepts less than in training",
        "none is exact; compare the acceptance with the one its author reports",
    )


def _head_count(evidence: Evidence) -> Found | None:
    medusa = evidence.spec.architecture
    said = evidence.config.get("medusa_num_heads")
    if not isinstance(medusa, MedusaSpec) or said in (None, medusa.num_heads):
        return None
    return Found(
        f"the config says {said} heads, the file has {medusa.num_heads}",
        f"serve with num_speculative_tokens {medusa.num_heads}; the converted config says it",
    )


def _norm_output(evidence: Evidence) -> Found | None:
    """SpecForge before its pull request 879 had another meaning for both values of `norm_output`."""
    said = evidence.config.get("norm_output")
    fact, value = ("feedback", "pre_norm") if said else ("final_norm", "false")
    if evidence.format != "specforge" or said is None or evidence.facts[fact].origin == "overridden":
        return None
    meant = "the next step gets the normed state" if said else "the head gets the normed state, the next step does not"
    then = "the next step got the state before the norm" if said else "the head got the state before the norm"
    return Found(
        f"norm_output is {str(said).lower()}: {meant}, as in every engine; in SpecForge before 2026-09-15 {then}",
        f"--set {fact}={value} if the draft is of that age; the higher acceptance decides",
    )


def _short_rope(evidence: Evidence) -> Found | None:
    eagle = evidence.eagle
    if (
        eagle is None
        or eagle.parallel is not None
        or evidence.target is None
        or (eagle.decoder.rope.scaling or {}).get("rope_type") in LENGTH_MATTERS
    ):
        return None
    mine, theirs = eagle.decoder.rope.max_position_embeddings, evidence.target.max_position_embeddings
    if theirs is None or mine >= theirs:
        return None
    return Found(
        f"max_position_embeddings is {mine}, the target's {theirs}: engines other than vLLM 0.32 stop or degrade there",
        f"--set max_position_embeddings={theirs}",
    )


def _short_draft(evidence: Evidence) -> Found | None:
    limit = evidence.spec.architecture.max_positions
    theirs = None if evidence.target is None else evidence.target.max_position_embeddings
    if limit is None or theirs is None or limit >= theirs:
        return None
    settable = (
        evidence.eagle is not None
        and (evidence.eagle.decoder.rope.scaling or {}).get("rope_type", "default") not in LENGTH_MATTERS
    )
    return Found(
        f"the draft ends at {limit:,} tokens, the target at {theirs:,}: vLLM drafts nothing for longer sequences, nor "
        "for those in a batch with one, and counts their rounds",
        f"--set max_position_embeddings={theirs}" if settable else "serve shorter text, or take another draft",
    )


def _residual_default(evidence: Evidence) -> Found | None:
    fact = evidence.facts.get("norm_before_residual")
    if not evidence.format.startswith("speculators") or fact is None or fact.origin != "format default":
        return None
    return Found(
        "norm_before_residual is not stated: the speculators library takes false, vLLM true",
        "--set norm_before_residual=true if the draft was measured with vLLM",
    )


LENGTH_MATTERS = ("dynamic", "yarn", "longrope")  # the length enters their formula, so raising it changes the draft
DEFECTS = (
    Defect("zero-d2t", "error", "vLLM, SGLang and SpecForge initialize d2t with zeros", _zero_map),
    Defect("layer-ids-as-outputs", "error", "vllm-project/vllm #43671", _outputs_as_states),
    Defect("layer-ids-as-states", "warning", "sgl-project/sglang #25454", _states_as_outputs),
    Defect("random-embedding", "warning", "lightseekorg/TorchSpec #38", _random_embedding),
    Defect("bias-as-attention-bias", "note", "vllm-project/vllm #9580", _bias_as_attention_bias),
    Defect("no-lm-head", "warning", "sgl-project/sglang #27829", _borrowed_head),
    Defect("unused-rope-base", "warning", "wejoncy/sfllm #32", _unused_rope_base),
    Defect("doubtful-rope-base", "warning", "sgl-project/SpecForge #265", _doubtful_rope_base),
    Defect("double-norm", "warning", "NVIDIA/Model-Optimizer commit bdd10c2db", _double_norm),
    Defect("medusa-head-count", "warning", "FasterDecoding/Medusa medusa_model.py", _head_count),
    Defect("norm-output", "warning", "sgl-project/SpecForge #879", _norm_output),
    Defect("short-rope", "note", "vllm-project/vllm #48894, sgl-project/sglang #10787", _short_rope),
    Defect("short-draft", "warning", "vLLM gpu_model_runner.py, _input_fits_in_drafter", _short_draft),
    Defect("unstated-residual", "warning", "vLLM transformers_utils/configs/speculators/algos.py", _residual_default),
)
