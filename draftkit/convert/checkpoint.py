"""A foreign checkpoint: its config, and handles on its tensors. No weight is read to open one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftkit.errors import FormatError
from draftkit.hub import Located
from draftkit.layout.jsonfile import read_object
from draftkit.layout.tensors import TensorHandle, open_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """What a format recognises and plans from."""

    source: Located
    config: dict[str, object]
    tensors: dict[str, TensorHandle]

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

    def count_layers(self, pattern: str = r"layers\.(\d+)\.") -> int:
        """How many decoder layers the tensor names number."""
        indices = {int(match[1]) for name in self.tensors if (match := re.match(pattern, name))}
        return len(indices)


def open_source(source: Located) -> Checkpoint:
    """Open a located checkpoint. Raises `SourceError`/`FormatError` for what is missing or damaged."""
    return Checkpoint(source, read_object(source.path / "config.json"), open_checkpoint(source.path))
