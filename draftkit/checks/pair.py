"""What is seen without running the draft: known defects, and whom and what it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from draftkit.checks.checkpoint import Finding, findings_of_draft
from draftkit.doctor.patient import Patient, target_ids
from draftkit.hub.locate import locate
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.target import TargetFacts, read_target_facts
from draftkit.models.chat import load_tokenizer
from draftkit.models.tokens import same_vocabulary

TARGET_KEYS = ("name_or_path", "base_model_name_or_path", "verifier_name_or_path")  # under which trainers name theirs


def known_defects(patient: Patient) -> list[Finding]:
    """Defects of the checkpoint by itself, and differences between draft, target and what it was trained for."""
    located = locate(patient.target_source, weights=False)
    facts = read_target_facts(located.path, located.name, located.revision)
    return [
        *findings_of_draft(patient.original, facts),
        *_lost_bias(patient),
        *_moved_layers(patient, facts),
        *_broken_map(patient),
        *_other_target(patient, located.name, located.revision),
        *_other_tokenizer(patient),
    ]


def _lost_bias(patient: Patient) -> Iterator[Finding]:
    """EAGLE-1's `bias` is about fc, and true where the config does not say it."""
    spec, provenance = patient.architecture, patient.original.provenance
    if not isinstance(spec, EagleSpec) or provenance.format != "eagle" or spec.fusion_bias:
        return
    if provenance.dropped_config.get("bias", True) is True:
        yield Finding(
            "lost-fc-bias",
            "warning",
            "the config means an fc.bias, and the checkpoint has none",
            "get the file that has it, and convert it again",
            "SafeAILab/EAGLE cnets1.py; vllm-project/vllm #22323",
        )


def _moved_layers(patient: Patient, target: TargetFacts) -> Iterator[Finding]:
    """The captured layers are the default ones, all moved by one: the two numberings differ by that."""
    spec = patient.architecture
    if not isinstance(spec, EagleSpec) or spec.aux_layer_ids is None:
        return
    default = target.default_aux_layer_ids()
    for by, numbering in ((-1, "outputs"), (1, "states, counted from one too many")):
        if spec.aux_layer_ids == tuple(i + by for i in default):
            yield Finding(
                "layer-ids",
                "warning",
                f"the captured layers {list(spec.aux_layer_ids)} are the default ones, {list(default)}, numbered as "
                f"{numbering}; where layers are alike, acceptance hardly shows it",
                "--set aux_layer_ids=" + ",".join(map(str, default)),
                "vllm-project/vllm #43671, sgl-project/sglang #25454",
            )


def _broken_map(patient: Patient) -> Iterator[Finding]:
    spec = patient.architecture
    if not isinstance(spec, EagleSpec) or not spec.reduced_vocabulary:
        return
    ids = target_ids(patient.original)
    outside = int(((ids < 0) | (ids >= spec.vocab_size)).sum())
    twice = len(ids) - len(ids.unique())
    if outside or twice:
        yield Finding(
            "broken-d2t",
            "error",
            f"d2t maps {outside} of {len(ids)} draft tokens outside the target's {spec.vocab_size} tokens, and {twice} "
            "to a token that another has",
            "write it as offsets, target id − draft id; it may hold ids",
            "formats: every EAGLE-3 trainer stores offsets, vLLM's token_map ids",
        )
    elif not torch.equal(ids, ids.sort().values):
        yield Finding(
            "unsorted-d2t",
            "warning",
            "d2t is not ascending, which every trainer writes it as",
            "fetch the checkpoint again, or make the map anew from the data",
            "formats: kept tokens are sorted",
        )


def _other_target(patient: Patient, name: str, revision: str | None) -> Iterator[Finding]:
    """The draft names another target than the one it is examined with."""
    provenance = patient.original.provenance
    trained = _stated_target(provenance.dropped_config)
    for other, what in ((trained, "trained for"), (provenance.target, "converted for")):
        if other is not None and other != name:
            yield Finding(
                "other-target",
                "note",
                f"the draft says that it was {what} {other}; this target is {name}",
                f"draftkit doctor --target {other}",
                "provenance",
            )
            return
    if None not in (revision, provenance.target_revision) and revision != provenance.target_revision:
        yield Finding(
            "other-revision",
            "note",
            f"the draft was made for revision {provenance.target_revision} of the target; this is {revision}",
            f"draftkit doctor --target {name}@{provenance.target_revision}",
            "provenance",
        )


def _stated_target(config: Mapping[str, object]) -> str | None:
    """The target that a trainer wrote into its config, at whatever depth."""
    for key, value in config.items():
        if key in TARGET_KEYS and isinstance(value, str):
            return value
        found = _stated_target(value) if isinstance(value, dict) else None
        if found is not None:
            return found
    return None


def _other_tokenizer(patient: Patient) -> Iterator[Finding]:
    """A causal LM has a tokenizer and a chat template of its own."""
    spec = patient.architecture
    if not isinstance(spec, CausalLMSpec) or not patient.original.files:
        return
    own, theirs = load_tokenizer(patient.original.path, "draft"), patient.tokenizer
    vocab_size = patient.model.config.get_text_config().vocab_size
    if spec.vocab_size != vocab_size or not same_vocabulary(theirs, own, vocab_size):
        yield Finding(
            "other-tokenizer",
            "warning",
            "draft and target have different tokenizers: it proposes only the tokens that both share",
            "transplant the target's vocabulary into the draft, or take a draft of the target's family",
            "arXiv 2502.05202",
        )
    if own.chat_template is not None and own.chat_template != theirs.chat_template:
        yield Finding(
            "other-template",
            "note",
            "draft and target have different chat templates; the target's is used",
            "train the draft on text in the target's template",
            "tokenizers of draft and target",
        )
