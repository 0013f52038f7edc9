"""Trials of facts: what a draft's config says, or leaves to be guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from draftkit.doctor.patient import Patient, Setup
from draftkit.doctor.trial import Trial, with_eagle_facts, with_facts
from draftkit.layout.decoder import Rope
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.models.rope import give_rows_their_rope, target_rope
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter

BASES = (10_000.0, 500_000.0, 1_000_000.0)  # what trainers take without asking; of Llama 3; of Qwen
OTHER_NORM = "the checkpoint and the code that trained it disagree about this norm: ask its author which was trained"


def rope_base(patient: Patient) -> Iterator[Trial]:
    spec = patient.architecture
    theirs, _ = target_rope(patient.model.config)
    if isinstance(spec, EagleSpec):
        rope = spec.decoder.rope
        for base in _others(rope.base, *BASES, rope.declared_base, theirs):
            yield _with_rope(patient, replace(rope, base=base), rope_theta=base)
    elif isinstance(spec, CausalLMSpec):
        own = _config_base(spec)
        for base in _others(own, *BASES, theirs) if own is not None else ():
            yield Trial(
                f"rope_theta={base:g}",
                partial(_rotated_otherwise, patient, base),
                {"rope_theta": f"{base:g}"},
                "",
            )


def _others(own: float, *candidates: float | None) -> list[float]:
    return [base for base in dict.fromkeys(candidates) if base is not None and base != own]


def _config_base(spec: CausalLMSpec) -> float | None:
    """The base of a causal LM with one kind of rotary positions."""
    parameters = spec.config.get("rope_parameters")
    base = parameters.get("rope_theta") if isinstance(parameters, dict) else spec.config.get("rope_theta")
    return float(base) if isinstance(base, (int, float)) else None


def _rotated_otherwise(patient: Patient, base: float) -> Setup:
    setup = patient.setup()
    assert isinstance(setup.drafter, CausalLMDrafter)
    decoder: Any = setup.drafter.model.decoder  # every decoder of transformers that rotates keeps it under this name
    config = setup.drafter.model.model.config.get_text_config()
    config.rope_parameters["rope_theta"] = base
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(patient.model.device)
    give_rows_their_rope(decoder)
    return setup


def rope_scaling(patient: Patient) -> Iterator[Trial]:
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    rope = spec.decoder.rope
    for scaling in (target_rope(patient.model.config)[1], None):
        if scaling != rope.scaling:
            yield _with_rope(patient, replace(rope, scaling=scaling), rope_scaling=scaling)


def _with_rope(patient: Patient, rope: Rope, **overrides: Any) -> Trial:
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    return with_facts(patient, replace(spec, decoder=replace(spec.decoder, rope=rope)), "", **overrides)


def layer_ids(patient: Patient) -> Iterator[Trial]:
    """The ids as numbers of outputs (one more), as states misread as outputs (one less), and the default ones."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    ids, n = spec.aux_layer_ids, patient.num_layers
    if ids is None:
        return
    default = (2, n // 2, n - 3)
    candidates = dict.fromkeys([tuple(i + 1 for i in ids), tuple(i - 1 for i in ids), default])
    for other in candidates:
        ascending = list(other) == sorted(set(other)) and other[0] >= 0 and other[-1] <= n
        if other != ids and len(other) == len(ids) and ascending:
            yield with_eagle_facts(patient, aux_layer_ids=other)


def norm_before_residual(patient: Patient) -> Iterator[Trial]:
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    if spec.input_norm if spec.token_entry == "fusion" else spec.hidden_norm:
        yield with_eagle_facts(patient, norm_before_residual=not spec.norm_before_residual)


def feedback(patient: Patient) -> Iterator[Trial]:
    """`norm_output`: the next step gets the state before or after the final norm."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    if spec.final_norm and spec.parallel is None:
        yield with_eagle_facts(patient, feedback="pre_norm" if spec.feedback == "post_norm" else "post_norm")


def concatenation(patient: Patient) -> Iterator[Trial]:
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    other = "hidden_embedding" if spec.concatenation == "embedding_hidden" else "embedding_hidden"
    yield with_eagle_facts(patient, concatenation=other)


def norms(patient: Patient) -> Iterator[Trial]:
    """Each norm left out, or put in with weights of one."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    names = ["embedding_norm", "hidden_norm", "final_norm", *(["input_norm"] if spec.token_entry == "fusion" else [])]
    for name in names:
        yield with_eagle_facts(patient, OTHER_NORM, **{name: not getattr(spec, name)})
    if spec.feature_norm != "none":
        yield with_eagle_facts(patient, OTHER_NORM, feature_norm="none")


def scale_input(patient: Patient) -> Iterator[Trial]:
    spec = patient.architecture
    assert isinstance(spec, MlpSpeculatorSpec)
    yield with_facts(patient, replace(spec, scale_input=not spec.scale_input), scale_input=not spec.scale_input)
