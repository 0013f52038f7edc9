"""A target's final norm alone, for states that were taken before it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftkit.errors import TargetError
from draftkit.io.tensors import open_checkpoint
from draftkit.models.footprint import RECORDING, Recorder
from draftkit.models.target import check_config, read_config


def load_final_norm(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The module of the target's decoder that gives its last states, as transformers builds it; on the CPU.

    Only its weights are read. Raises `DraftkitError` when there is no such module or it has no weights.
    """
    name, norm = _final_norm(folder)
    tensors = open_checkpoint(folder)
    weights = {}
    for part in norm.state_dict():
        # Checkpoints differ in what stands before the decoder's own names.
        ending = f"{name}.{part}"
        found = [n for n in tensors if f".{n}".endswith(f".{ending}") and ".layers." not in f".{n}"]
        if len(found) != 1:
            raise TargetError(f"the target has {len(found)} tensors …{ending}", where=folder, expected="its final norm")
        weights[part] = tensors[found[0]].load().to(dtype)
    norm.load_state_dict(weights, strict=True, assign=True)
    return norm.eval().requires_grad_(False)


def _final_norm(folder: Path) -> tuple[str, nn.Module]:
    """The part of the decoder whose output is the decoder's, with its name; without memory for its weights."""
    config = read_config(folder)
    check_config(config)
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation=RECORDING)
        decoder: nn.Module = model.get_decoder()
        outputs: dict[str, object] = {}

        def keep(part: nn.Module, _arguments: object, output: object) -> None:
            outputs[names[part]] = output

        names = {part: name for name, part in decoder.named_children()}
        hooks = [part.register_forward_hook(keep) for part in names]
        row = torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode():
            last = decoder(input_ids=row, position_ids=row, use_cache=False, kv=Recorder()).last_hidden_state
    for hook in hooks:
        hook.remove()
    for name, output in outputs.items():
        if output is last:
            return name, decoder.get_submodule(name)
    raise TargetError(f"{type(decoder).__name__} does not end in a norm", where=folder)
