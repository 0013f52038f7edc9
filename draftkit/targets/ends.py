"""The two ends of a target, without what lies between: its embedding and its output layer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.errors import TargetError
from draftkit.io.tensors import gguf_file, open_checkpoint
from draftkit.targets.devices import use_device
from draftkit.targets.finite import require_finite
from draftkit.targets.parts import require_plain
from draftkit.targets.pretrained import empty_model, load_pretrained, read_model_config, stored_names


class TargetEnds(PreTrainedModel):
    """A target that cannot be run: only its embedding and its output layer are there.

    `size`: parameters of the whole target.
    """

    def __init__(self, config: PretrainedConfig, embedding: nn.Module, output: nn.Module, size: int):
        super().__init__(config)
        self.embedding = embedding
        self.output = output
        self._size = size

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def num_parameters(self, *_: object, **__: object) -> int:
        return self._size


def load_ends(folder: Path, config: PretrainedConfig | None = None, *, device: str, dtype: torch.dtype) -> TargetEnds:
    """The ends of the target in a folder, of any architecture that transformers can build; nothing else is read, but
    of a GGUF file. `config` is that of `read_model_config`, where it has been read.

    `device` becomes the current one. Raises `DraftkitError`.
    """
    config = read_model_config(folder, whole=False) if config is None else config
    if gguf_file(folder) is not None:
        whole = load_pretrained(folder, config, device="cpu", dtype=dtype, attention=None)
        ends = TargetEnds(config, whole.get_input_embeddings(), whole.get_output_embeddings(), whole.num_parameters())
        return ends.to(device).eval()
    use_device(device)
    model = empty_model(config, dtype)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output.weight is embedding.weight
    tensors = open_checkpoint(folder)
    stored = stored_names(model, tensors)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for end in (embedding,) if tied else (embedding, output):
        missing = [names[parameter] for parameter in end.parameters() if names[parameter] not in stored]
        if missing:
            raise TargetError(f"the target's checkpoint has no tensor {missing[0]}", where=folder)
        weights = {own: tensors[stored[names[parameter]]] for own, parameter in end.named_parameters()}
        require_plain(weights.values(), tensors, folder)
        end.to_empty(device=device)
        model._init_weights(end)  # what is no weight, as the scale of Gemma's embedding
        loaded = {own: handle.load().to(device, dtype) for own, handle in weights.items()}
        require_finite(((weights[own].name, tensor) for own, tensor in loaded.items()), folder)
        end.load_state_dict(loaded, strict=True, assign=True)
    if tied:
        output.weight = embedding.weight
    ends = TargetEnds(config, embedding, output, model.num_parameters())
    return ends.eval().requires_grad_(False)
