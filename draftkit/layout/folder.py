"""A unified draft folder, read: config.json, weights, and tokenizer files where the draft has any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from draftkit.errors import LayoutError, SourceError, command
from draftkit.io.atomic import restore
from draftkit.io.handles import TensorHandle
from draftkit.io.jsonfile import read_object
from draftkit.io.records import from_dict
from draftkit.io.shown import Rows, Shown
from draftkit.io.tensors import open_checkpoint
from draftkit.layout.provenance import Provenance, facts_shown
from draftkit.layout.quantization import MODELOPT_FILE, name_of_format, refuse_unread
from draftkit.layout.schema import Shape
from draftkit.layout.spec import DraftSpec
from draftkit.layout.stored_weights import modules_with_scales, plain_view

Read = TypeVar("Read")

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "tekken.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Draft(Shown):
    """A unified draft; no weight has been read yet.

    `path` is its folder, or that of the checkpoint it will be converted from. `files`: its tokenizer, where it is a
    causal language model.
    """

    path: Path
    spec: DraftSpec
    provenance: Provenance
    tensors: dict[str, TensorHandle]
    files: tuple[Path, ...] = ()
    _kept: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def kept(self, read: Callable[[Draft], Read]) -> Read:
        """What `read` reads of the draft, once, when it is first asked for; it is kept with the draft."""
        if read not in self._kept:
            self._kept[read] = read(self)
        found: Read = self._kept[read]
        return found

    @property
    def plain_tensors(self) -> dict[str, tuple[str, Shape]]:
        """Dtype and shape of its tensors by name, where a quantized weight is the plain one that it stands for."""
        found = {name: (handle.dtype, handle.shape) for name, handle in self.tensors.items()}
        return found if self.spec.quantization is None else plain_view(found, self.spec.quantization)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors as they lie."""
        return sum(handle.nbytes for handle in self.tensors.values())

    def shown(self) -> Iterator[str | Rows]:
        """What it is, and its facts."""
        yield f"{self.path.name}: {self.spec.method}, {len(self.tensors)} tensors"
        yield facts_shown(self.provenance.facts)


def is_unified(folder: Path) -> bool:
    """Whether the folder's config.json has a `draftkit` block. Anything else is a foreign checkpoint."""
    return (folder / "config.json").is_file() and "draftkit" in read_object(folder / "config.json")


def read_draft(folder: Path, config: dict[str, object] | None = None) -> Draft:
    """Read and validate a unified draft; one that a killed run has left aside is put back first. `config` is what its
    `config.json` says, where that has been read.

    Raises `LayoutError` listing every fact or tensor that does not fit, `FormatError` for damaged files,
    `SourceError` for missing ones.
    """
    restore(folder)
    config_path = folder / "config.json"
    config = read_object(config_path) if config is None else config
    block = config.get("draftkit")
    if not isinstance(block, dict) or set(block) != {"spec", "provenance"} or not isinstance(block["spec"], dict):
        hint = command("draftkit", "convert", folder, "OUT")
        raise LayoutError("config.json has no draftkit block", where=config_path, hint=hint)
    spec = DraftSpec.from_dict(block["spec"], config_path)
    provenance = from_dict(Provenance, block["provenance"], config_path)
    tensors = open_checkpoint(folder)
    found = {name: (handle.dtype, handle.shape) for name, handle in tensors.items()}
    spec = _quantized_since(folder, config, spec, provenance, found)
    spec.check_tensors(found, folder, hint="convert the source again")
    return Draft(folder, spec, provenance, tensors, tokenizer_files(folder) if spec.architecture.own_model else ())


def _quantized_since(
    folder: Path,
    config: Mapping[str, object],
    spec: DraftSpec,
    provenance: Provenance,
    found: Mapping[str, tuple[str, Shape]],
) -> DraftSpec:
    """The spec of a draft that another program may have quantized since draftkit wrote it. Raises `LayoutError` where
    it says otherwise of its weights than they are, `FormatError` where draftkit does not read them."""
    stated = config.get("quantization_config")
    if stated is None and (folder / MODELOPT_FILE).is_file():
        stated = read_object(folder / MODELOPT_FILE)
    known = spec.stored_as
    scaled = set() if known else modules_with_scales(found) - modules_with_scales(spec.tensors())
    if stated in (None, known) and not scaled:
        return spec
    hint = f"use the draft that was quantized, or convert {provenance.source} again"
    if isinstance(stated, dict) and scaled:
        refuse_unread(found, stated, folder, hint)
        return replace(spec, quantization=stated)
    name = name_of_format(stated) if isinstance(stated, dict) else None
    raise LayoutError(
        f"another program quantized this unified draft ({name or 'nothing says how'}), which draftkit does not read",
        where=folder,
        hint=hint,
    )


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files of a causal language model that belong to its tokenizer, and its generation settings.

    Raises `SourceError` for one that cannot be copied: a broken link, a pipe.
    """
    found = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if not path.is_dir()}
    if odd := [path for path in sorted(found) if not path.is_file()]:
        raise SourceError(f"{odd[0].name} is a broken link or no file", where=odd[0], hint="fetch the checkpoint again")
    return tuple(sorted(found))
