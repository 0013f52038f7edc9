"""Defects of drafts in GGUF, which llama.cpp loads and runs without a warning, and of which it then accepts fewer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from draftkit.checks.registry import check
from draftkit.convert.formats.gguf import causal_lm_gguf, dflash_gguf, mtp_gguf
from draftkit.convert.formats.gguf.layers import DEFAULT, TABLE_IS_HEAD
from draftkit.engines.llama_cpp import differences_of_heads, last_state_of, refusal_of_target
from draftkit.engines.llama_cpp.releases import PRESENT
from draftkit.finding import Finding
from draftkit.io.handles import TensorHandle
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

SOURCE = str(PRESENT)
VOCABULARY_SLACK = (
    128  # tokens by which sizes may differ (`SPEC_VOCAB_MAX_SIZE_DIFFERENCE` of `common/speculative.cpp`)
)


@check
def default_taken(origins: Mapping[str, FactOrigin]) -> Iterator[Finding]:
    """Keys that the file lacks, so that llama.cpp's defaults hold."""
    taken = [f"{fact.name} {fact.value}" for fact in origins.values() if fact.note == DEFAULT]
    if taken:
        yield Finding(
            "gguf-default-taken",
            "warning",
            f"the file does not state {', '.join(taken)}: these are llama.cpp's defaults, for any model",
            fix="convert the checkpoint that the file was made from again, which states every key",
            source=SOURCE,
        )


@check
def last_state(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    ids = spec.architecture.aux_layer_ids
    problem = None if ids is None else last_state_of(target, ids)
    if problem is not None:
        yield Finding(
            "gguf-last-state",
            "error",
            problem,
            cost="its part of what fc reads is noise: fewer draft tokens are accepted",
            fix="serve the draft with vLLM, or train one that reads earlier layers",
            source=SOURCE,
        )


@check
def late_layers(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """The default layers, each one too high; one too low is `layer-ids-as-outputs`."""
    architecture = spec.architecture
    for default in architecture.usual_layers(target.num_hidden_layers):
        if architecture.aux_layer_ids == tuple(layer + 1 for layer in default):
            yield Finding(
                "layer-ids",
                "warning",
                f"target_layers {list(architecture.aux_layer_ids)} are the default ones, {list(default)}, each one too "
                "high: as states, they were taken for outputs of layers",
                cost="slightly fewer draft tokens are accepted, which only counts for each request show",
                fix="--set aux_layer_ids=" + ",".join(map(str, default)),
                source=SOURCE,
            )


@check
def mask_is_text(origins: Mapping[str, FactOrigin]) -> Iterator[Finding]:
    mask = origins.get("mask_token_id")
    if mask is not None and mask.note == dflash_gguf.TEXT_AS_MASK:
        yield Finding(
            "gguf-mask-is-text",
            "warning",
            f"the mask token {mask.value} is one of ordinary text",
            cost="where the draft was trained with another, fewer draft tokens are accepted",
            fix="convert the checkpoint that the file was made from again, which states the token it was trained with",
            source=SOURCE,
        )


@check
def unsupported_target(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    if problem := refusal_of_target(spec, target):
        fix = "serve this target with another engine, or a standalone draft"
        yield Finding("gguf-unsupported-target", "error", problem, fix=fix, source=SOURCE)


@check
def head_states(format: str, facts: Mapping[str, object], origins: Mapping[str, FactOrigin]) -> Iterator[Finding]:
    """Multi-token prediction heads, which read other states than in vLLM."""
    if format != mtp_gguf.NAME:
        return
    first, *others = differences_of_heads(str(facts["feedback"]), str(origins["config"].value))
    yield Finding(
        "gguf-head-states",
        "warning" if others else "note",
        f"llama.cpp {'; and it '.join((first, *others))}",
        cost="drafts differ from vLLM's; the output stays the target's",
        fix="measure the heads where they are to serve: draftkit eval --engine llama.cpp",
        source=SOURCE,
    )


@check
def head_copies(origins: Mapping[str, FactOrigin]) -> Iterator[Finding]:
    if copies := origins.get(mtp_gguf.COPIES):
        yield Finding(
            "gguf-head-copies",
            "warning",
            f"the heads have {copies.value}, which llama.cpp reads instead of the target's own",
            cost="where the target was fine-tuned since, drafts are those of an old table; vLLM reads the target's",
            fix="draftkit convert it and --to gguf again, which leaves them out",
            source=SOURCE,
        )


@check
def table_as_head(origins: Mapping[str, FactOrigin], target: TargetFacts) -> Iterator[Finding]:
    """A block drafter with a table and no output layer."""
    head = origins.get("lm_head")
    if head is not None and head.note == TABLE_IS_HEAD and not target.tied:
        yield Finding(
            "gguf-table-as-head",
            "error",
            "the file has token_embd and no output: llama.cpp drafts with the table as output layer, and the target "
            "has an output layer of its own",
            cost="drafts are other tokens than the draft means",
            fix="convert the checkpoint that the file was made from again, which writes both",
            source=f"{SOURCE}, `src/models/dflash.cpp`; its converter drops the output layer of DSpark drafts",
        )


@check
def pattern_alone(origins: Mapping[str, FactOrigin]) -> Iterator[Finding]:
    window = origins.get("sliding_window")
    if window is not None and window.note == dflash_gguf.PATTERN_ALONE:
        yield Finding(
            "gguf-pattern-without-window",
            "warning",
            f"{dflash_gguf.PATTERN_ALONE}: llama.cpp attends to everything in these layers",
            cost="fewer draft tokens are accepted in texts that are longer than the window",
            fix="convert the checkpoint that the file was made from again",
            source=SOURCE,
        )


@check
def norm_of_ones(tensors: Mapping[str, TensorHandle]) -> Iterator[Finding]:
    """The norm before fc, as it is initialized."""
    norm = tensors.get("input_norm.weight")
    if norm is not None and bool((norm.load() == 1).all()):
        yield Finding(
            "gguf-norm-of-ones",
            "warning",
            "the norm before fc, enc.output_norm, is all ones, as one that was never trained",
            where="tensor enc.output_norm.weight",
            cost="if the draft has no such norm, half of the accepted tokens are lost",
            fix="convert the checkpoint that the file was made from again; norm_before_fc says whether there is one",
            source=SOURCE,
        )


@check
def other_vocabulary(format: str, spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    """A standalone draft that the server loads and does not use."""
    apart = abs(spec.architecture.vocab_size - target.vocab_size)
    if format == causal_lm_gguf.NAME and apart > VOCABULARY_SLACK:
        yield Finding(
            "gguf-other-vocabulary",
            "error",
            f"the draft has {spec.architecture.vocab_size} tokens, and the target {target.vocab_size}",
            cost="the server logs it and goes on without drafting",
            fix="use a draft of the target's own family; vLLM drafts with other vocabularies",
            source=SOURCE,
        )
