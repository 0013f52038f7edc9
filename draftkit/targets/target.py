"""The target: a transformers causal LM with its hidden states captured, run through draftkit's attention function.

Shapes: B sequences, T rows, H target width, F width of the captured features, V vocabulary.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from draftkit.errors import TargetError, UnsupportedTarget
from draftkit.layout.folder import Draft
from draftkit.targets.attention import (
    SUPPORTED,
    KeyValues,
    Latents,
    check_attention,
    chooses,
    compresses,
    leave_temperatures,
)
from draftkit.targets.footprint import Footprint, footprint
from draftkit.targets.media import (
    Media,
    arguments,
    explained_media,
    prompt_masks,
    rotary_positions,
    turns_by_images,
)
from draftkit.targets.pretrained import load_pretrained, model_class, read_config, settle_quantization
from draftkit.targets.recurrent import (
    NOTHING_KEPT,
    Recurrence,
    StateCache,
    cache_argument,
    keeps_states,
    layers_with_states,
    run_row_by_row,
    sizes_of,
)
from draftkit.targets.rope import Positions, give_rows_their_rope, sequences_of
from draftkit.targets.states import AuxLayers, TappedModel

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", *NOTHING_KEPT}
FOOTPRINT = "_footprint_of_draftkit"  # the attribute of a model
ALONE = "indexed_attention"  # not beside layers with states, whose cache keeps nothing for an indexer


class TargetOutput(NamedTuple):
    """`logits` [B, T, 1 or n, V]; `features` [B, T, F], or None when nothing is captured. Of a prompt with images,
    `shift` int64 [1]: how far the rotary positions of what follows are from the places in the sequence, None for not.
    """

    logits: Tensor
    features: Tensor | None
    shift: Tensor | None = None


class Target(TappedModel):
    """A causal LM ready to be verified against, through draftkit's attention function."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None = None):
        check_config(model.config)
        check_class(type(model), model.config)
        super().__init__(model, aux_layers)
        self.positions = Positions.of(model.config)
        self.shifts = turns_by_images(model)
        self._ropes = give_rows_their_rope(model)
        leave_temperatures(model)
        self._compresses = compresses(model)
        self.chooses = chooses(model.config)
        self._recurrences: list[Recurrence] = []
        if layers_with_states(model.config):
            self._recurrences = run_row_by_row(model, lambda: self._footprint.recurrences)
            self._sizes = sizes_of(model.config)
        self._cache_argument = cache_argument(type(model))
        self._attention_checked = False

    def slot_bytes(self, capacity: int, k: int) -> int:
        """What is kept of a sequence with room for `capacity` positions, of which a round may take back `k`."""
        return self._footprint.slot_bytes(self.dtype, capacity, k)

    @property
    def _footprint(self) -> Footprint:
        return footprint_of(self.model)

    @property
    def resumes(self) -> bool:
        """Whether a prompt can be run piece by piece."""
        return all(recurrence.resumes for recurrence in self._recurrences)

    @property
    def joins_prompts(self) -> bool:
        """Whether several prompts can be run in one forward, one after the other."""
        return not self._recurrences and not self.chooses

    @property
    def without_trees(self) -> str | None:
        """Why it cannot score a tree; None where it can."""
        if self._recurrences:
            return "its recurrent layers keep one state of a sequence, and branches would need one each"
        return "its layers choose what they attend to by the place in the cache" if self.chooses else None

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a generation, from the generation config or the config."""
        return _end_ids(
            self.model.generation_config, getattr(self.model.config.get_text_config(), "eos_token_id", None)
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KeyValues,
        *,
        last_only: bool = False,
        last_rows: Tensor | None = None,
        embeddings: Tensor | None = None,
        lengths: Tensor | None = None,
        media: Media | None = None,
    ) -> TargetOutput:
        """Run rows of tokens int64 [B, T] at `positions` int64 [B, T]; `kv` says where their keys and values live.

        `last_only` computes the logits of the last row alone; of several prompts one after the other, B = 1, those of
        their `last_rows` int64 [n]. `embeddings` [B, T, H] replace those of the tokens.
        `lengths` int64 [B, 1] or [B, T]: of the sequences as of each row, for rope that depends on it; None where each
        ends with its last row. `media`: of a prompt with images, which is alone in its forward, and whole.
        Raises `TargetError` when the first forward shows that the model attends, or keeps its states, in a way that
        draftkit does not know, and for images that are not those of the tokens.
        """
        # An index, not a count: given a count, Gemma 4 drops rows before its last layers.
        last = tokens.new_full((1,), tokens.shape[1] - 1) if last_only and last_rows is None else last_rows
        given: dict[str, Any] = {"attention_mask": kv.mask} if self.chooses else {}
        shift = None
        kv.whole = media is not None
        if media is not None:
            given |= arguments(self.model, media) | prompt_masks(self.model, tokens, media)
            if self.shifts:
                positions, shift = rotary_positions(self.model, tokens, media)
        with self.captured() as states, sequences_of(self._ropes, lengths), explained_media(media):
            output = self.model(
                input_ids=tokens if embeddings is None else None,
                inputs_embeds=embeddings,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=0 if last is None else last,
                kv=kv,
                **{self._cache_argument: self._cache(kv)} | given,
            )
        if not self._attention_checked:
            check_attention(self.model, self.num_layers, kv.windows)
            self._attention_checked = True
        logits = output.logits
        if last is not None and logits.shape[1] != last.shape[0]:  # some models give those of all rows
            logits = logits.index_select(1, last.to(logits.device))
        return TargetOutput(logits, self.features(states, tokens), shift)

    def _cache(self, kv: KeyValues) -> Latents | StateCache | None:
        """The object that the model is given in the place of transformers' cache."""
        latents = kv.latents if self._compresses else None
        return StateCache(self._sizes, kv.states, latents) if self._recurrences else latents


def check_config(config: PretrainedConfig) -> None:
    """Raise `UnsupportedTarget` for architectures whose attention draftkit's runtime cannot take over yet."""
    if config.is_encoder_decoder:  # no engine drafts for those
        kind = config.model_type
        raise TargetError(f"targets with an encoder are not supported ({kind})", expected="a decoder alone")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    with_states = {kind for kind in kinds if keeps_states(kind)}
    if unknown := kinds - LAYER_TYPES - with_states - (set() if with_states else {ALONE}):
        raise UnsupportedTarget(
            f"draftkit's own engine does not run layers of type {', '.join(sorted(unknown))} yet ({text.model_type})",
            expected=SUPPORTED,
        )


def check_class(model: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise `UnsupportedTarget` for models that do not say that they attend through transformers' AttentionInterface.

    Of multi-modal ones, the language model says so. Those that may have recurrent layers say nothing, and are seen at
    work where their configuration tells what their layers are.
    """
    text = config.get_text_config()
    decodes = model_class(text) or model
    hybrid = decodes._is_stateful and bool(getattr(text, "layer_types", None))
    if not decodes.is_backend_compatible() and not hybrid and not layers_with_states(config):
        raise UnsupportedTarget(
            f"{model.__name__} does not attend through transformers' AttentionInterface", expected=SUPPORTED
        )


def end_token_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    """The ids that end a generation of the model in a folder, as `Target.eos_token_ids`; nothing is loaded. `config` is
    that of its language model."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none
        generation = None
    return _end_ids(generation, getattr(config, "eos_token_id", None))


def _end_ids(generation: GenerationConfig | None, stated: object) -> frozenset[int]:
    ids = stated if generation is None or generation.eos_token_id is None else generation.eos_token_id
    return frozenset(token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))


class Supported(NamedTuple):
    """The configuration of a model that draftkit's runtime runs, and what it will take of memory."""

    config: PretrainedConfig
    footprint: Footprint


def footprint_of(model: PreTrainedModel) -> Footprint:
    """What a model takes of memory: found once, and kept with the model."""
    if FOOTPRINT not in vars(model):
        setattr(model, FOOTPRINT, footprint(model.config))
    found: Footprint = getattr(model, FOOTPRINT)
    return found


def read_supported(folder: Path, config: PretrainedConfig | None = None, *, plain: bool = False) -> Supported:
    """The configuration of a model in a folder; `config` is the same as transformers has read it, where it has.
    `plain`: draftkit itself makes plain weights of its quantized ones.

    Raises `TargetError` for one that cannot be read or is not supported.
    """
    config = read_config(folder) if config is None else deepcopy(config)
    check_config(config)
    found = model_class(config)
    if found is None:
        raise UnsupportedTarget(f"transformers has no causal language model of type {config.model_type}", where=folder)
    check_class(found, config)
    if plain:
        vars(config).pop("quantization_config", None)
    else:
        settle_quantization(config, folder)
    return Supported(config, footprint(config))


def own_model(draft: Draft) -> Supported:
    """What `read_supported` says of a draft that is a model of its own, for `Draft.kept`. Raises `TargetError`."""
    return read_supported(draft.path, plain=draft.spec.quantization is not None)


def load_target(
    folder: Path,
    *,
    device: str,
    dtype: torch.dtype,
    attention: str,
    spread: bool = False,
    known: Supported | None = None,
) -> PreTrainedModel:
    """Load a causal LM for inference with the named attention function; `device` and `spread` as in `load_pretrained`.
    `known`: what `read_supported` says of the folder, where that has been read.

    Raises `TargetError` for unsupported architectures, and as `load_pretrained`.
    """
    config, kept = known or read_supported(folder)
    model = load_pretrained(folder, deepcopy(config), device=device, dtype=dtype, attention=attention, spread=spread)
    setattr(model, FOOTPRINT, kept)
    return model
