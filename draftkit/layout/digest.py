"""Digests that tell whether two folders hold the same draft or target, wherever they lie.

Every byte of the weights counts: size, date and the beginning of a file are those of a retrained checkpoint too. That
costs one reading of the files, which loading them needs anyway.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

from draftkit.io.handles import TensorHandle
from draftkit.io.tensors import gguf_file, open_checkpoint
from draftkit.layout.folder import Draft, tokenizer_files

THREADS = 8  # which read and digest tensors together, at most


def draft_sha256(draft: Draft) -> str:
    """SHA-256 of a draft's spec and of every byte of its weights, in hexadecimal.

    A path that transformers notes in a config is no part of it: the same draft lies elsewhere once it is published.
    A foreign checkpoint has that of the unified draft it converts to. Raises `FormatError`/`SourceError` for a file
    that changes or goes away meanwhile.
    """
    spec = replace(draft.spec, architecture=draft.spec.architecture.without_paths())
    digest = hashlib.sha256(json.dumps(spec.to_dict(), sort_keys=True).encode())
    for name, handle in sorted(draft.tensors.items()):
        digest.update(f"\0{name}\0{handle.dtype}\0{list(handle.shape)}\0".encode())
        for chunk in handle.chunks():
            digest.update(chunk)
    return digest.hexdigest()


def target_sha256(folder: Path, given_up: Event | None = None) -> str:
    """SHA-256 of a target's config, tokenizer, chat template, generation config and every byte of its weights.

    Raises `FormatError`/`SourceError` for a folder that is no checkpoint, or a file that changes meanwhile, and
    `CancelledError` once it is `given_up`.
    """
    digest = hashlib.sha256()
    for path in (folder / "config.json", *tokenizer_files(folder)):
        digest.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    for part in _weights(folder, given_up):
        digest.update(part)
    return digest.hexdigest()


class TargetDigest:
    """`target_sha256` of a folder, made in the background while the same weights are loaded."""

    def __init__(self, folder: Path):
        self._given_up = Event()
        self._pool = ThreadPoolExecutor(1)
        self._found = self._pool.submit(target_sha256, folder, self._given_up)

    def result(self) -> str:
        """The digest, once it is made. Raises as `target_sha256`."""
        return self._found.result()

    def stop(self) -> None:
        """Give it up where it is still being made; what ends need not wait for it."""
        self._given_up.set()
        self._pool.shutdown(wait=False)


def weights_sha256(folder: Path) -> str:
    """SHA-256 of a target's config and every byte of its weights: what its hidden states depend on.

    Raises as `target_sha256`.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for part in _weights(folder):
        digest.update(part)
    return digest.hexdigest()


def _weights(folder: Path, given_up: Event | None = None) -> list[bytes]:
    """The digests of a checkpoint's tensors, or of the GGUF file that they are in."""
    if (file := gguf_file(folder)) is not None:
        with file.open("rb") as opened:
            return [hashlib.file_digest(opened, "sha256").digest()]
    return _digests((handle for _, handle in sorted(open_checkpoint(folder).items())), given_up)


def _digests(handles: Iterable[TensorHandle], given_up: Event | None) -> list[bytes]:
    """The digest of each tensor, with its name, dtype and shape."""
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(partial(_tensor_sha256, given_up=given_up), handles))


def _tensor_sha256(handle: TensorHandle, given_up: Event | None) -> bytes:
    digest = hashlib.sha256(f"{handle.name}\0{handle.dtype}\0{list(handle.shape)}\0".encode())
    for chunk in handle.chunks():
        if given_up is not None and given_up.is_set():
            raise CancelledError
        digest.update(chunk)
    return digest.digest()
