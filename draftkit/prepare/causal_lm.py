"""The output layer of a causal LM, and the tensors of it that have a row for each token."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftkit.layout.decoder import DENSE_MODEL_TYPES
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import Draft
from draftkit.prepare.head import Head
from draftkit.prepare.vocabulary import Vocabulary


def head_of(draft: Draft, owner: Vocabulary) -> Head:
    """The draft's own output layer, tied or not."""
    del owner
    lm = draft.spec.architecture.expect(CausalLMSpec)
    embedding, output, *_ = vocabulary_tensors(lm)
    ids = torch.arange(lm.vocab_size) if lm.head_ids is None else torch.tensor(lm.head_ids)
    return Head(ids, draft.tensors[output if output in draft.tensors else embedding])


def with_rows(draft: Draft, head: Head, rows: Tensor) -> Draft:
    """The model that proposes fewer tokens; its tensors stay."""
    lm = draft.spec.architecture.expect(CausalLMSpec)
    lm = replace(lm, head_ids=tuple(head.ids[rows].tolist()))
    return replace(draft, spec=replace(draft.spec, architecture=lm))


def vocabulary_tensors(lm: CausalLMSpec) -> tuple[str, ...]:
    """The names of embedding and output layer (with its bias, if any), in whatever family transformers has a class for.

    A tied output layer is listed too, and need not be stored.
    """
    kind = lm.config.get("model_type")
    if kind in DENSE_MODEL_TYPES:
        return "model.embed_tokens.weight", "lm_head.weight"
    values = {key: value for key, value in lm.config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), trust_remote_code=False)
    places = {module: name for name, module in model.named_modules()}
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return tuple(f"{places[layer]}.{name}" for layer in layers for name, _ in layer.named_parameters())
