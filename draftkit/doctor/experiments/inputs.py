"""Trials of inputs: the target's features, masks, precision, and the text itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.doctor.patient import Patient, Setup, changed
from draftkit.doctor.trial import Trial, experiment, with_facts, with_tensors
from draftkit.evaluate.prompts import encode_prompt
from draftkit.layout.facts import with_facts as other_facts
from draftkit.targets.chat import load_tokenizer, render, token_ids
from draftkit.targets.device_map import available_memory
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target, TargetOutput

MASK_NAMES = ("mask", "reserved", "unused")  # in a special token, the likeliest first
OTHER_TEXT = "the draft was trained on text of this form: send prompts in it, or train it on the target's chat template"
OTHER_THINKING = "the draft was trained on answers with thinking {}: measure and serve it so, or train it on both"
OTHER_FEATURES = "the draft was trained on other states than it is served: ask its author which ones, or train it anew"


class TargetWithFeatures(Target):
    """A target whose features [B, T, F] are changed before the drafter sees them."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None, change: Callable[[Tensor], Tensor]):
        super().__init__(model, aux_layers)
        self.change = change

    def forward(self, *args: Any, **others: Any) -> TargetOutput:
        output = super().forward(*args, **others)
        assert output.features is not None
        return output._replace(features=self.change(output.features))


@experiment("normed-features", "the target's states")
def normed_features(patient: Patient) -> Iterator[Trial]:
    """Features after the target's final norm where the draft gets them before it, and the reverse."""
    facts = patient.facts
    if patient.architecture.aux_layer_ids is not None:
        norm = getattr(patient.model.get_decoder(), "norm", None)
        if isinstance(norm, torch.nn.Module):
            yield Trial("features after the final norm", lambda: _normed(patient, norm), {}, OTHER_FEATURES)
    elif facts.get("token_entry") == "fusion":
        yield with_facts(patient, aux_layer_ids=(patient.num_layers,))
    elif "target_hidden_size" in facts and "hidden_state" not in facts:
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


@experiment("mask-token", "a mask token")
def mask_token(patient: Patient) -> Iterator[Trial]:
    """The other special tokens of the target's tokenizer, which is where unused ones are, and the first row of the
    target's table that no token has: a trainer that adds a mask token gets that. Likely ones first: those called so,
    and those that are kept for what somebody adds."""
    parallel, vocab_size = patient.architecture.parallel, patient.architecture.vocab_size
    special = {token: str(added) for token, added in sorted(patient.tokenizer.added_tokens_decoder.items())}
    named = [[token for token, text in special.items() if word in text.lower()] for word in MASK_NAMES]
    candidates = dict.fromkeys((*chain.from_iterable(named), len(patient.tokenizer), *special))
    for token in candidates if parallel is not None else ():
        if token != patient.facts["mask_token_id"] and token < vocab_size:
            yield with_facts(patient, mask_token_id=token)


@experiment("mask-state", "a mask state")
def mask_state(patient: Patient) -> Iterator[Trial]:
    """The hidden input of mask rows: zeros, and the embedding of the mask token, instead of the learned state."""
    parallel, learned = patient.architecture.parallel, patient.draft.tensors.get("mask_hidden")
    if parallel is None or learned is None:
        return
    size, advice = learned.shape[-1], "mask_hidden is not the trained state: fetch the checkpoint again"
    yield with_tensors(patient, "mask state of zeros", lambda: {"mask_hidden": torch.zeros(1, 1, size)}, advice)

    def embedded() -> dict[str, Tensor]:
        embedding = patient.table("embed_tokens")[parallel.mask_token_id]
        return {"mask_hidden": embedding.repeat(size // len(embedding))[None, None]}

    yield with_tensors(patient, "the mask token's embedding as mask state", embedded, advice)


@experiment("target-features", "the target's states added to embeddings")
def target_features(patient: Patient) -> Iterator[Trial]:
    """PARD-2 without the target's states."""
    if "target_proj.weight" in patient.draft.tensors:
        without = other_facts(patient.architecture, target_features=None)
        yield Trial(
            "without the target's states",
            lambda: patient.setup(changed(patient.draft, without)),
            {},
            "target_proj does harm: the layers that it reads are not those that it was trained with",
        )


@experiment("template", "a chat template")
def template(patient: Patient) -> Iterator[Trial]:
    """Prompts without a chat template, and with the draft's own where it has another."""
    own = load_tokenizer(patient.draft.path, "draft") if patient.draft.files else None
    if patient.tokenizer.chat_template is not None:
        plain = [tuple(token_ids(patient.tokenizer, prompt.text)) for prompt in patient.prompts]
        yield _with_prompts(patient, "prompts without chat template", plain, OTHER_TEXT)
    if own is not None and own.chat_template not in (None, patient.tokenizer.chat_template):
        rendered = [_rendered(patient, prompt.text, str(own.chat_template)) for prompt in patient.prompts]
        yield _with_prompts(patient, "prompts in the draft's chat template", rendered, OTHER_TEXT)


@experiment("thinking", "a chat template that can turn thinking on and off")
def thinking(patient: Patient) -> Iterator[Trial]:
    """Prompts that ask for thinking, and those that forbid it, where the template's own are other ones."""
    usual = [request.prompt for request in patient.requests]
    for on in (True, False):
        prompts = [encode_prompt(prompt, patient.tokenizer, thinking=on) for prompt in patient.prompts]
        if prompts != usual:
            word = "on" if on else "off"
            yield _with_prompts(patient, f"thinking {word}", prompts, OTHER_THINKING.format(word))


def _rendered(patient: Patient, text: str, chat_template: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": text}]
    rendered = render(patient.tokenizer, messages, chat_template=chat_template, add_generation_prompt=True)
    return tuple(token_ids(patient.tokenizer, rendered, special=False))


def _with_prompts(patient: Patient, change: str, prompts: list[tuple[int, ...]], advice: str) -> Trial:
    requests = [replace(r, prompt=ids) for r, ids in zip(patient.requests, prompts, strict=True)]
    return Trial(
        change,
        lambda: patient.setup()._replace(requests=requests),
        {},
        advice,
        own_text=True,
    )


@experiment("precision", "memory for the model in another dtype")
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
