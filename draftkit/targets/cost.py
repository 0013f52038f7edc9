"""What a causal LM costs, told without its weights: its class is built without memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from draftkit.errors import FormatError
from draftkit.targets.pretrained import empty_model, read_model_config
from draftkit.targets.states import decoder_layers, decoder_of

EXPERTS = ".experts."  # in the names of their weights
NUMBERS_OF_EXPERTS = "num_experts", "n_routed_experts", "num_local_experts"  # in configs


class Cost(NamedTuple):
    """`parameters`: all of them, tied ones once. `per_token`: those that one token reads: of the embedding one row, of
    the experts as many as it is sent to. `experts`: those of all experts, of which a token reads the share `chosen`.
    `layers`: of the decoder."""

    parameters: int
    per_token: int
    experts: int
    chosen: float
    layers: int


def read_cost(folder: Path) -> Cost:
    """The cost of the language model in a folder, of a multi-modal one its text side. Raises `FormatError` for what is
    none, or of an unknown kind."""
    try:
        model = empty_model(read_model_config(folder), torch.bfloat16)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        decoder = decoder_of(model)
        weights = {name: weight for name, weight in decoder.named_parameters() if weight is not head}
    except Exception as error:  # whatever its config class or model stumbles over
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FormatError(f"transformers has no causal LM for this config: {reason}", where=folder) from error
    chosen = chosen_share(model.config.get_text_config())
    experts = sum(weight.numel() for name, weight in weights.items() if EXPERTS in name)
    parameters = head.numel() + sum(weight.numel() for weight in weights.values())
    unread = 0 if embedding is head else embedding.numel()
    per_token = parameters - unread - round((1 - chosen) * experts)
    return Cost(parameters, per_token, experts, chosen, len(decoder_layers(decoder)))


def chosen_share(config: object) -> float:
    """The share of a model's experts that a token is sent to; 1 without experts."""
    known = (getattr(config, name, None) for name in NUMBERS_OF_EXPERTS)
    number = next((number for number in known if number), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / number if chosen and number else 1.0
