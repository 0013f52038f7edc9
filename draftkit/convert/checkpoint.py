"""A foreign checkpoint: its config, and handles on its tensors. No weight is read to open one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftkit.engines.speculators import KIND
from draftkit.errors import FormatError, SourceError, TargetError
from draftkit.hub.locate import Located, locate
from draftkit.io.gguf_file import read_gguf
from draftkit.io.handles import TensorHandle
from draftkit.io.jsonfile import read_object
from draftkit.io.safetensors_file import read_safetensors
from draftkit.io.tensors import open_checkpoint
from draftkit.io.torch_file import read_torch, read_torch_tensor
from draftkit.layout.block import MASK_FILE, NESTED
from draftkit.layout.stored_weights import StoredWeight
from draftkit.layout.target import ADAPTER_CONFIG, ADAPTER_PREFIX, TargetFacts

PROJECTION_FILE = "warp_model.bin"  # PARD-2 keeps the projection of the target's features beside the language model
HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class Adapter:
    """What makes a checkpoint a peft adapter: its `adapter_config.json`, and the model that it changes."""

    config: dict[str, object]
    base: Located


@dataclass(frozen=True)
class Checkpoint:
    """What a format recognizes and plans from.

    With an `adapter`, `config` is its base model's, and `tensors` are those of both; the adapter's begin with
    `ADAPTER_PREFIX`. The `config` of a GGUF file is its metadata, an object for each first word of its keys.
    `quantized`: the weights, by module, that are quantized and seen here as plain (`convert/quantization.py`).
    """

    source: Located
    config: dict[str, object]
    tensors: dict[str, TensorHandle]
    adapter: Adapter | None = None
    quantized: Mapping[str, StoredWeight] = field(default_factory=dict)

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
    def config_path(self) -> Path:
        """The file that `config` was read from."""
        path = (self.adapter.base if self.adapter else self.source).path
        return path if path.is_file() else path / "config.json"

    @property
    def gguf_architecture(self) -> str | None:
        """What a GGUF file calls its model; None of anything else."""
        general = self.config.get("general")
        return str(general.get("architecture")) if self.source.path.is_file() and isinstance(general, dict) else None

    @property
    def architectures(self) -> tuple[str, ...]:
        """The `architectures` of the config."""
        names = self.config.get("architectures")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    @property
    def projector(self) -> str | None:
        """The head of a block drafter, as its nested config names it."""
        nested = self.config.get(NESTED)
        named = nested.get("projector_type") if isinstance(nested, dict) else None
        return named if isinstance(named, str) else None

    @property
    def kind_names(self) -> tuple[str, ...]:
        """What the config calls its draft: its classes, its type in the speculators library, its projector."""
        stated = (self.config.get(KIND), self.projector)
        return (*self.architectures, *(name for name in stated if isinstance(name, str)))

    @property
    def is_causal_lm(self) -> bool:
        """Whether the tensors are those of a whole language model with Llama's names."""
        return {"model.embed_tokens.weight", "model.norm.weight"} <= self.tensors.keys()

    def check_target(self, target: TargetFacts, *, hidden_size: int, vocab_size: int) -> None:
        """Raise `TargetError` when the draft was made for a target of other sizes."""
        problems = []
        if target.hidden_size != hidden_size:
            problems.append(f"hidden size: the draft reads {hidden_size}, the target has {target.hidden_size}")
        if target.vocab_size != vocab_size:
            problems.append(f"vocabulary: the draft has {vocab_size} tokens, the target {target.vocab_size}")
        if problems:
            raise TargetError(
                f"{self.source.name} is not a draft for {target.name}:\n    " + "\n    ".join(problems),
                where=self.source.path,
                hint="pass the target that the draft was trained for with --target",
            )


def open_source(source: Located) -> Checkpoint:
    """Open a located checkpoint. Raises `SourceError`/`FormatError` for what is missing or damaged."""
    if source.path.is_file():
        return _open_gguf(source)
    if (source.path / ADAPTER_CONFIG).is_file():
        return _open_adapter(source)
    config = dict(source.config)
    return Checkpoint(source, config, _open_tensors(source.path) | _mask_embedding(source.path, config))


def _open_gguf(source: Located) -> Checkpoint:
    file = read_gguf(source.path)
    config: dict[str, dict[str, object]] = {}
    for key, value in file.metadata.items():
        holder, _, name = key.partition(".")
        config.setdefault(holder, {})[name] = value
    return Checkpoint(source, dict(config), _by_name(file.tensors))


def _open_tensors(folder: Path) -> dict[str, TensorHandle]:
    """The weights of a folder. Where Medusa's heads lie apart, what lies beside them is their target's."""
    heads = next((folder / name for name in HEADS_FILES if (folder / name).is_file()), None)
    if heads is not None:
        return _by_name(read_safetensors(heads) if heads.suffix == ".safetensors" else read_torch(heads))
    tensors = open_checkpoint(folder)
    if (folder / PROJECTION_FILE).is_file():
        tensors |= _by_name(read_torch(folder / PROJECTION_FILE))
    return tensors


def _mask_embedding(folder: Path, config: dict[str, object]) -> dict[str, TensorHandle]:
    """The embedding of a block drafter's mask that lies apart (MiMo). Raises `FormatError` for one of another token."""
    path = folder / MASK_FILE
    if not path.is_file():
        return {}
    handle, numbers = read_torch_tensor(path, "embedding")
    nested = config.get(NESTED)
    stated = (nested if isinstance(nested, dict) else config).get("mask_token_id")
    if numbers.get("mask_token_id", stated) != stated:
        raise FormatError(
            f"{MASK_FILE} is for token {numbers['mask_token_id']}, and config.json has mask_token_id {stated}",
            where=path,
            hint="fetch the checkpoint again",
        )
    return _by_name([handle])


def _open_adapter(source: Located) -> Checkpoint:
    """A peft adapter together with the base model that its config names."""
    path = source.path / ADAPTER_CONFIG
    config = read_object(path)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not isinstance(revision, str | None):
        raise FormatError(
            f"base_model_name_or_path is {name!r} and revision {revision!r}",
            where=path,
            expected="the Hub id or path of the model that the adapter was trained on",
        )
    changes = adapter_tensors(source.path)
    if foreign := [handle.name for handle in changes if not handle.name.startswith(ADAPTER_PREFIX)]:
        raise FormatError(f"the adapter holds {', '.join(foreign)}", where=path, expected=f"names in {ADAPTER_PREFIX}…")
    try:
        base = locate(name, revision=revision)
    except SourceError as error:
        raise SourceError(
            f"the adapter's base model cannot be had: {error}",
            where=f"{path}: base_model_name_or_path",
            hint="correct it there, if the model has moved",
        ) from error
    model = dict(base.config)
    model.pop("draftkit", None)  # of a base that is a unified draft
    return Checkpoint(source, model, _open_tensors(base.path) | _by_name(changes), Adapter(config, base))


def open_adapter(source: Located, base: Located) -> Checkpoint:
    """A peft adapter together with the model that a user says it is on. Raises `SourceError`/`FormatError`."""
    config = read_object(source.path / ADAPTER_CONFIG)
    tensors = _open_tensors(base.fetch()) | _by_name(adapter_tensors(source.path))
    return Checkpoint(source, dict(base.config), tensors, Adapter(config, base))


def adapter_tensors(folder: Path) -> list[TensorHandle]:
    """The tensors of an adapter; none is read."""
    if (folder / "adapter_model.safetensors").is_file() or not (folder / "adapter_model.bin").is_file():
        return read_safetensors(folder / "adapter_model.safetensors")
    return read_torch(folder / "adapter_model.bin")


def _by_name(handles: list[TensorHandle]) -> dict[str, TensorHandle]:
    return {handle.name: handle for handle in handles}
