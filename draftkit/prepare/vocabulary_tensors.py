"""The tensors of a causal LM that have a row for each token."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftkit.layout.decoder import DENSE_MODEL_TYPES
from draftkit.layout.families.causal_lm import CausalLMSpec


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
