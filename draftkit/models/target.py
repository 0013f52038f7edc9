"""The target: a transformers causal LM with its hidden states captured, run through draftkit's attention function.

Shapes: B sequences, T rows, H target width, F width of the captured features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftkit.errors import TargetError
from draftkit.io.jsonfile import read_object
from draftkit.layout.target import language_model
from draftkit.models.devices import use_device
from draftkit.models.finite import require_finite
from draftkit.models.footprint import Footprint, Latents, compresses, footprint
from draftkit.models.positions import Positions
from draftkit.models.remote_code import remote_code_hint, trusts_remote_code
from draftkit.models.rope import give_rows_their_rope, sequences_of

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
SUPPORTED = "a decoder whose layers all have softmax attention over keys and values, and nothing else that looks back"
INSTEAD = "draftkit eval --engine vllm measures drafts for it through vLLM alone"
FINAL = -1  # among the states of `AuxLayers`: the one after the final norm


@dataclass(frozen=True)
class AuxLayers:
    """Which hidden states a drafter reads, concatenated in this order: i after i layers (convention S), or `FINAL`."""

    states: tuple[int, ...]


class TargetOutput(NamedTuple):
    """`logits` [B, T or 1, V]; `features` [B, T, F], or None when nothing is captured."""

    logits: Tensor
    features: Tensor | None


class KeyValues(Protocol):
    """Where one forward keeps its keys and values; the attention function gets it as the argument `kv`.

    `windows`: the layers that have attended, each with its sliding window, None for full attention. `latents` takes
    those of layers that cache latents.
    """

    @property
    def windows(self) -> Mapping[int, int | None]: ...

    @property
    def latents(self) -> Latents: ...


class Target:
    """A causal LM ready to be verified against. `aux_layers` None: no hidden states are kept."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None = None):
        check_config(model.config)
        check_class(type(model))
        self.model = model.eval()
        self.aux_layers = aux_layers
        self.decoder: nn.Module = model.get_decoder()
        self.layers = _decoder_layers(self.decoder)
        self.positions = Positions.of(model.config)
        self._ropes = give_rows_their_rope(model)
        self._compresses = compresses(model)
        self._forward_checked = False
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

    def slot_bytes(self, capacity: int, k: int) -> int:
        """What is kept of a sequence with room for `capacity` positions, of which a round may take back `k`."""
        return self._footprint.slot_bytes(self.dtype, capacity, k)

    @cached_property
    def _footprint(self) -> Footprint:
        return footprint(self.model.config)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a generation, from the generation config or the config."""
        return _end_ids(self.model.generation_config, self.model.config.get_text_config().eos_token_id)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KeyValues,
        *,
        last_only: bool = False,
        embeddings: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> TargetOutput:
        """Run rows of tokens int64 [B, T] at `positions` int64 [B, T]; `kv` says where their keys and values live.

        `last_only` computes the logits of the last row alone. `embeddings` [B, T, H] replace those of the tokens.
        `lengths` int64 [B, 1] or [B, T]: of the sequences as of each row, for rope that depends on it; None where each
        ends with its last row.
        Raises `TargetError` when the first forward shows that the model attends, or keeps its states, in a way that
        draftkit does not know.
        """
        # An index, not a count: given a count, Gemma 4 drops rows before its last layers.
        keep = tokens.new_full((1,), tokens.shape[1] - 1) if last_only else 0
        with self.captured() as states, sequences_of(self._ropes, lengths):
            output = self.model(
                input_ids=tokens if embeddings is None else None,
                inputs_embeds=embeddings,
                position_ids=positions,
                past_key_values=kv.latents if self._compresses else None,
                use_cache=False,
                logits_to_keep=keep,
                kv=kv,
            )
        features = torch.cat([states[i] for i in self.aux_layers.states], dim=-1) if self.aux_layers else None
        if not self._forward_checked:
            self._check_attention(kv.windows)
            if features is not None and features.shape != (*tokens.shape, self.feature_size):
                shape = list(next(iter(states.values())).shape)
                raise TargetError(
                    f"the states of {type(self.decoder).__name__}'s layers have shape {shape}",
                    expected=f"one vector of {self.hidden_size} numbers per token",
                )
            self._forward_checked = True
        return TargetOutput(output.logits, features)

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

    def _check_attention(self, windows: Mapping[int, int | None]) -> None:
        """Every layer must have attended through draftkit's function, and within a window where its config has one."""
        config = self.model.config.get_text_config()
        # Only a window that the architecture knows: some checkpoints carry a sliding_window that nothing reads.
        slides = hasattr(type(config), "sliding_window") and config.sliding_window
        everywhere = "sliding_attention" if slides else "full_attention"
        kinds = getattr(config, "layer_types", None) or [everywhere] * self.num_layers
        for layer, kind in enumerate(kinds):
            if layer not in windows:
                problem = "does not attend through transformers' AttentionInterface"
            elif windows[layer] is None and kind == "sliding_attention":
                problem = "does not tell the attention function its sliding window"
            else:
                continue
            raise TargetError(f"layer {layer} of {type(self.model).__name__} {problem}", expected=SUPPORTED)


def check_config(config: PretrainedConfig) -> None:
    """Raise `TargetError` for architectures whose attention draftkit's runtime cannot take over yet."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    problem = None
    if config.is_encoder_decoder:
        problem = "an encoder-decoder"
    elif kinds - LAYER_TYPES:
        problem = f"layers of type {', '.join(sorted(kinds - LAYER_TYPES))}"
    if problem is not None:
        raise TargetError(
            f"targets with {problem} are not supported yet ({text.model_type})",
            expected=SUPPORTED,
            hint=None if config.is_encoder_decoder else INSTEAD,  # no engine drafts for those
        )


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Raise `TargetError` for models that say that they have an attention of their own."""
    if not model_class.is_backend_compatible():
        raise TargetError(
            f"{model_class.__name__} does not attend through transformers' AttentionInterface",
            expected=SUPPORTED,
            hint=INSTEAD,
        )


def _decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))  # GPT-2's family says h
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(f"{type(decoder).__name__} has no list of decoder layers", expected=SUPPORTED, hint=INSTEAD)
    return list(layers)


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of a model. Raises `TargetError` for one that transformers cannot read."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trusts_remote_code())
    except (OSError, ValueError) as error:
        raise _unloadable(folder, error) from error


def end_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end a generation of the model in a folder, as `Target.eos_token_ids`; nothing is loaded."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none
        generation = None
    try:
        stated = read_config(folder).get_text_config().eos_token_id
    except TargetError:  # a class that transformers does not know, of which other engines may
        stated = language_model(read_object(folder / "config.json")).get("eos_token_id")
    return _end_ids(generation, stated)


def _end_ids(generation: GenerationConfig | None, stated: object) -> frozenset[int]:
    ids = stated if generation is None or generation.eos_token_id is None else generation.eos_token_id
    return frozenset(token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))


def read_target_config(folder: Path) -> PretrainedConfig:
    """The configuration of a target. Raises `TargetError` for one that cannot be read or is not supported."""
    config = read_config(folder)
    check_config(config)
    if trusts_remote_code():
        _register_own_class(config, folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TargetError(
            f"transformers has no causal language model of type {config.model_type}", where=folder, hint=INSTEAD
        )
    check_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return config


def load_target(folder: Path, *, device: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Load a causal LM for inference with the named attention function; `device` becomes the current one.

    Raises `TargetError` for unsupported architectures and for weights that are missing from the checkpoint, and
    `NonFiniteError` for weights with NaN or infinity.
    """
    config = read_target_config(folder)
    use_device(device)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            trust_remote_code=trusts_remote_code(),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise _unloadable(folder, error) from error
    if info["missing_keys"]:
        raise TargetError(f"the target lacks weights: {', '.join(sorted(info['missing_keys'])[:5])}", where=folder)
    require_finite(model.state_dict().items(), folder)
    return model.to(device).requires_grad_(False)


def _register_own_class(config: PretrainedConfig, folder: Path) -> None:
    """Make the causal LM that a model brings as code known to transformers, as loading it would."""
    name = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if name is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        AutoModelForCausalLM.register(type(config), get_class_from_dynamic_module(name, folder), exist_ok=True)


def _unloadable(folder: Path, error: Exception) -> TargetError:
    first_line = str(error).strip().split("\n", 1)[0]
    return TargetError(f"transformers cannot load the target: {first_line}", where=folder, hint=remote_code_hint(error))
