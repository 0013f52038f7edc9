"""Defects of drafts in GGUF, which llama.cpp loads and runs without a word: fewer drafts then stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from draftkit.checks.registry import check
from draftkit.convert.gguf_layers import DEFAULT
from draftkit.engines.llama_cpp import last_state_of, refusal_of_target
from draftkit.finding import Finding
from draftkit.layout.provenance import FactOrigin
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import TargetFacts

SOURCE = "llama.cpp b11434"


@check
def default_taken(origins: Mapping[str, FactOrigin]) -> Iterator[Finding]:
    """Keys that the file lacks."""
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
            cost="its part of what fc reads is noise: fewer drafts stand",
            fix="serve the draft with vLLM, or train one that reads earlier layers",
            source=SOURCE,
        )


@check
def unsupported_target(spec: DraftSpec, target: TargetFacts) -> Iterator[Finding]:
    if problem := refusal_of_target(spec, target):
        fix = "serve this target with another engine, or a standalone draft"
        yield Finding("gguf-unsupported-target", "error", problem, fix=fix, source=SOURCE)
