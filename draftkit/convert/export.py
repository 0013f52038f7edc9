"""A draft in a foreign layout: planned from the unified one, and written.

Of the tensors of the target that a destination needs a copy of, only the shards that hold them are opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from draftkit.convert.operations import Move, carry_out, copy
from draftkit.convert.plan import renamed
from draftkit.convert.unified import PROVENANCE_FILE, OnBytes, draft_folder
from draftkit.errors import LayoutError, TargetError
from draftkit.hub.local_paths import copy_named, named
from draftkit.hub.locate import locate_file
from draftkit.io.gguf_file import GgufTensor
from draftkit.io.handles import TensorHandle, TensorToWrite
from draftkit.io.jsonfile import dump
from draftkit.io.records import to_dict
from draftkit.io.safetensors_file import read_safetensors
from draftkit.io.tensors import SAFETENSORS, read_weight_map, write_checkpoint
from draftkit.io.torch_file import write_torch
from draftkit.layout.architecture import Architecture
from draftkit.layout.facts import facts_of
from draftkit.layout.folder import Draft
from draftkit.layout.spec import HF_DTYPES, DraftSpec
from draftkit.layout.stored_weights import stands_for
from draftkit.layout.target import TargetFacts


@dataclass(frozen=True)
class Export:
    """What will be written: the foreign config, and moves from unified tensors (`target:` ones are the target's).

    `losses`: what of the draft this layout cannot say. `torch_files`: file → the tensors that lie there, by
    destination, instead of among the other weights. `computed`: tensors that follow from the facts alone. `beside`: of
    a GGUF file, tensors of another one, as they are there.
    """

    config: dict[str, object]
    moves: tuple[Move, ...]
    losses: tuple[str, ...] = ()
    torch_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    computed: Mapping[str, TensorHandle] = field(default_factory=dict)
    beside: tuple[GgufTensor, ...] = ()


@dataclass(frozen=True)
class Outgoing:
    """A draft on its way out, as an exporter sees it. `target` is None when the user named none."""

    draft: Draft
    target: TargetFacts | None
    destination: str

    def tensor(self, name: str) -> TensorHandle:
        """A unified tensor, or under `target:embed_tokens.weight` and `target:lm_head.weight` the target's own."""
        if not name.startswith(PREFIX):
            return self.draft.tensors[name]
        find = {"embed_tokens.weight": target_embedding, "lm_head.weight": target_head}[name.removeprefix(PREFIX)]
        return find(self.need_target(f"a copy of its {name.removeprefix(PREFIX)}"))

    def need_target(self, why: str) -> TargetFacts:
        """The target. Raises `LayoutError` when none was named, and the draft knows none or its name leads nowhere."""
        if self.target is None:
            made_for = self.draft.provenance.target
            unknown = "the target is not known" if made_for is None else f"its target, {made_for}, is not found here"
            raise LayoutError(
                f"--to {self.destination} needs {why}, and {unknown}",
                where=self.draft.path,
                hint="pass --target",
            )
        return self.target

    def borrowed(self, name: str) -> Move:
        """The move of a tensor that the destination stores: the draft's own, else a copy of the target's."""
        if name in self.draft.tensors:
            return copy(self.draft.tensors[name])
        if name in map(stands_for, self.draft.tensors):
            raise LayoutError(
                f"{name} is quantized, and --to {self.destination} stores it plain",
                where=self.draft.path,
                hint="use --to unified, or convert the draft that was quantized",
            )
        handle = self.tensor(PREFIX + name)
        return Move("from_target", (handle.name,), name, handle.dtype, handle.shape)

    def renamed(self, renames: Mapping[str, str], without: Sequence[str] = ()) -> list[Move]:
        """A copy of every unified tensor but those in `without`, its name changed as `plan.renamed` does."""
        return [copy(t, renamed(t.name, renames)) for t in self.draft.tensors.values() if t.name not in without]

    @property
    def dtype(self) -> str:
        """The dtype under the name that configs use."""
        return HF_DTYPES[self.draft.spec.dtype]


def losses(architecture: Architecture, runs: Architecture) -> tuple[str, ...]:
    """The facts of a draft that its destination does not keep. `runs`: the draft that it makes of it."""
    theirs = facts_of(runs)
    return tuple(
        f"{name} is {value}, and its class has {theirs.get(name)}"
        for name, value in facts_of(architecture).items()
        if value != theirs.get(name)
    )


def kept(outgoing: Outgoing, runs: Architecture, renames: Mapping[str, str], without: Sequence[str] = ()) -> list[Move]:
    """Copies of the tensors that the draft at the destination has, renamed; none of those in `without`.

    Raises `LayoutError` where its class has a tensor that this draft lacks: it would be left as it was initialized.
    """
    schema = DraftSpec(architecture=runs, dtype=outgoing.draft.spec.dtype).tensors()
    if lacking := schema.keys() - set(map(stands_for, outgoing.draft.tensors)) - set(without):
        raise LayoutError(
            f"the class that reads this layout has {', '.join(sorted(lacking))}, which the draft lacks",
            where=outgoing.draft.path,
            hint="use --to unified",
        )
    foreign = {name for name in outgoing.draft.tensors if stands_for(name) not in schema}
    return outgoing.renamed(renames, without=[*without, *foreign])


def results(outgoing: Outgoing, export: Export) -> dict[str, TensorHandle]:
    """The tensors that an export writes, by name; none is read yet."""
    names = {name for move in export.moves for name in move.sources}
    return carry_out(export.moves, {name: outgoing.tensor(name) for name in names}) | dict(export.computed)


def write_export(out: Path, outgoing: Outgoing, export: Export, *, force: bool, on_bytes: OnBytes | None) -> None:
    """Write the folder atomically, with the draft's provenance beside the weights. Raises `DraftkitError`."""
    tensors = results(outgoing, export)
    apart = {name: file for file, names in export.torch_files.items() for name in names}
    with draft_folder(out, outgoing.draft, force=force) as folder:
        (folder / "config.json").write_text(dump(named(export.config)), encoding="utf-8")
        provenance = to_dict(outgoing.draft.provenance) | {"export_losses": list(export.losses)}
        (folder / PROVENANCE_FILE).write_text(dump(named(provenance)), encoding="utf-8")
        for path in outgoing.draft.files:
            copy_named(path, folder / path.name)
        write_checkpoint(
            folder,
            [TensorToWrite(t.name, t.dtype, t.shape, t.chunks()) for t in tensors.values() if t.name not in apart],
            metadata={"format": "pt"},
            on_bytes=on_bytes,
        )
        for file, names in export.torch_files.items():
            write_torch(folder / file, {name: tensors[name].load() for name in names})


PREFIX = "target:"  # of source names in moves that take a tensor from the target
EMBEDDING = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
HEAD = ("lm_head.weight", "language_model.lm_head.weight")


def target_embedding(target: TargetFacts) -> TensorHandle:
    """The target's embedding table [V, H], under the name `target:embed_tokens.weight`. Raises `DraftkitError`."""
    return _find(target, EMBEDDING, "embed_tokens.weight")


def target_head(target: TargetFacts) -> TensorHandle:
    """The target's head [V, H], its embedding where tied, under `target:lm_head.weight`. Raises `DraftkitError`."""
    return _find(target, HEAD + EMBEDDING if target.tied else HEAD, "lm_head.weight")


def _file(target: TargetFacts, name: str) -> Path | None:
    """A file of the target, downloaded if need be; None where it has none of that name. Raises `SourceError`."""
    if target.revision is not None:
        return locate_file(target.name, name, target.revision)
    return target.path / name if (target.path / name).is_file() else None


def _find(target: TargetFacts, names: tuple[str, ...], unified: str) -> TensorHandle:
    """The first of `names` that the target has."""
    index = _file(target, SAFETENSORS.index)
    shards = dict.fromkeys(names, SAFETENSORS.single) if index is None else read_weight_map(index)
    for name in (name for name in names if name in shards):
        path = _file(target, shards[name])
        if path is not None:
            for handle in read_safetensors(path):
                if handle.name == name:
                    return replace(handle, name=PREFIX + unified)
    raise TargetError(
        f"{target.name} has no tensor {' or '.join(names)} in safetensors files",
        where=target.name,
        hint="pass the original target with --target",
    )
