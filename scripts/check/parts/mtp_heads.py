"""New multi-token prediction heads for targets that have none: what the makers of targets train and publish."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.mtp import QWEN, head_kind
from draftkit.models.mtp import MtpModel, stored_mtp


def new_head(config: PretrainedConfig, modules: int = 1) -> MtpModel:
    """A head of so many modules as its classes make it, of a target with this configuration."""
    kind = head_kind(config.to_dict())
    assert kind is not None
    spec = MtpSpec(
        config={},
        weights=(),
        vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        num_modules=modules,
        prefixes=kind.prefixes(modules, config.num_hidden_layers),
        parts=kind.parts,
        concatenation=kind.concatenation,
        hidden_state=kind.hidden_state,
        feedback=kind.feedback,
        zero_first_embedding=kind.zero_first_embedding,
        modules=kind.modules,
    )
    return MtpModel(spec, config, "sdpa", torch.float32)


def add_head(head: MtpModel, folder: Path) -> None:
    """Write a head into the folder of its target, of one weight file, in the dtype of the target's tensors."""
    path = folder / "model.safetensors"
    target = load_file(path)
    dtype = next(iter(target.values())).dtype
    own = {name: tensor.to(dtype).contiguous() for name, tensor in stored_mtp(head, head.state_dict()).items()}
    save_file(target | own, path, {"format": "pt"})
    count = "mtp_num_hidden_layers" if head.spec.prefixes == (QWEN.prefix,) else "num_nextn_predict_layers"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {count: head.spec.num_modules}, indent=2))
