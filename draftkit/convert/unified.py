"""The unified draft that a foreign checkpoint becomes, and its folder.

Engines load the folder as it is, or refuse it where they would run it wrongly. No tensor is read before it is written.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.facts import value_at
from draftkit.convert.operations import carry_out
from draftkit.convert.plan import Plan
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, FormatError
from draftkit.hub.local_paths import copy_named, named, public_name
from draftkit.io.atomic import atomic_folder, is_passing
from draftkit.io.handles import TensorToWrite
from draftkit.io.jsonfile import dump
from draftkit.io.records import to_dict
from draftkit.io.tensors import write_checkpoint
from draftkit.io.torch_file import write_torch
from draftkit.layout.block import MASK_FILE
from draftkit.layout.folder import TOKENIZER_FILES, Draft, is_unified
from draftkit.layout.provenance import InputFile, Provenance
from draftkit.layout.spec import DraftSpec
from draftkit.layout.target import ADAPTER_CONFIG, TargetFacts
from draftkit.version import __version__

# An architecture that no engine registers: vLLM refuses the folder instead of running it wrongly.
REFUSED_ARCHITECTURE = "DraftkitOnlyModel"
PROVENANCE_FILE = "draftkit-provenance.json"  # marks a draft in another layout as written by draftkit
# What draftkit writes into the folder of a draft, or of a checkpoint in training.
WRITTEN = (
    "config.json", PROVENANCE_FILE, "*.safetensors", "*.safetensors.index.json", "*.bin", *TOKENIZER_FILES, MASK_FILE,
    "README.md", "eval", "figures", "adapter", "train.yaml", "inputs.json", "versions.json", "trainer_state.json",
    "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "pytorch_model*",
)  # fmt: skip
OnBytes: TypeAlias = Callable[[int], None]  # is told how many bytes each write had
SMALL_FILE = 16 << 20  # bytes; reading less for a digest costs nothing that a user would notice


def unify(checkpoint: Checkpoint, plan: Plan, target: TargetFacts | None, *, digest: bool = False) -> Draft:
    """The draft that a plan describes, and where it comes from. Raises `LayoutError` when facts are missing.

    `digest`: large files are read for their SHA-256 too. Raises `FormatError` where the Hub has another one.
    """
    provenance = Provenance(
        source=public_name(checkpoint.source.name),
        source_revision=checkpoint.source.revision,
        format=plan.format,
        files=_input_files(checkpoint, digest),
        target=public_name(target.name) if target else None,
        target_revision=target.revision if target else None,
        facts=plan.facts,
        dropped_config={key: value_at(checkpoint.config, key) for key in plan.dropped_keys},
        losses=plan.losses + plan.agreed_losses,
        draftkit_version=__version__,
    )
    tensors = carry_out(plan.moves, checkpoint.tensors)
    return Draft(
        checkpoint.source.path, plan.require_spec(checkpoint.source.path), provenance, tensors, plan.copied_files
    )


def _input_files(checkpoint: Checkpoint, digest: bool) -> tuple[InputFile, ...]:
    source, origins = checkpoint.source, {handle.origin for handle in checkpoint.tensors.values()}
    config = source.path / "config.json"
    paths = [path for path in (config, source.path / ADAPTER_CONFIG, *sorted(origins)) if path.is_file()]
    return tuple(_input_file(path, digest, source.config_text if path == config else None) for path in paths)


def _input_file(path: Path, digest: bool, text: bytes | None) -> InputFile:
    """A file with its digest, where that is wanted or cheap; `text` is what it holds, where that has been read.

    Raises `FormatError` when the Hub has another one.
    """
    size = path.stat().st_size
    hub_sha256, sha256 = _hub_sha256(path), None
    if text is not None:
        sha256 = hashlib.sha256(text).hexdigest()
    elif digest or size <= SMALL_FILE:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 is not None and hub_sha256 not in (None, sha256):
        raise FormatError(
            f"{path.name} is not the file that the Hub has: its SHA-256 is {sha256}",
            where=path,
            expected=hub_sha256,
            hint="the download was damaged: remove the file that the link leads to, and run the command again",
        )
    return InputFile(name=path.name, size=size, sha256=sha256, hub_sha256=hub_sha256)


def _hub_sha256(path: Path) -> str | None:
    """What the Hub says of a large file: the name of the blob in its cache."""
    blob = path.resolve().name
    return blob if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", blob) else None


def write_draft(out: Path, draft: Draft, *, force: bool = False, on_bytes: OnBytes | None = None) -> None:
    """Write a draft folder atomically: `out` appears complete or not at all.

    The tensors are streamed one at a time; `on_bytes` is told how many bytes each write had. Raises `LayoutError`
    before anything is written when they do not fit the spec, and `DraftkitError` as `draft_folder` does.
    """
    draft.spec.check_tensors({t.name: (t.dtype, t.shape) for t in draft.tensors.values()}, out)
    tensors = [TensorToWrite(t.name, t.dtype, t.shape, t.chunks()) for t in draft.tensors.values()]
    with draft_folder(out, draft, force=force) as folder:
        (folder / "config.json").write_text(dump(config_of(draft.spec, draft.provenance)), encoding="utf-8")
        for path in draft.files:
            copy_named(path, folder / path.name)
        write_checkpoint(folder, tensors, metadata={"format": "pt"}, on_bytes=on_bytes)
        for file, parts in draft.spec.architecture.side_files.items():
            write_torch(folder / file, {key: draft.tensors[name].load() for key, name in parts.items()})


@contextmanager
def draft_folder(out: Path, draft: Draft, *, force: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes `out`, as `atomic_folder` does.

    `force` lets it replace a folder that draftkit has written, and no other. Raises `DraftkitError` where there is
    another, and where the draft itself would be read from what it replaces.
    """
    files = {*draft.files, *(handle.origin for handle in draft.tensors.values())}
    if any(Path(os.path.realpath(file.parent)).is_relative_to(os.path.realpath(out)) for file in files if file != out):
        raise DraftkitError("the output is the source itself", where=out, hint="choose another folder")
    with atomic_folder(out, is_written_by_draftkit if force else None) as folder:
        yield folder


def is_written_by_draftkit(folder: Path) -> bool:
    """Whether a folder has draftkit's mark, and nothing that draftkit does not write: no work tree, no notes."""
    entries = [path.name for path in folder.iterdir() if not is_passing(path.name)]
    if not all(any(fnmatchcase(name, pattern) for pattern in WRITTEN) for name in entries):
        return False
    try:
        return PROVENANCE_FILE in entries or is_unified(folder)
    except DraftkitError:  # a config.json that cannot be read
        return False


def config_of(spec: DraftSpec, provenance: Provenance) -> dict[str, object]:
    """The whole config.json of a draft: the engines' keys, and the `draftkit` block that draftkit reads back. It has
    names instead of paths of this machine."""
    config = spec.engine_config()
    if refusal_by_vllm(spec) is not None:
        config["architectures"] = [REFUSED_ARCHITECTURE]
    block = {"spec": spec.to_dict(), "provenance": to_dict(provenance)}
    written: dict[str, object] = named(config | {"draftkit": block})
    return written
