"""The target as a training run needs it, whole or its embedding and output layer alone, and its hidden states for a
row of packed samples.

N tokens of a row, F width of the captured features, H target width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.data.columns import SampleTable
from draftkit.data.samples import Sample
from draftkit.errors import DraftkitError, TargetError, UnsupportedTarget
from draftkit.loading import OpenedTarget, open_target
from draftkit.targets.device_map import spreads_targets
from draftkit.targets.finite import HINT
from draftkit.targets.media import Media, arguments, explained_media
from draftkit.targets.pretrained import load_modules, load_pretrained
from draftkit.targets.rope import Positions
from draftkit.targets.states import AuxLayers, TappedModel, decoder_of

MASKED = {"full_attention", "sliding_attention"}  # kinds of layers that a mask keeps from seeing other samples
MASKED_TOKENS = 4096  # of a row; the mask of a longer one would take more than what it saves, [N, N]
NO_MEDIA: Mapping[int, Media] = {}
TRIED = 8  # tokens of a sample with which a model is tried
BY_VLLM = (
    "vLLM computes its states for draftkit data states --vllm-python ENV/bin/python, "
    "and for draftkit train --states-from vllm --vllm-python ENV/bin/python"
)
# How far two ways of computing the same may lie apart: the norm of the difference over that of the values.
AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def read_training_config(target: OpenedTarget) -> PretrainedConfig:
    """The configuration of a target whose states transformers is to compute here.

    Raises `TargetError`; where another engine may run the target, it says how vLLM computes its states.
    """
    try:
        return target.own_config()
    except UnsupportedTarget as refusal:
        raise refusal.otherwise(BY_VLLM) from refusal.__cause__


def load_training_target(target: str | OpenedTarget, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A target (path, Hub id or `zoo:target`) that transformers runs in its own way; `device` becomes the current one.

    Raises `DraftkitError`.
    """
    target = open_target(target)
    config = read_training_config(target)
    spread = spreads_targets()
    model = load_pretrained(target.folder, config, device=device, dtype=dtype, attention=None, spread=spread)
    return target.adapted(model)


def check_lengths(samples: Sequence[Sample], config: PretrainedConfig) -> None:
    """Raise `DraftkitError` naming the first sample that is too long to be packed for the target."""
    positions = Positions.of(config)
    limit = (
        "the target's positions" if positions.longest == positions.most else "beyond them its rope changes (longrope)"
    )
    samples = SampleTable.of(samples)
    for number in np.flatnonzero(samples.lengths > positions.longest)[:1]:
        raise DraftkitError(
            f"sample {samples[number].id} has {samples.lengths[number]} tokens",
            expected=f"at most {positions.longest}: {limit}",
            hint=f"prepare the data with --max-length {positions.longest}",
        )


def load_target_embeddings(target: str | OpenedTarget, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The embedding and output layer of a target (path, Hub id or `zoo:target`), for runs that read its states from
    files; `device` becomes the current one.

    Raises `DraftkitError`.
    """
    return open_target(target).load_embeddings(device=device, dtype=dtype)


class States(NamedTuple):
    """`features` [1, N, F], None where nothing is captured; `last` [1, N, H], after the final norm."""

    features: Tensor | None
    last: Tensor


class OnlineStates:
    """Runs the target, loaded by `load_training_target`.

    The samples of a row are run in one sequence where masks can keep them apart, else beside each other: a recurrent
    state would run on from one into the next. Those of a long row are too, as a mask grows with the square of it.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None):
        self._target = TappedModel(model, aux_layers)
        self._packed = masks_keep_apart(model)

    @torch.no_grad()
    def states(
        self, tokens: Tensor, positions: Tensor, sample_ids: Tensor, *, media: Mapping[int, Media] = NO_MEDIA
    ) -> States:
        """The states of a row, whose arguments are int64 [1, N]: `sample_ids` 0, 0, 1, … in order, then −1 for padding,
        whose states mean nothing. `media`: by the number of a sample with images in the row, what the target is given
        of it besides its tokens; the model is then the one with its vision tower.

        Raises `TargetError` for states that are not finite.
        """
        if media or not self._packed or tokens.shape[1] > MASKED_TOKENS:
            return self._beside_each_other(tokens, sample_ids, media)
        mask = attention_masks(self._target.model.config, sample_ids, self._target.dtype)
        return self._forward(tokens, position_ids=positions, attention_mask=mask)

    def _beside_each_other(self, tokens: Tensor, sample_ids: Tensor, media: Mapping[int, Media]) -> States:
        """Batches of samples of similar lengths, padded at their ends, where nothing before sees it; each sample with
        images by itself."""
        lengths = sample_ids[sample_ids >= 0].bincount().tolist()
        samples = tokens[0, : sum(lengths)].split(lengths)
        features: list[Tensor] = [tokens.new_empty(0)] * len(lengths)
        last = list(features)
        text = [number for number in range(len(lengths)) if number not in media]
        groups = [[text[place] for place in group] for group in similar([lengths[number] for number in text])]
        for numbers in [*groups, *([number] for number in sorted(media))]:
            batch = pad_sequence([samples[number] for number in numbers], batch_first=True)
            found = self._forward(batch, media=media.get(numbers[0]))
            for row, number in enumerate(numbers):
                last[number] = found.last[row, : lengths[number]]
                if found.features is not None:
                    features[number] = found.features[row, : lengths[number]]
        padding = tokens.shape[1] - sum(lengths)

        def joined(parts: list[Tensor]) -> Tensor:
            return nn.functional.pad(torch.cat(parts), (0, 0, 0, padding))[None]

        return States(None if self._target.aux_layers is None else joined(features), joined(last))

    def _forward(self, tokens: Tensor, media: Media | None = None, **told: object) -> States:
        """One forward of tokens [B, T]; `told`: what else it is."""
        target = self._target
        model = target.decoder
        if media is not None:
            model, told = target.model.base_model, told | arguments(target.model, media)
        with target.captured() as found, explained_media(media):
            last: Tensor = model(input_ids=tokens, use_cache=False, **told).last_hidden_state
        if not torch.isfinite(last).all():
            raise TargetError("the target's hidden states are not finite", hint=HINT)
        return States(target.features(found, tokens), last)


def masks_keep_apart(model: PreTrainedModel) -> bool:
    """Whether samples in one sequence stay apart by masks and positions: where every layer attends, and nothing else.

    Some models do otherwise than their configuration says (Moshi, Doge): two samples are tried.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or MASKED)
    rope = getattr(text, "rope_parameters", None) or {}
    if not (type(model).is_backend_compatible() and kinds <= MASKED and "mrope_section" not in rope):
        return False
    decoder = decoder_of(model)
    tokens = torch.arange(2 * TRIED, device=model.device)[None] % text.vocab_size
    sample_ids = torch.arange(2 * TRIED, device=model.device)[None] // TRIED
    mask = attention_masks(model.config, sample_ids, model.dtype)
    with torch.no_grad():
        both = decoder(input_ids=tokens, position_ids=tokens % TRIED, attention_mask=mask, use_cache=False)
        alone = decoder(input_ids=tokens[:, TRIED:], use_cache=False)
    found, expected = both.last_hidden_state[:, TRIED:].float(), alone.last_hidden_state.float()
    return bool((found - expected).norm() <= AGREEMENT[model.dtype] * expected.norm())


def similar(lengths: list[int]) -> Iterator[list[int]]:
    """Groups of samples, by number, the longest first; in each the shortest has half of the longest one's tokens."""
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and 2 * lengths[number] < lengths[group[0]]:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def attention_masks(config: PretrainedConfig, sample_ids: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Masks that keep samples apart, as transformers' decoders take them: one, or one for each kind of layer.

    `sample_ids` int64 [1, N]. A mask [1, 1, N, N] is added to scores; positions see those before them in their sample,
    within the sliding window where the layers have one.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or None
    kinds = set(getattr(text, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    windows = {"full_attention": None, "sliding_attention": window}
    masks = {kind: visible_within(sample_ids, dtype, windows[kind]) for kind in sorted(kinds)}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def visible_within(sample_ids: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """The bias that is added to the scores of positions over positions: [1, 1, N, N]."""
    size = sample_ids.shape[1]
    at = torch.arange(size, device=sample_ids.device)
    seen = (sample_ids[0][:, None] == sample_ids[0]) & (at <= at[:, None])
    if window is not None:
        seen &= at > at[:, None] - window
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def load_final_norm(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The module of the target's decoder that gives its last states, as transformers builds it; on the CPU.

    Only its weights are read. Raises `DraftkitError` when there is no such module or it has no weights.
    """
    (norm,) = load_modules(folder, lambda model: [final_norm(model)], dtype)
    return norm


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm that follows the decoder's layers. Raises `TargetError` where there is none."""
    decoder = decoder_of(model)
    parts = list(decoder.named_children())
    layers = next(number for number, (_, part) in enumerate(parts) if isinstance(part, nn.ModuleList))
    for number, (name, part) in enumerate(parts):
        # OPT's is made before the layers, where others have norms of their embeddings.
        if "norm" in type(part).__name__.lower() and (number > layers or "final" in name):
            return part
    raise TargetError(f"{type(decoder).__name__} does not end in a norm")
