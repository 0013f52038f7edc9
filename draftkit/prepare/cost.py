"""What a causal LM costs, from its config.json alone: its class is built without memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from draftkit.errors import FormatError
from draftkit.models.pretrained import empty_model, read_model_config
from draftkit.models.states import decoder_of

EXPERTS = ".experts."  # in the names of weights that lie in one tensor for all experts


class Cost(NamedTuple):
    """`parameters`: all of them, tied ones once. `per_token`: those that one token reads: of the embedding one row, of
    the experts as many as it is sent to."""

    parameters: int
    per_token: int


def read_cost(folder: Path) -> Cost:
    """The cost of the language model in a folder, of a multi-modal one its text side. Raises `FormatError` for what is
    none, or of an unknown kind."""
    try:
        model = empty_model(read_model_config(folder), torch.bfloat16)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        weights = {name: weight for name, weight in decoder_of(model).named_parameters() if weight is not head}
    except Exception as error:  # whatever its config class or model stumbles over
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FormatError(f"transformers has no causal LM for this config: {reason}", where=folder) from error
    config = model.config.get_text_config()
    sizes = {name: _read_share(name, weight, config) * weight.numel() for name, weight in weights.items()}
    parameters = head.numel() + sum(weight.numel() for weight in weights.values())
    unread = 0 if embedding is head else embedding.numel()
    return Cost(parameters, round(sum(sizes.values())) + head.numel() - unread)


def _read_share(name: str, weight: nn.Parameter, config: object) -> float:
    """The part of a weight that one token reads."""
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / weight.shape[0] if EXPERTS in name and chosen else 1.0
