"""Adapters on a draft (`peft`): LoRA and DoRA on its linear layers.

What a parallel draft has learned about its mask, that is the mask state and the embedding of the mask token, is trained
as it is and saved with the adapter; so are the parts that a block drafter adds to DFlash's, which begin as nothing: the
tables of DSpark's Markov head and of DFlash2's selector, and DFlash2's convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy, deepcopy
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftkit.errors import DraftkitError
from draftkit.hub.locate import Located
from draftkit.layout.target import ADAPTER_PREFIX
from draftkit.train.settings import LoraSettings
from draftkit.train.sharding import state_of

ADAPTER = "default"
WEIGHTS_FILE = "adapter_model.safetensors"
HEAD = "lm_head"  # left as it is: it is most of a draft's weights
LEARNED = (
    "mask_hidden", "embed_tokens.weight",
    "markov_w1.weight", "markov_w2.weight", "_codebook", "base_kernel", "kernel_projection.weight",
)  # fmt: skip


def add_adapters(draft: nn.Module, settings: LoraSettings, *, base: Located | None, parallel: bool) -> None:
    """Freeze `draft` and add adapters to its linear layers, in place. `parallel`: `LEARNED` stays free.

    `base`: where the draft was before, which the adapter names; None for a new one.

    Raises `DraftkitError` when no linear layer has one of the names asked for.
    """
    borrowed = {id(p) for p in draft.parameters() if not p.requires_grad}
    learned = {id(p) for p in _learned(draft)} - borrowed if parallel else set()
    linear = [
        name
        for name, module in draft.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in borrowed | learned and HEAD not in name.split(".")
    ]
    targets = [name for name in linear if not settings.targets or name.endswith(settings.targets)]
    if not targets:
        raise DraftkitError(
            f"no linear layer of the draft is named {', '.join(settings.targets)}",
            expected=", ".join(sorted({name.rpartition(".")[2] for name in linear})),
        )
    configuration = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_dora=settings.dora,
        target_modules=targets,
        base_model_name_or_path=None if base is None else _name(base),
        revision=None if base is None else base.revision,
    )
    inject_adapter_in_model(configuration, draft, ADAPTER)
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_("lora_" in name or id(parameter) in learned)


def _name(base: Located) -> str:
    """A name by which a model is found again from another folder: a path is made absolute."""
    return base.name if base.repo is not None or base.name.startswith("zoo:") else str(base.path.absolute())


def _learned(draft: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a parallel draft has beside its layers."""
    for name, parameter in draft.named_parameters():
        if name.endswith(LEARNED):
            yield parameter


def has_adapters(draft: nn.Module) -> bool:
    return any(isinstance(module, LoraLayer) for module in draft.modules())


@torch.no_grad()
def merged_state(draft: nn.Module) -> dict[str, Tensor]:
    """The `state_dict` that the draft would have without adapters, their effect in its weights."""
    if not has_adapters(draft):
        return state_of(draft)
    state = {name: tensor for name, tensor in state_of(draft).items() if "lora_" not in name}
    for name, module in draft.named_modules():
        if isinstance(module, LoraLayer):
            merged = deepcopy(module)  # merging and taking back would round the weights
            merged.merge()
            state[f"{name}.base_layer.weight"] = merged.get_base_layer().get_parameter("weight")
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}


def save_adapter(draft: nn.Module, out: Path) -> None:
    """Write the adapter as `peft` does, into a new folder."""
    out.mkdir()
    state = get_peft_model_state_dict(draft, state_of(draft), adapter_name=ADAPTER)
    learned = {name: p for name, p in draft.named_parameters() if p.requires_grad and "lora_" not in name}
    tensors = {
        f"{ADAPTER_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in (state | learned).items()
    }
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    configuration = copy(cast("dict[str, LoraConfig]", draft.peft_config)[ADAPTER])
    configuration.inference_mode = True
    configuration.modules_to_save = sorted({name.rpartition(".")[0] for name in learned} - {""}) or None
    configuration.save_pretrained(str(out))


def load_adapter(draft: nn.Module, folder: Path) -> None:
    """Take over the adapter that `save_adapter` wrote."""
    tensors = {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    own = dict(draft.named_parameters())
    with torch.no_grad():
        for name in [name for name in tensors if name in own]:
            own[name].copy_(tensors.pop(name))
    set_peft_model_state_dict(draft, tensors, adapter_name=ADAPTER)
