"""The target as a training run needs it, whole or its ends alone, and its hidden states for a row of packed samples.

N tokens of a row, F width of the captured features, H target width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftkit.data.samples import Sample
from draftkit.errors import DraftkitError, TargetError
from draftkit.hub.locate import locate
from draftkit.io.tensors import open_checkpoint
from draftkit.models.devices import use_device
from draftkit.models.finite import HINT, first_non_finite, require_finite
from draftkit.models.positions import Positions
from draftkit.models.remote_code import trusts_remote_code
from draftkit.models.target import AuxLayers, Target, load_target, read_target_config

ATTENTION = "sdpa"  # takes masks, which keep packed samples apart


def load_training_target(source: str, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A target (path, Hub id or `zoo:target`) that can be run on packed rows; `device` becomes the current one.

    Raises `DraftkitError`.
    """
    return load_target(locate(source).path, device=device, dtype=dtype, attention=ATTENTION)


def check_lengths(samples: Iterable[Sample], config: PretrainedConfig) -> None:
    """Raise `DraftkitError` naming the first sample that is too long to be packed for the target."""
    positions = Positions.of(config)
    limit = (
        "the target's positions" if positions.longest == positions.most else "beyond them its rope changes (longrope)"
    )
    for sample in samples:
        if len(sample) > positions.longest:
            raise DraftkitError(
                f"sample {sample.id} has {len(sample)} tokens",
                expected=f"at most {positions.longest}: {limit}",
                hint=f"prepare the data with --max-length {positions.longest}",
            )


def load_target_ends(source: str, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A target with its embedding and output layer; its decoder layers stay on torch's meta device. `device` becomes
    the current one.

    For runs that read the target's states from files. Raises `DraftkitError`.
    """
    folder = locate(source).path
    config = read_target_config(folder)
    use_device(device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=trusts_remote_code()
        )
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = config.get_text_config().tie_word_embeddings
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in (embedding,) if tied else (embedding, output):
        module.weight = _loaded(folder, names[id(module.weight)], device, dtype)
    if tied:
        output.weight = embedding.weight
    return model.eval().requires_grad_(False)


def _loaded(folder: Path, name: str, device: str, dtype: torch.dtype) -> nn.Parameter:
    tensors = open_checkpoint(folder)
    if name not in tensors:
        raise TargetError(f"the target's checkpoint has no tensor {name}", where=folder, hint="train without --states")
    weight = tensors[name].load().to(device, dtype)
    require_finite([(name, weight)], folder)
    return nn.Parameter(weight, requires_grad=False)


class States(NamedTuple):
    """`features` [1, N, F], None where nothing is captured; `last` [1, N, H], after the final norm."""

    features: Tensor | None
    last: Tensor


class OnlineStates:
    """Runs the target, loaded by `load_training_target`."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None):
        self._target = Target(model, aux_layers)

    @torch.no_grad()
    def states(self, tokens: Tensor, positions: Tensor, sample_ids: Tensor) -> States:
        target = self._target
        inputs = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": attention_masks(target.model.config, sample_ids, target.dtype),
        }
        with target.captured() as found:
            output = target.decoder(**inputs, use_cache=False)
        last = output.last_hidden_state
        if not torch.isfinite(last).all():
            place = first_non_finite(target.decoder, lambda: target.decoder(**inputs, use_cache=False))
            began = "" if place is None else f", from {place[0]} on, at position {int(positions[0, place[1]])}"
            raise TargetError(f"the target's hidden states are not finite{began}", hint=HINT)
        aux_layers = target.aux_layers
        return States(None if aux_layers is None else torch.cat([found[i] for i in aux_layers.states], dim=-1), last)


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
    """[1, 1, N, N]: what is added to the scores of positions over positions."""
    size = sample_ids.shape[1]
    at = torch.arange(size, device=sample_ids.device)
    seen = (sample_ids[0][:, None] == sample_ids[0]) & (at <= at[:, None])
    if window is not None:
        seen &= at > at[:, None] - window
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
