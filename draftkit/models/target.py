"""The target: a transformers causal LM with its hidden states captured, run through draftkit's attention function.

Shapes: B sequences, T rows, H target width, F width of the captured features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftkit.errors import TargetError, UnsupportedTarget
from draftkit.models.footprint import SUPPORTED, Footprint, Latents, compresses, footprint
from draftkit.models.positions import Positions
from draftkit.models.pretrained import describe, load_pretrained, read_config
from draftkit.models.recurrent import (
    NOTHING_KEPT,
    KeptStates,
    Recurrence,
    StateCache,
    attends,
    cache_argument,
    keeps_states,
    layers_with_states,
    run_row_by_row,
    sizes_of,
)
from draftkit.models.rope import give_rows_their_rope, sequences_of
from draftkit.models.states import AuxLayers, TappedModel

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *NOTHING_KEPT}
SLIDING = {"sliding_attention", "hybrid_sliding"}


class TargetOutput(NamedTuple):
    """`logits` [B, T or 1, V]; `features` [B, T, F], or None when nothing is captured."""

    logits: Tensor
    features: Tensor | None


class KeyValues(Protocol):
    """Where one forward keeps its keys and values; the attention function gets it as the argument `kv`.

    `windows`: the layers that have attended, each with its sliding window, None for full attention. `latents` takes
    those of layers that cache latents, `states` those of recurrent modules.
    """

    @property
    def windows(self) -> Mapping[int, int | None]: ...

    @property
    def latents(self) -> Latents: ...

    @property
    def states(self) -> KeptStates: ...


class Target(TappedModel):
    """A causal LM ready to be verified against, through draftkit's attention function."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None = None):
        check_config(model.config)
        check_class(type(model), model.config)
        super().__init__(model, aux_layers)
        self.positions = Positions.of(model.config)
        self._ropes = give_rows_their_rope(model)
        self._compresses = compresses(model)
        self._recurrences: list[Recurrence] = []
        if layers_with_states(model.config):
            self._recurrences = run_row_by_row(model, lambda: self._footprint.recurrences)
            self._sizes = sizes_of(model.config)
        self._attention_checked = False

    def slot_bytes(self, capacity: int, k: int) -> int:
        """What is kept of a sequence with room for `capacity` positions, of which a round may take back `k`."""
        return self._footprint.slot_bytes(self.dtype, capacity, k)

    @cached_property
    def _footprint(self) -> Footprint:
        return footprint(self.model.config)

    @property
    def resumes(self) -> bool:
        """Whether a prompt can be run piece by piece."""
        return all(recurrence.resumes for recurrence in self._recurrences)

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
                use_cache=False,
                logits_to_keep=keep,
                kv=kv,
                **{cache_argument(type(self.model)): self._cache(kv)},
            )
        if not self._attention_checked:
            self._check_attention(kv.windows)
            self._attention_checked = True
        return TargetOutput(output.logits, self.features(states, tokens))

    def _cache(self, kv: KeyValues) -> Latents | StateCache | None:
        """What the model takes for transformers' cache."""
        latents = kv.latents if self._compresses else None
        return StateCache(self._sizes, kv.states, latents) if self._recurrences else latents

    def _check_attention(self, windows: Mapping[int, int | None]) -> None:
        """Every layer must have attended through draftkit's function, and within a window where its config has one."""
        config = self.model.config.get_text_config()
        # Only a window that the architecture knows: some checkpoints carry a sliding_window that nothing reads.
        slides = hasattr(type(config), "sliding_window") and config.sliding_window
        everywhere = "sliding_attention" if slides else "full_attention"
        kinds = getattr(config, "layer_types", None) or [everywhere] * self.num_layers
        for layer, kind in enumerate(kinds):
            if not attends(kind):
                continue
            if layer not in windows:
                problem = "does not attend through transformers' AttentionInterface"
            elif windows[layer] is None and kind in SLIDING:
                problem = "does not tell the attention function its sliding window"
            else:
                continue
            raise UnsupportedTarget(f"layer {layer} of {type(self.model).__name__} {problem}", expected=SUPPORTED)


def check_config(config: PretrainedConfig) -> None:
    """Raise `UnsupportedTarget` for architectures whose attention draftkit's runtime cannot take over yet."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    if config.is_encoder_decoder:  # no engine drafts for those
        raise TargetError(f"targets with an encoder are not supported ({text.model_type})", expected="a decoder alone")
    if unknown := {kind for kind in kinds - LAYER_TYPES if not keeps_states(kind)}:
        raise UnsupportedTarget(
            f"draftkit's own engine does not run layers of type {', '.join(sorted(unknown))} yet ({text.model_type})",
            expected=SUPPORTED,
        )


def check_class(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise `UnsupportedTarget` for models that do not say that they attend through transformers' AttentionInterface.

    Those with recurrent modules say nothing, and are seen at work.
    """
    if not model_class.is_backend_compatible() and not layers_with_states(config):
        raise UnsupportedTarget(
            f"{model_class.__name__} does not attend through transformers' AttentionInterface", expected=SUPPORTED
        )


def end_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end a generation of the model in a folder, as `Target.eos_token_ids`; nothing is loaded."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none
        generation = None
    return _end_ids(generation, getattr(describe(folder), "eos_token_id", None))


def _end_ids(generation: GenerationConfig | None, stated: object) -> frozenset[int]:
    ids = stated if generation is None or generation.eos_token_id is None else generation.eos_token_id
    return frozenset(token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))


def read_target_config(folder: Path) -> PretrainedConfig:
    """The configuration of a target. Raises `TargetError` for one that cannot be read or is not supported."""
    config = read_config(folder)
    check_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedTarget(f"transformers has no causal language model of type {config.model_type}", where=folder)
    check_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    if layers_with_states(config):
        footprint(config)  # finds their states, or raises
    return config


def load_target(folder: Path, *, device: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Load a causal LM for inference with the named attention function; `device` becomes the current one.

    Raises `TargetError` for unsupported architectures, and as `load_pretrained`.
    """
    return load_pretrained(folder, read_target_config(folder), device=device, dtype=dtype, attention=attention)
