"""What a causal LM costs, from its config.json alone: its class is built without memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftkit.errors import FormatError
from draftkit.models.remote_code import trusts_remote_code

EXPERTS = ".experts."  # in the names of weights that lie in one tensor for all experts


class Cost(NamedTuple):
    """`parameters`: all of them, tied ones once. `per_token`: those that one token reads: of the embedding one row, of
    the experts as many as it is sent to."""

    parameters: int
    per_token: int


def read_cost(folder: Path) -> Cost:
    """The cost of the language model in a folder. Raises `FormatError` for what is none, or of an unknown kind."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_remote_code()).get_text_config()
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.bfloat16)
            model.tie_weights()
    except Exception as error:  # whatever its config class or model stumbles over
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FormatError(f"transformers has no causal LM for this config: {reason}", where=folder) from error
    sizes = {name: _read_share(name, weight, config) * weight.numel() for name, weight in model.named_parameters()}
    parameters = sum(weight.numel() for weight in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if embedding is head else embedding.numel()
    return Cost(parameters, round(sum(sizes.values())) - unread)


def _read_share(name: str, weight: nn.Parameter, config: object) -> float:
    """The part of a weight that one token reads."""
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / weight.shape[0] if EXPERTS in name and chosen else 1.0
