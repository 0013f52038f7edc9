"""LoRA adapters (peft) of a target, merged into its weights in memory: what an engine computes for an adapter's users.

The weights are those of the model that `convert` makes of base and adapter, bit for bit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from draftkit.convert.checkpoint import adapter_tensors, open_adapter
from draftkit.convert.formats.causal_lm.causal_lm_lora import EMBEDDING_OR_HEAD, changed_weights
from draftkit.errors import TargetError, command
from draftkit.hub.locate import Located, locate
from draftkit.io.jsonfile import read_object
from draftkit.layout.target import ADAPTER_CONFIG, ADAPTER_PREFIX
from draftkit.targets.pretrained import stored_names
from draftkit.targets.text_alone import is_left_out

# Keys of peft's that change what is no weight of a layer: drafts read the target's embedding and its output layer.
UNMERGED = ("modules_to_save", "trainable_token_indices")


@dataclass(frozen=True)
class TargetAdapter:
    """An adapter on a target, its config read and judged; no weight has been read. `name` is what the user calls it."""

    name: str
    located: Located
    base: Located

    @classmethod
    def of(cls, name: str, base: Located) -> TargetAdapter:
        """Raises `TargetError` for what is no adapter, for one of another model, and for one that changes embeddings,
        the output layer or the vocabulary."""
        located = locate(name)
        path = located.path / ADAPTER_CONFIG
        if not path.is_file():
            raise TargetError(f"{name} is no adapter: it has no {ADAPTER_CONFIG}", where=located.path)
        config = read_object(path)
        _check_base(config, base, name, str(path))
        for key in UNMERGED:
            if config.get(key):
                raise TargetError(
                    f"{key} is {config[key]!r}: the adapter has weights of its own in the place of the target's",
                    where=f"{path}: {key}",
                    hint="merge it with peft, and pass the merged model as the target",
                )
        adapter = cls(name, located, base)
        adapter._check_tables()
        return adapter

    def _check_tables(self) -> None:
        for handle in adapter_tensors(self.located.path):
            module = re.sub(r"\.(lora_\w+|base_layer)(\.weight)?$", "", handle.name.removeprefix(ADAPTER_PREFIX))
            if EMBEDDING_OR_HEAD.fullmatch(f"{module}.weight"):
                raise TargetError(
                    f"{handle.name} changes the target's embedding or output layer, which drafts share",
                    where=handle.origin,
                    hint="engines give drafts those of the target without adapters: measure the merged model",
                )

    def merge_into(self, model: PreTrainedModel) -> PreTrainedModel:
        """Add the adapter to the weights of a model of its base, but for those of what is left out of it. Raises
        `FormatError` where it does not fit these."""
        changed = changed_weights(open_adapter(self.located, self.base))
        names = {stored: name for name, stored in stored_names(model, changed).items()}
        own = dict(model.named_parameters())
        for stored, handle in changed.items():
            if is_left_out(model, stored):
                continue
            parameter = own.get(names.get(stored, stored))
            if parameter is None or parameter.shape != handle.shape or parameter.is_meta:
                raise TargetError(
                    f"{stored}, which the adapter {self.name} changes, is no weight of its own in the loaded model",
                    where=self.located.path,
                    hint=f"{command('draftkit', 'convert', self.name, 'MERGED')} merges it: pass MERGED as the target",
                )
            with torch.no_grad():
                parameter.copy_(handle.load())
        return model

    def mark(self, digest: str) -> str:
        """The digest of the target together with the adapter, from that of the target alone."""
        joint = hashlib.sha256(digest.encode())
        joint.update((self.located.path / ADAPTER_CONFIG).read_bytes())
        for handle in sorted(adapter_tensors(self.located.path), key=lambda handle: handle.name):
            joint.update(f"\0{handle.name}\0{handle.dtype}\0{list(handle.shape)}\0".encode())
            for chunk in handle.chunks():
                joint.update(chunk)
        return joint.hexdigest()


def _check_base(config: Mapping[str, object], base: Located, name: str, path: str) -> None:
    """Raise `TargetError` where the adapter says that it is of another model."""
    stated = config.get("base_model_name_or_path")
    known = {base.name, base.repo or base.name, str(base.path)}
    last = {_last(one) for one in known}
    if isinstance(stated, str) and stated and stated not in known and _last(stated) not in last:
        raise TargetError(
            f"{name} is an adapter of {stated}, and the target is {base.name}",
            where=f"{path}: base_model_name_or_path",
            expected=base.name,
            hint=f"pass {command('--target', stated)}; where it is the same model under another name, correct it there",
        )


def _last(name: str) -> str:
    return re.split(r"[/:\\]", name.rstrip("/"))[-1].partition("@")[0].lower()
