"""What a fake checkpoint is, and how it is written to disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    """One checkpoint as its trainer writes it.

    - `format`: the module of draftkit that must recognise it. `method`: what it becomes.
    - `tensors`: makes the main weights in a dtype. `side_files`: file name → tensors of weights kept apart.
    - `weights`: the file of the main weights; `.bin` and `.pt` are written by torch.save.
    - `json_files`: other JSON files beside config.json.
    - `count`: how many tensors there are in all (Appendix A of the facts).
    - `facts`: architecture fields of the resulting spec → value; nested ones with dots (`decoder.rope.base`).
    - `dropped`: tensors that the layout does not keep. `overrides`: what `--set` must give.
    - `target`: changes to the pico target's config, None for no target. `lossy`: the layout cannot hold all of it.
    - `back`: whether writing it back gives the same tensors; False only with a reason in a comment.
    """

    name: str
    format: str
    method: str
    config: dict[str, Any]
    tensors: Callable[[torch.dtype], Tensors]
    count: int
    facts: dict[str, Any] = field(default_factory=dict)
    weights: str = "model.safetensors"
    side_files: Mapping[str, Callable[[torch.dtype], Tensors]] = field(default_factory=dict)
    json_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    target: dict[str, Any] | None = field(default_factory=dict)
    lossy: bool = False
    back: bool = True

    def all_tensors(self, dtype: torch.dtype = torch.float16) -> Tensors:
        """The tensors of every file."""
        tensors = self.tensors(dtype)
        for make in self.side_files.values():
            tensors |= make(dtype)
        return tensors

    def write(self, folder: Path, dtype: torch.dtype = torch.float16, shards: int = 1) -> Path:
        """Write the checkpoint; `shards` > 1 splits safetensors weights with an index, as transformers does."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in {"config.json": self.config, **self.json_files}.items():
            (folder / name).write_text(json.dumps(value))
        for file, make in {self.weights: self.tensors, **self.side_files}.items():
            write_weights(folder / file, make(dtype), shards if file == "model.safetensors" else 1)
        return folder


def write_weights(path: Path, tensors: Tensors, shards: int = 1) -> None:
    if path.suffix != ".safetensors":
        torch.save(tensors, path)
    elif shards == 1:
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        _write_shards(path.parent, tensors, shards)


def _write_shards(folder: Path, tensors: Tensors, shards: int) -> None:
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Weights: norms around 1, matrices small."""
    values = torch.randn(shape, generator=generator)
    return (1 + 0.1 * values if len(shape) == 1 else 0.2 * values).to(dtype)


def randoms(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> Tensors:
    """Seeded weights of the given shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: random(shape, dtype, generator) for name, shape in shapes.items()}
