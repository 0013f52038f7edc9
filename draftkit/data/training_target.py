"""The target as a training run needs it: whole, or its embedding and output layer alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftkit.data.samples import Document
from draftkit.errors import DraftkitError, TargetError
from draftkit.hub.locate import locate
from draftkit.io.tensors import open_checkpoint
from draftkit.models.devices import use_device
from draftkit.models.finite import require_finite
from draftkit.models.positions import Positions
from draftkit.models.remote_code import trusts_remote_code
from draftkit.models.target import load_target, read_target_config

ATTENTION = "sdpa"  # takes masks, which keep packed documents apart


def load_training_target(source: str, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A target (path, Hub id or `zoo:target`) that can be run on packed rows; `device` becomes the current one.

    Raises `DraftkitError`.
    """
    return load_target(locate(source).path, device=device, dtype=dtype, attention=ATTENTION)


def check_lengths(documents: Iterable[Document], config: PretrainedConfig) -> None:
    """Raise `DraftkitError` naming the first document that is too long to be packed for the target."""
    positions = Positions.of(config)
    limit = (
        "the target's positions" if positions.longest == positions.most else "beyond them its rope changes (longrope)"
    )
    for document in documents:
        if len(document) > positions.longest:
            raise DraftkitError(
                f"document {document.id} has {len(document)} tokens",
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
