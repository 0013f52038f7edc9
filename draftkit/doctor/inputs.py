"""Trials of inputs: the target's features, positions, masks, precision, and the text itself."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftkit.doctor.patient import Patient, Setup, changed
from draftkit.doctor.trial import Trial, with_eagle_facts, with_facts, with_tensors
from draftkit.doctor.wrappers import ShiftedFeedback, ShiftedMasks, TargetWithFeatures
from draftkit.layout.architecture import ParallelDrafting
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.models.chat import load_tokenizer, render, token_ids
from draftkit.models.target import AuxLayers, Target
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.eagle_parallel import PEagleDrafter
from draftkit.runtime.memory import available_memory

OTHER_FEATURES = "the draft was trained on other states than it is served: ask its author which ones, or train it anew"


def normed_features(patient: Patient) -> Iterator[Trial]:
    """Features after the target's final norm where the draft gets them before it, and the reverse."""
    spec = patient.architecture
    if isinstance(spec, EagleSpec) and spec.aux_layer_ids is not None:
        norm = getattr(patient.model.get_decoder(), "norm", None)
        if isinstance(norm, torch.nn.Module):
            yield Trial("features after the final norm", lambda: _normed(patient, norm), {}, OTHER_FEATURES)
    elif isinstance(spec, EagleSpec) and spec.token_entry == "fusion":
        yield with_eagle_facts(patient, aux_layer_ids=(patient.num_layers,))
    else:
        last = AuxLayers((patient.num_layers,))
        yield Trial(
            "features before the final norm",
            lambda: patient.setup()._replace(target=Target(patient.model, last)),
            {},
            OTHER_FEATURES,
        )


def _normed(patient: Patient, norm: torch.nn.Module) -> Setup:
    setup = patient.setup()
    size = setup.target.hidden_size

    def change(features: Tensor) -> Tensor:
        return torch.cat([norm(state) for state in features.split(size, dim=-1)], dim=-1)

    return setup._replace(target=TargetWithFeatures(patient.model, setup.drafter.aux_layers, change))


def positions(patient: Patient) -> Iterator[Trial]:
    """The rows that the draft adds itself, one position later or earlier. All rows alike would change nothing."""
    for by in (1, -1):
        yield Trial(
            f"own rows {by:+} position",
            partial(_shifted, patient, by),
            {},
            "the draft was trained with other positions than engines give its own rows: it has to be trained anew",
        )


def _shifted(patient: Patient, by: int) -> Setup:
    setup = patient.setup()
    drafter = setup.drafter
    assert isinstance(drafter, EagleDrafter)
    shifted = ShiftedMasks(drafter, by) if isinstance(drafter, PEagleDrafter) else ShiftedFeedback(drafter, by)
    return setup._replace(drafter=shifted)


def mask_token(patient: Patient) -> Iterator[Trial]:
    """The other special tokens of the target's tokenizer, which is where unused ones are."""
    spec = patient.architecture
    assert isinstance(spec, (EagleSpec, CausalLMSpec))
    if spec.parallel is None:
        return
    for token in sorted(patient.tokenizer.added_tokens_decoder):
        if token != spec.parallel.mask_token_id and token < spec.vocab_size:
            yield _with_mask_token(patient, spec, spec.parallel, token)


def _with_mask_token(patient: Patient, spec: EagleSpec | CausalLMSpec, parallel: ParallelDrafting, token: int) -> Trial:
    other = replace(parallel, mask_token_id=token)
    architecture: Any = replace(spec, parallel=other)
    return with_facts(patient, architecture, mask_token_id=token)


def mask_state(patient: Patient) -> Iterator[Trial]:
    """The hidden input of mask rows: zeros, and the embedding of the mask token, instead of the learned state."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    if spec.parallel is None:
        return
    token, copies = spec.parallel.mask_token_id, spec.feature_size // spec.target_hidden_size
    advice = "mask_hidden is not the trained state: fetch the checkpoint again"
    yield with_tensors(
        patient,
        "mask state of zeros",
        lambda: {"mask_hidden": torch.zeros(1, 1, spec.feature_size)},
        advice,
    )
    yield with_tensors(
        patient,
        "the mask token's embedding as mask state",
        lambda: {"mask_hidden": patient.table("embed_tokens")[token].repeat(copies)[None, None]},
        advice,
    )


def target_features(patient: Patient) -> Iterator[Trial]:
    """PARD-2 without the target's states."""
    spec = patient.architecture
    assert isinstance(spec, CausalLMSpec)
    if spec.target_features is not None:
        yield Trial(
            "without the target's states",
            lambda: patient.setup(changed(patient.draft, replace(spec, target_features=None))),
            {},
            "target_proj does harm: the layers that it reads are not those that it was trained with",
        )


def template(patient: Patient) -> Iterator[Trial]:
    """Prompts without a chat template, and with the draft's own where it has another."""
    own = load_tokenizer(patient.draft.path, "draft") if patient.draft.files else None
    if patient.tokenizer.chat_template is not None:
        plain = [tuple(token_ids(patient.tokenizer, prompt.text)) for prompt in patient.prompts]
        yield _with_prompts(patient, "prompts without chat template", plain)
    if own is not None and own.chat_template not in (None, patient.tokenizer.chat_template):
        rendered = [_rendered(patient, prompt.text, str(own.chat_template)) for prompt in patient.prompts]
        yield _with_prompts(patient, "prompts in the draft's chat template", rendered)


def _rendered(patient: Patient, text: str, chat_template: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": text}]
    rendered = render(patient.tokenizer, messages, chat_template=chat_template, add_generation_prompt=True)
    return tuple(token_ids(patient.tokenizer, rendered, special=False))


def _with_prompts(patient: Patient, change: str, prompts: list[tuple[int, ...]]) -> Trial:
    requests = [replace(r, prompt=ids) for r, ids in zip(patient.requests, prompts, strict=True)]
    return Trial(
        change,
        lambda: patient.setup()._replace(requests=requests),
        {},
        "the draft was trained on text of this form: send prompts in it, or train it on the target's chat template",
        own_text=True,
    )


def precision(patient: Patient) -> Iterator[Trial]:
    """A copy of draft and target in another dtype."""
    model = patient.model
    other = torch.float32 if model.dtype == torch.bfloat16 else torch.bfloat16
    needed = sum(p.numel() for p in model.parameters()) * (model.dtype.itemsize + other.itemsize)
    if needed < available_memory(model.device):
        name = str(other).removeprefix("torch.")
        yield Trial(
            f"draft and target in {name}",
            lambda: _converted(patient, other),
            {},
            f"serve draft and target in {name}: --dtype {name}",
            own_text=True,
        )


def _converted(patient: Patient, dtype: torch.dtype) -> Setup:
    model = deepcopy(patient.model)
    for parameter in model.parameters():  # not the buffers: rope keeps its frequencies in float32
        parameter.data = parameter.data.to(dtype)
    return replace(patient, model=model).setup()
