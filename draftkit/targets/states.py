"""A causal LM's decoder, and the hidden states of its layers as one forward computes them.

Shapes: B sequences, T rows, H target width, F width of the captured features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from draftkit.errors import TargetError

FINAL = -1  # among the states of `AuxLayers`: the one after the final norm
LISTS_OF_LAYERS = ("layers", "h", "blocks")  # what transformers' decoders call theirs


@dataclass(frozen=True)
class AuxLayers:
    """Which hidden states a drafter reads, concatenated in this order: i after i layers (convention S), or `FINAL`."""

    states: tuple[int, ...]


class TappedModel:
    """A causal LM of transformers, run as it likes, whose hidden states can be captured.

    `aux_layers` None: no states are kept. Raises `TargetError` for a model without a list of decoder layers, and for
    layers that it does not have.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None = None):
        self.model = model.eval()
        self.aux_layers = aux_layers
        self.decoder = decoder_of(model)
        self.layers = decoder_layers(self.decoder)
        if aux_layers is not None:
            self._check_states(aux_layers.states)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @property
    def feature_size(self) -> int:
        """F: the width of what the aux_layers give."""
        return 0 if self.aux_layers is None else len(self.aux_layers.states) * self.hidden_size

    @contextmanager
    def captured(self) -> Iterator[dict[int, Tensor]]:
        """Collect the captured states of one forward."""
        states: dict[int, Tensor] = {}
        hooks = [self._tap(i, states) for i in set(self.aux_layers.states)] if self.aux_layers else []
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def features(self, states: Mapping[int, Tensor], tokens: Tensor) -> Tensor | None:
        """What `captured` has collected of `tokens` [B, T], as the draft reads it: [B, T, F]; None without aux_layers.

        Raises `TargetError` for states that are more, or less, than one vector for each token.
        """
        if self.aux_layers is None:
            return None
        # The states of a model that is spread over devices lie where its layers do.
        features = torch.cat([states[i].to(tokens.device) for i in self.aux_layers.states], dim=-1)
        if features.shape != (*tokens.shape, self.feature_size):
            shape = list(next(iter(states.values())).shape)
            raise TargetError(
                f"the states of {type(self.decoder).__name__}'s layers have shape {shape}",
                expected=f"one vector of {self.hidden_size} numbers per token",
            )
        return features

    def _tap(self, state: int, states: dict[int, Tensor]) -> RemovableHandle:
        def before(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            states[state] = args[0] if args else kwargs["hidden_states"]

        def after(_module: nn.Module, _args: object, out: Tensor | tuple[Tensor, ...]) -> None:
            states[state] = out[0] if isinstance(out, tuple) else out

        def after_norm(_module: nn.Module, _args: object, out: BaseModelOutputWithPast) -> None:
            states[state] = out.last_hidden_state

        if state == FINAL:
            return self.decoder.register_forward_hook(after_norm)
        if state == self.num_layers:
            return self.layers[-1].register_forward_hook(after)
        return self.layers[state].register_forward_pre_hook(before, with_kwargs=True)

    def _check_states(self, states: tuple[int, ...]) -> None:
        if not all(i == FINAL or 0 <= i <= self.num_layers for i in states):
            raise TargetError(
                f"the draft reads the states of layers {list(states)}",
                expected=f"ids from 0 to {self.num_layers}, the target's number of layers",
                hint="the draft was made for another target",
            )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The decoder of a model, from token ids to the states that the output layer reads; of a multi-modal one, its text
    side.

    Raises `TargetError` for a model that has it under no name of transformers.
    """
    found: nn.Module = model.get_decoder()
    embedding = model.get_input_embeddings()
    # A wrapper's language model may be a causal LM itself; Llama 4's names itself as its decoder, ModernBERT its head.
    for part in (*found.modules(), *model.modules()):
        if any(isinstance(getattr(part, name, None), nn.ModuleList) for name in LISTS_OF_LAYERS) and any(
            inner is embedding for inner in part.modules()
        ):
            return part
    raise TargetError(
        f"{type(found).__name__} has no list of decoder layers beside its embedding",
        expected=f"one named {', '.join(LISTS_OF_LAYERS)}, as in transformers' decoders",
    )


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The layers of what `decoder_of` gives, in their order."""
    lists = (getattr(decoder, name, None) for name in LISTS_OF_LAYERS)
    return list(next(found for found in lists if isinstance(found, nn.ModuleList)))
