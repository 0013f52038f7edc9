"""Known defects of published drafts: how each is recognized, what mends it, and where it is documented.

Converters and engines pass all of these without a word; the draft then accepts fewer tokens. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import check, check_unless, findings
from draftkit.checks.tensors import looks_random
from draftkit.convert.api import Reading
from draftkit.convert.formats.vocabulary_map import mapped_tokens, problem_of_map
from draftkit.convert.operations import carry_out, integers
from draftkit.engines.known import known
from draftkit.engines.speculators import KIND, LAYER_CONFIG
from draftkit.finding import Finding
from draftkit.io.handles import TensorHandle
from draftkit.layout.architecture import Architecture
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts
from draftkit.runtime.drafters import refusal_to_run

Config = Mapping[str, object]
SpecFacts = Mapping[str, object]
Origins = Mapping[str, FactOrigin]
Tensors = Mapping[str, TensorHandle]

# By format: what the code that such files are made for does with a window within a block, where vLLM counts otherwise.
OTHER_WINDOWS = {
    "dflash": "z-lab's code of April 2026 lets rows of such layers see their whole block, or the window to both sides "
    "where attention knows windows; their newer code is as vLLM",
    "gguf-dflash": "llama.cpp lets a row see all later ones of its block where the layer is not causal",
    "speculators-dflash": "the library gives all rows the window of the first, and bounds none within the block",
    "transformers-dflash": "transformers lets a row see one token more to each side",
}


def findings_of_reading(reading: Reading) -> list[Finding]:
    """The defects of a foreign checkpoint; before its facts are complete, only what contradicts itself can be told."""
    plan, checkpoint = reading.plan, reading.checkpoint
    if plan.spec is None:
        return findings(Evidence(contradictions=plan.problems), "checkpoint")
    evidence = Evidence(
        contradictions=plan.problems,
        format=plan.format,
        config=checkpoint.config,
        spec=plan.spec,
        origins={fact.name: fact for fact in plan.facts},
        tensors=carry_out(plan.moves, checkpoint.tensors),
        target=reading.target,
    )
    return findings(evidence, "checkpoint", "served", *(["gguf"] if checkpoint.gguf_architecture else []))


def findings_of_draft(draft: Draft, target: TargetFacts | None = None) -> list[Finding]:
    """The defects of a unified draft."""
    return findings(Evidence.of_draft(draft, target=target), "checkpoint", "served")


@check
def contradiction(contradictions: Sequence[Finding]) -> Sequence[Finding]:
    """Contradictions within a checkpoint, as reading it has found them."""
    return contradictions


@check
def merged_adapter(origins: Origins) -> Iterator[Finding]:
    """An adapter of peft, which may be a target's own."""
    if (base := origins.get("base_model")) is not None:
        yield Finding(
            "merged-adapter",
            "note",
            f"the adapter is merged into its base model, {base.value}: if that is the target, the merged model is "
            "a target too, and not its draft",
            fix="pass the result with --target if the adapter is the target's",
            source="draftkit",
        )


@check
def not_run(spec: DraftSpec) -> Iterator[Finding]:
    """A draft of a kind that draftkit holds and converts, and has no drafter for."""
    if reason := refusal_to_run(spec):
        yield Finding("not-run", "note", reason, source="draftkit")


@check
def other_sizes(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """A draft that reads states, or proposes tokens, of other sizes than this target's. A language model of its own
    reads none, and may share some of its tokens."""
    if (read := getattr(spec.architecture, "target_hidden_size", None)) is None:
        return
    sizes = (("hidden states", read, target.hidden_size), ("tokens", spec.architecture.vocab_size, target.vocab_size))
    for what, mine, theirs in sizes:
        if mine != theirs:
            yield Finding(
                "other-sizes",
                "error",
                f"the draft is for a target with {mine} {what}; {target.name} has {theirs}",
                cost="nothing runs it beside this target",
                fix="pass the target that the draft was trained for with --target",
                source="draftkit",
            )
            return


@check_unless("d2t", "gguf-d2t-offsets")
def zero_d2t(tensors: Tensors) -> Iterator[Finding]:
    if "d2t" in tensors and not any(integers(tensors["d2t"])):
        yield Finding(
            "zero-d2t",
            "error",
            "d2t is all zero over a reduced vocabulary: draft id i means target id i, as if the map was never set",
            fix="get the file with the map that the draft was trained with",
            source="vLLM, SGLang and SpecForge initialize d2t with zeros",
        )


@check_unless("d2t", "gguf-d2t-offsets")
def vocabulary_map(architecture: Architecture, tensors: Tensors) -> Iterator[Finding]:
    yield from problems_of_map(tensors, architecture.vocab_size)


def problems_of_map(tensors: Tensors, vocab_size: int) -> Iterator[Finding]:
    """Where d2t does not lead every draft token to another one of the target's, in ascending order."""
    if "d2t" not in tensors:
        return
    ids = mapped_tokens(tensors["d2t"])
    if problem := problem_of_map(ids, vocab_size):
        yield Finding(
            "broken-d2t",
            "error",
            problem,
            where="tensor d2t",
            cost="proposals are other tokens than the draft means: acceptance falls to nothing without an error",
            fix="write it as offsets, target id − draft id; it may hold ids. Else fetch the draft again, or make the "
            "map anew from the data",
            source="formats: every EAGLE-3 trainer stores offsets, vLLM's token_map ids",
        )
    elif ids != sorted(ids):
        yield Finding(
            "unsorted-d2t",
            "warning",
            "d2t is not ascending, which every trainer writes it as",
            where="tensor d2t",
            cost="if the order is wrong, proposals are other tokens than the draft means",
            fix="fetch the checkpoint again, or make the map anew from the data",
            source="formats: kept tokens are sorted",
        )


@check
def layer_ids_as_outputs(facts: SpecFacts, origins: Origins, target: TargetFacts) -> Iterator[Finding]:
    """Top-level ids, which number states, that are the default captured layers numbered as outputs."""
    default = target.default_aux_layer_ids()
    if _stated_ids(facts, origins, nested=False) == [i - 1 for i in default]:
        yield Finding(
            "layer-ids-as-outputs",
            "error",
            f"eagle_aux_hidden_state_layer_ids {[i - 1 for i in default]} are the default layers numbered as outputs, "
            "and engines read this key as states: one layer early",
            fix="--set aux_layer_ids=" + ",".join(map(str, default)),
            source="vllm-project/vllm #43671",
        )


@check
def layer_ids_as_states(facts: SpecFacts, origins: Origins, target: TargetFacts) -> Iterator[Finding]:
    """Nested ids, which number outputs, that are the default layers numbered as states."""
    default = target.default_aux_layer_ids()
    if _stated_ids(facts, origins, nested=True) == [i + 1 for i in default]:
        yield Finding(
            "layer-ids-as-states",
            "warning",
            f"eagle_config names layers {list(default)}, the default as states, where its authors number outputs",
            fix="--set aux_layer_ids=" + ",".join(map(str, default)),
            source="sgl-project/sglang #25454",
        )


def _stated_ids(facts: SpecFacts, origins: Origins, *, nested: bool) -> object:
    """The captured layers where a config key of this kind states them: one inside `eagle_config`, or at the top."""
    origin = origins.get("aux_layer_ids")
    stated = origin is not None and origin.origin == "stated" and origin.key.startswith("eagle_config.") is nested
    return facts.get("aux_layer_ids") if stated else None


@check
def random_embedding(tensors: Tensors) -> Iterator[Finding]:
    if "embed_tokens.weight" in tensors and looks_random(tensors["embed_tokens.weight"]):
        yield Finding(
            "random-embedding",
            "warning",
            "embed_tokens.weight looks like an initialization, not like a trained table; vLLM prefers it to the "
            "target's",
            fix="remove the tensor from the file if the draft was trained with the target's table",
            source="lightseekorg/TorchSpec #38",
        )


@check
def bias_as_attention_bias(config: Config, facts: SpecFacts) -> Iterator[Finding]:
    if facts.get("qkv_bias") is not False or facts.get("output_bias"):
        return
    said = [key for key in ("bias", "attention_bias") if config.get(key) is True]
    if said and (said != ["bias"] or facts.get("token_entry") == "fusion"):
        yield Finding(
            "bias-as-attention-bias",
            "note",
            f"config {said[0]} is true and the attention has no bias: vLLM and transformers would add one",
            fix="serve the converted folder, whose config says what the tensors are",
            source="vllm-project/vllm #9580",
        )


@check
def no_lm_head(facts: SpecFacts) -> Iterator[Finding]:
    if facts.get("token_entry") == "attention" and facts.get("lm_head") == "target":
        yield Finding(
            "no-lm-head",
            "warning",
            "there is no lm_head.weight: vLLM uses the target's, SGLang leaves it random",
            fix="draftkit convert --to speculators stores a copy of the target's head",
            source="sgl-project/sglang #27829",
        )


@check
def unused_rope_base(architecture: Architecture, origins: Origins) -> Iterator[Finding]:
    rope = architecture.rope
    if rope is None or rope.declared_base in (None, rope.base) or _overridden(origins, "rope_theta"):
        return
    yield Finding(
        "unused-rope-base",
        "warning",
        f"the config says rope_theta {rope.declared_base:g}, and its trainer never read it: {rope.base:g} is used",
        fix=f"--set rope_theta={rope.declared_base:g} if the draft was trained otherwise; the higher acceptance "
        "decides",
        source="wejoncy/sfllm #32",
    )


@check
def doubtful_rope_base(format: str, architecture: Architecture, origins: Origins) -> Iterator[Finding]:
    rope = architecture.rope
    if rope is None or format not in ("eagle3", "specforge") or rope.base == 10000.0 or rope.scaling is not None:
        return
    if not _overridden(origins, "rope_theta"):
        yield Finding(
            "doubtful-rope-base",
            "warning",
            f"rope_theta is {rope.base:g}; SafeAILab's trainer, and SpecForge before 2025-10-30, took 10000 whatever "
            "the config says",
            fix="--set rope_theta=10000 if the draft is of that age; the higher acceptance decides",
            source="sgl-project/SpecForge #265",
        )


@check
def double_norm(format: str) -> Iterator[Finding]:
    if format in ("modelopt", "modelopt-megatron"):
        yield Finding(
            "double-norm",
            "warning",
            "ModelOpt since 2025-12-18 trains layer 0 with input_layernorm applied to the hidden state too, which no "
            "engine does: a draft of that age accepts less than in training",
            fix="none is exact; compare the acceptance with the one its author reports",
            source="NVIDIA/Model-Optimizer commit bdd10c2db",
        )


@check
def norm_output(format: str, config: Config, origins: Origins) -> Iterator[Finding]:
    """SpecForge before its pull request 879 had another meaning for both values of `norm_output`."""
    said = config.get("norm_output")
    fact, value = ("feedback", "pre_norm") if said else ("final_norm", "false")
    if format != "specforge" or said is None or _overridden(origins, fact):
        return
    meant = "the next step gets the normed state" if said else "the head gets the normed state, the next step does not"
    then = "the next step got the state before the norm" if said else "the head got the state before the norm"
    yield Finding(
        "norm-output",
        "warning",
        f"norm_output is {str(said).lower()}: {meant}, as in every engine; in SpecForge before 2026-09-15 {then}",
        fix=f"--set {fact}={value} if the draft is of that age; the higher acceptance decides",
        source="sgl-project/SpecForge #879",
    )


@check
def unstated_residual(format: str, origins: Origins) -> Iterator[Finding]:
    origin = origins.get("norm_before_residual")
    if format.startswith("speculators") and origin is not None and origin.origin == "format default":
        yield Finding(
            "unstated-residual",
            "warning",
            "norm_before_residual is not stated: the speculators library takes false, vLLM true",
            fix="--set norm_before_residual=true if the draft was measured with vLLM",
            source="vLLM transformers_utils/configs/speculators/algos.py",
        )


@check
def causality_in_vllm(config: Config, architecture: Architecture, facts: SpecFacts) -> Iterator[Finding]:
    """A block drafter of the speculators library whose layers vLLM makes causal otherwise than they were trained."""
    kind, inner = config.get(KIND), config.get(LAYER_CONFIG)
    if kind not in ("dflash", "dflash2", "dspark") or not isinstance(inner, Mapping):
        return
    layers, trained = [*range(len(architecture.windows))], facts.get("causal_layers")
    said, own = config.get("sliding_window_non_causal"), inner.get("is_causal")
    served = layers if said is False else []
    if kind == "dspark":
        served = [layer for layer in layers if architecture.windows[layer] is not None]
    if own is not None:
        served = layers if own else []
    if served != trained:
        stated = "is missing" if said is None else f"is {str(said).lower()}"
        mends = not trained and kind != "dspark"
        yield Finding(
            "causality-in-vllm",
            "warning",
            f"sliding_window_non_causal {stated}: causal within the block are layers {served or 'none'} in vLLM, "
            f"and {trained or 'none'} in training",
            cost="vLLM drafts other tokens than the draft was trained to",
            fix="serve the folder that draftkit convert writes, whose config says it as vLLM reads it"
            + ("; or write sliding_window_non_causal true into this one's" if mends else ""),
            source="vLLM transformers_utils/configs/speculators/algos.py; "
            + known()["vLLM"][0].capabilities["causal-windows-alone"].thread,
        )


@check
def narrow_window(format: str, architecture: Architecture, facts: SpecFacts, origins: Origins) -> Iterator[Finding]:
    """A window that ends within the block, where engines and trainers differ in how they count it."""
    block, narrow = facts.get("block_size"), min((window for window in architecture.windows if window), default=None)
    if not isinstance(block, int) or narrow is None or narrow >= block or format not in OTHER_WINDOWS:
        return
    if not _overridden(origins, "window_rule"):
        yield Finding(
            "narrow-window",
            "warning",
            f"a window of {narrow} tokens ends within the block of {block} rows: vLLM counts it from each row, to "
            f"both sides where the layer is not causal, and {OTHER_WINDOWS[format]}",
            cost="rows may see other tokens than in training. Published windows, of 2,048 tokens and more beside "
            "blocks of at most 16, reach across the block whoever counts",
            fix="draftkit doctor measures what else they may have seen; draftkit train --draft goes on as vLLM counts",
            source="vLLM v1/attention/backends/flash_attn.py, _maybe_symmetrize_window",
        )


def _overridden(origins: Origins, fact: str) -> bool:
    return fact in origins and origins[fact].origin == "overridden"
