"""What the recipes of drafts share that feed on the target's hidden states: their start and their chains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from draftkit.errors import DraftkitError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.spec import DraftSpec
from draftkit.models.eagle import EagleModel, load_eagle
from draftkit.targets.states import AuxLayers
from draftkit.train.attention import CHAIN_ATTENTION
from draftkit.train.recipes.bases.chain import ChainRecipe
from draftkit.train.recipes.bases.initialization import INITIAL_STD
from draftkit.train.recipes.recipe import Origin


class EagleFamily(ChainRecipe):
    """A recipe for an `EagleModel`."""

    draft: EagleModel

    def __init__(self, draft: EagleModel, origin: Origin, temperature: float):
        super().__init__(draft, DraftSpec(architecture=draft.spec, dtype="F32"), origin, temperature)

    def train_own(self, *, head: bool, embeddings: bool) -> None:
        """Whether the draft's head and embedding change, where they are its own."""
        if self.draft.spec.lm_head == "draft":
            assert self.draft.lm_head is not None
            self.draft.lm_head.requires_grad_(head)
        if self.draft.spec.embed_tokens == "draft":
            assert self.draft.embed_tokens is not None
            self.draft.embed_tokens.requires_grad_(embeddings)

    @property
    def aux_layers(self) -> AuxLayers | None:
        ids = self.draft.spec.aux_layer_ids
        return None if ids is None else AuxLayers(ids)


def fresh_eagle(spec: EagleSpec, origin: Origin, attention: str = CHAIN_ATTENTION) -> EagleModel:
    """A new draft in float32. Its own head and embedding start as the target's where the widths agree."""
    target = origin.target
    model = EagleModel(spec, attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=INITIAL_STD)
    embeddings, output = target.get_input_embeddings(), target.get_output_embeddings()
    with torch.no_grad():
        if spec.reduced_vocabulary:
            assert origin.d2t_ids is not None
            model.d2t.copy_(origin.d2t_ids.cpu() - torch.arange(len(origin.d2t_ids)))
        if isinstance(model.lm_head, nn.Linear) and spec.decoder.hidden_size == spec.target_hidden_size:
            rows = output.weight if origin.d2t_ids is None else output.weight[origin.d2t_ids.to(output.weight.device)]
            model.lm_head.weight.copy_(rows)
        if isinstance(model.embed_tokens, nn.Embedding) and spec.decoder.hidden_size == spec.target_hidden_size:
            model.embed_tokens.weight.copy_(embeddings.weight)
    model = model.to(target.device)
    model.borrow(embeddings.requires_grad_(False), output.requires_grad_(False))
    return model


def eagle_draft(
    origin: Origin, recipe: str, fresh: Callable[[], EagleModel], attention: str = CHAIN_ATTENTION
) -> EagleModel:
    """The origin's draft in float32, ready to be trained further; a `fresh` one where there is none.

    Raises `DraftkitError` for a draft of another kind than the recipe trains.
    """
    if origin.draft is None:
        return fresh()
    spec = origin.draft.spec.architecture
    if spec.method != recipe:
        raise DraftkitError(
            f"the draft is of the kind {origin.draft.spec.method}",
            where=origin.draft.path,
            hint=f"recipe {recipe} trains another",
        )
    return _started(origin, attention)


def _started(origin: Origin, attention: str) -> EagleModel:
    assert origin.draft is not None
    model = load_eagle(origin.draft, origin.target, attention=attention, dtype=torch.float32)
    layers = origin.target.get_input_embeddings(), origin.target.get_output_embeddings()
    borrowed = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in borrowed)
    return model
