"""A foreign checkpoint: its config, and handles on its tensors. No weight is read to open one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import FormatError
from draftkit.hub import Located, locate
from draftkit.layout.handles import TensorHandle
from draftkit.layout.jsonfile import read_object
from draftkit.layout.safetensors_file import read_safetensors
from draftkit.layout.tensors import open_checkpoint
from draftkit.layout.torch_file import read_torch

PROJECTION_FILE = "warp_model.bin"  # PARD-2 keeps the projection of the target's features beside the language model


@dataclass(frozen=True)
class Checkpoint:
    """What a format recognises and plans from. `adapter`: the `adapter_config.json` of a peft adapter."""

    source: Located
    config: dict[str, object]
    tensors: dict[str, TensorHandle]
    adapter: dict[str, object] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises `FormatError` when the checkpoint lacks it."""
        if name not in self.tensors:
            raise FormatError(
                f"tensor {name} is missing",
                where=self.source.path,
                hint="the download may be incomplete: fetch the checkpoint again",
            )
        return self.tensors[name].shape

    def matrix(self, name: str) -> tuple[int, int]:
        """(rows, columns) of a two-dimensional tensor. Raises `FormatError` for any other."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise FormatError(f"tensor {name} has shape {list(shape)}", where=self.source.path, expected="a matrix")
        return shape[0], shape[1]

    def count(self, pattern: str) -> int:
        """How many different numbers the first group of `pattern` finds at the start of tensor names."""
        return len({int(match[1]) for name in self.tensors if (match := re.match(pattern, name))})

    def count_layers(self, pattern: str = r"layers\.(\d+)\.") -> int:
        """How many decoder layers the tensor names number."""
        return self.count(pattern)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The `architectures` of the config."""
        names = self.config.get("architectures")
        return tuple(map(str, names)) if isinstance(names, list) else ()


def open_source(source: Located) -> Checkpoint:
    """Open a located checkpoint. Raises `SourceError`/`FormatError` for what is missing or damaged."""
    if (source.path / "adapter_config.json").is_file():
        return _open_adapter(source)
    config = read_object(source.path / "config.json")
    tensors = open_checkpoint(source.path)
    if (source.path / PROJECTION_FILE).is_file():
        tensors |= {handle.name: handle for handle in read_torch(source.path / PROJECTION_FILE)}
    return Checkpoint(source, config, tensors)


def _open_adapter(source: Located) -> Checkpoint:
    """A peft adapter together with the base model that its config names."""
    path = source.path / "adapter_config.json"
    adapter = read_object(path)
    name, revision = adapter.get("base_model_name_or_path"), adapter.get("revision")
    if not isinstance(name, str) or not isinstance(revision, str | None):
        raise FormatError(
            f"base_model_name_or_path is {name!r} and revision {revision!r}",
            where=path,
            expected="the Hub id or path of the model that the adapter was trained on",
        )
    base = locate(name, revision=revision)
    tensors = open_checkpoint(base.path) | {handle.name: handle for handle in _adapter_tensors(source.path)}
    return Checkpoint(source, read_object(base.path / "config.json"), tensors, adapter)


def _adapter_tensors(folder: Path) -> list[TensorHandle]:
    if (folder / "adapter_model.safetensors").is_file() or not (folder / "adapter_model.bin").is_file():
        return read_safetensors(folder / "adapter_model.safetensors")
    return read_torch(folder / "adapter_model.bin")
