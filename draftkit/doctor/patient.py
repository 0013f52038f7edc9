"""What is examined: a draft, its target and the prompts; and the draft with one thing changed, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.evaluate.prompts import Prompt
from draftkit.io.handles import memory_handle
from draftkit.layout.architecture import Architecture
from draftkit.layout.facts import facts_of
from draftkit.layout.folder import Draft
from draftkit.layout.schema import TensorSchema
from draftkit.layout.stored_weights import stands_for
from draftkit.loading import load_drafter
from draftkit.requests import Request
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.targets.target import Target


class Setup(NamedTuple):
    """The target, the drafter and the requests that one measurement runs."""

    target: Target
    drafter: Drafter
    requests: Sequence[Request]


@dataclass(frozen=True)
class Patient:
    """A draft and the target that it is to serve. `source`: what the user called the draft.

    `original`: as it was found. `draft`: the same, unless its map of tokens had to be brought inside the vocabulary.
    `k`: the most draft tokens of a round.
    """

    source: str
    original: Draft
    draft: Draft
    target_source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    k: int

    @property
    def architecture(self) -> Architecture:
        return self.draft.spec.architecture

    @property
    def facts(self) -> Mapping[str, object]:
        """Facts of the draft, under the names that `--set` takes."""
        return facts_of(self.architecture)

    @property
    def as_wide_as_target(self) -> bool:
        """Whether tables of the target fit the draft."""
        width = self.facts.get("target_hidden_size")
        return self.facts.get("hidden_size", width) == width

    @property
    def num_layers(self) -> int:
        """How many decoder layers the target has."""
        return self.model.config.get_text_config().num_hidden_layers

    def drafter(self, draft: Draft | None = None) -> Drafter:
        """The drafter of a changed draft, or of the one as it is."""
        return load_drafter(draft or self.draft, self.model, self.tokenizer)

    def setup(self, draft: Draft | None = None) -> Setup:
        drafter = self.drafter(draft)
        return Setup(Target(self.model, drafter.aux_layers), drafter, self.requests)

    def table(self, of: str) -> Tensor:
        """The target's `embed_tokens` or `lm_head`: float32 [V, Ht] on the CPU."""
        module = self.model.get_input_embeddings() if of == "embed_tokens" else self.model.get_output_embeddings()
        return module.weight.detach().float().cpu()


def changed(
    draft: Draft, architecture: Architecture | None = None, tensors: Mapping[str, Tensor] | None = None
) -> Draft:
    """The draft with other facts or weights.

    Weights that its new spec has no place for are left out. Those that it lacks do nothing: norms multiply by one,
    biases add zero.
    """
    spec = replace(draft.spec, architecture=architecture or draft.spec.architecture)
    schema = spec.tensors()
    kept = {name: handle for name, handle in draft.tensors.items() if stands_for(name) in schema}
    there = set(map(stands_for, kept))
    kept |= {
        name: memory_handle(name, _neutral(name, tensor), draft.path)
        for name, tensor in schema.items()
        if name not in there and tensor.required
    }
    kept |= {
        name: memory_handle(name, tensor.detach().cpu().contiguous(), draft.path)
        for name, tensor in (tensors or {}).items()
    }
    return replace(draft, spec=spec, tensors=kept)


def keeps_tensors(draft: Draft, architecture: Architecture) -> bool:
    """Whether a draft with these facts has the same tensors, so that `--set` alone makes it."""
    shapes, others = draft.spec.tensors(), replace(draft.spec, architecture=architecture).tensors()
    return {name: t.shape for name, t in shapes.items()} == {name: t.shape for name, t in others.items()}


def target_ids(draft: Draft) -> Tensor:
    """int64 [Vd]: the target's id of each token that the draft proposes."""
    if "d2t" in draft.tensors:
        offsets = draft.tensors["d2t"].load()
        return offsets + torch.arange(len(offsets))
    return torch.arange(draft.spec.architecture.vocab_size)


def with_target_ids(draft: Draft, ids: Tensor) -> Draft:
    """The draft with its tokens mapped to other target ids, int64 [Vd]."""
    return changed(draft, tensors={"d2t": ids - torch.arange(len(ids))})


def runnable(draft: Draft) -> Draft:
    """The draft, its map of tokens brought inside the vocabulary where an engine would read beyond its tables."""
    ids = target_ids(draft)
    inside = ids.clamp(0, draft.spec.architecture.vocab_size - 1)
    return draft if torch.equal(ids, inside) else with_target_ids(draft, inside)


def _neutral(name: str, tensor: TensorSchema) -> Tensor:
    return torch.zeros(tensor.shape) if name.endswith("bias") else torch.ones(tensor.shape)
