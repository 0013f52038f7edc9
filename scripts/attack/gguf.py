"""GGUF files that lie: about where tensors are, how large, how many, of what type, and in every key.

    python -m scripts.attack.gguf [--cases N] [--case NUMBER]

A file whose header does not hold together must be refused. A key may have any value: then the draft is refused, or what
was made of it says so. Drafts of each kind that GGUF has are attacked, and files of targets that heads are put into.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from fixtures.checkpoints import pico
from fixtures.checkpoints.gguf_files import Entry, Parts
from fixtures.checkpoints.mtp_targets import save_with_head
from fixtures.checkpoints.published import all_published
from fixtures.fuzzing.checkpoints import without_source

from draftkit.convert.api import convert_checkpoint, describe_checkpoint, put_heads_back
from draftkit.io.gguf_file import read_gguf
from draftkit.io.tensors import open_checkpoint
from scripts.attack._count import Case, Silent, main

PUBLISHED = ("eagle3", "deepspec-gated", "dflash2", "dflash-sliding", "mistral")
MOST = (1 << 64) - 1
UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10
NO_TYPE = 99
# Types of tensors by number, and bytes of one item: F32, F16, I8, I16, I32, I64, F64, BF16; blocks; none.
TYPES = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2, 8: 34, 9: 36, 4: 0, NO_TYPE: 0, (1 << 32) - 1: 0}


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


VALUES: dict[str, tuple[int, bytes]] = {
    "0": (UINT32, struct.pack("<I", 0)),
    "1": (UINT32, struct.pack("<I", 1)),
    "7": (UINT32, struct.pack("<I", 7)),
    "2^32 - 1": (UINT32, struct.pack("<I", (1 << 32) - 1)),
    "2^64 - 1": (UINT64, struct.pack("<Q", MOST)),
    "-1": (5, struct.pack("<i", -1)),
    "NaN": (FLOAT32, struct.pack("<I", 0xFFC00001)),
    "infinity": (FLOAT32, struct.pack("<f", float("inf"))),
    "0.3": (FLOAT32, struct.pack("<f", 0.3)),
    "true": (BOOL, b"\1"),
    "no text": (STRING, text(b"")),
    "a text": (STRING, text(b"\0 {\xff".replace(b"\xff", "é".encode()))),
    "JSON": (STRING, text(b'{"a": [1, null]}')),
    "deep JSON": (STRING, text(b"[" * 5000)),
    "a list of nothing": (ARRAY, array(UINT32, 0)),
    "a list": (ARRAY, array(UINT32, 2, struct.pack("<II", 1, 2))),
    "a list of texts": (ARRAY, array(STRING, 1, text(b"a"))),
    "a list of true": (ARRAY, array(BOOL, 2, b"\1\1")),
}
# What no draft is made of, whatever it says: names, the tokenizer's keys beside the size and the mask, what floats were
# before they became float32, and how long the texts of the heads' target are.
WITHOUT_EFFECT = ("general.", "tokenizer.", "draftkit.version", "draftkit.provenance", "draftkit.dtype", "glm4moe.cont")


@dataclass(frozen=True)
class Sound:
    """A file that converts, of a draft for `target`, or of heads."""

    name: str
    file: Path
    target: Path | None

    def made(self, file: Path, folder: Path) -> tuple[Any, dict[str, bytes]]:
        """The facts and tensors of what a file becomes."""
        out = convert_checkpoint(str(file), folder / "out", target=None if self.target is None else str(self.target))
        describe_checkpoint(str(out))
        tensors = {h.name: b"".join(map(bytes, h.chunks())) for h in open_checkpoint(out).values()}
        return without_source(json.loads((out / "config.json").read_text())), tensors


def cases(corpus: Path) -> Iterator[Case]:
    for sound in sounds(corpus):
        (folder := corpus / f"{sound.name}-made").mkdir()
        before = sound.made(sound.file, folder)
        for name, change in headers(Parts.of(sound.file)):
            yield f"{sound.name}: {name}", partial(refused, sound, before, change)
        yield from ((f"{sound.name}: {name}", partial(refused_bytes, sound, change)) for name, change in cuts(sound))
        for key, _, _ in Parts.of(sound.file).keys:
            for name, (kind, value) in VALUES.items():
                label = f"{sound.name}: {key.decode()} is {name}"
                yield label, partial(told, sound, before, key.decode(), kind, value)
    yield from targets(corpus)


def sounds(corpus: Path) -> Iterator[Sound]:
    for name in PUBLISHED:
        published = all_published()[name]
        target = pico.save_target_config(corpus / name / "target", **(published.target or {}))
        pico.save_tokenizer(target, ("a", "b"))
        source = published.write(corpus / name / "source")
        unified = convert_checkpoint(
            str(source), corpus / name / "draft", target=str(target), overrides=published.overrides, allow_lossy=True
        )
        yield Sound(name, written(unified, target, corpus / name), target)
    yield Sound("heads", written(*with_heads(corpus / "mtp"), corpus / "mtp"), None)


def written(source: Path, target: Path, folder: Path) -> Path:
    return convert_checkpoint(str(source), folder / "draft.gguf", to="gguf", target=str(target), allow_lossy=True)


def with_heads(folder: Path) -> tuple[Path, Path]:
    """Heads, and the file of their target, which has nothing but what a file of heads needs of it."""
    save_with_head("glm4_moe", folder / "whole")
    heads = convert_checkpoint(str(folder / "whole"), folder / "heads", format="mtp")
    stated = {"block_count": pico.LAYERS, "context_length": 512, "embedding_length": pico.HIDDEN}
    keys = [(f"glm4moe.{key}".encode(), UINT32, struct.pack("<I", value)) for key, value in stated.items()]
    tokens = b"".join(text(b"t%d" % number) for number in range(pico.VOCABULARY))
    keys += [
        (b"general.architecture", STRING, text(b"glm4moe")),
        (b"tokenizer.ggml.model", STRING, text(b"gpt2")),
        (b"tokenizer.ggml.tokens", ARRAY, array(STRING, pico.VOCABULARY, tokens)),
    ]
    sizes = {"token_embd": (pico.HIDDEN, pico.VOCABULARY), "output_norm": (pico.HIDDEN,)}
    tensors = [Entry(f"{n}.weight".encode(), [*dims], 0, bytes(4 * math.prod(dims))) for n, dims in sizes.items()]
    (folder / "target.gguf").write_bytes(Parts(keys, tensors).encoded())
    return heads, folder / "target.gguf"


Change = Callable[[Parts], object]


def headers(parts: Parts) -> Iterator[tuple[str, Change]]:
    """Headers that do not hold together."""

    def of_file(**values: Any) -> Change:
        return lambda parts: parts.__dict__.update(values)

    for count in (0, 1, len(parts.tensors) - 1, len(parts.tensors) + 1, 1 << 32, 1 << 63, MOST):
        yield f"{count} tensors", of_file(num_tensors=count)
    for count in (0, len(parts.keys) - 1, len(parts.keys) + 1, 1 << 40, 1 << 63, MOST):
        yield f"{count} keys", of_file(num_keys=count)
    for version in (0, 1, 4, 1 << 24, (1 << 32) - 1):
        yield f"version {version}", of_file(version=version)
    yield "big-endian", of_file(order=">")
    yield "bytes behind its end", of_file(behind=bytes(64))
    for name, kind, value in (
        ("a list of 2^60 numbers", ARRAY, array(UINT32, 1 << 60)),
        ("a list of 2^64 - 1 texts", ARRAY, array(STRING, MOST)),
        ("a list of lists", ARRAY, array(ARRAY, 1, array(UINT32, 1, bytes(4)))),
        ("a list of no type", ARRAY, array(NO_TYPE, 1, bytes(4))),
        ("a value of no type", NO_TYPE, bytes(4)),
        ("a text of 2^64 - 1 bytes", STRING, struct.pack("<Q", MOST)),
        ("a text that is not UTF-8", STRING, text(b"\xff\xfe")),
    ):
        yield f"a key with {name}", partial(Parts.with_key, name="a.b", kind=kind, value=value)
    for size in (0, 3, 33, 1 << 31):
        stated = partial(Parts.with_key, name="general.alignment", kind=UINT32, value=struct.pack("<I", size))
        yield f"alignment {size}", stated
    yield "alignment as text", lambda p: p.with_key("general.alignment", STRING, text(b"32"))
    for key in (b"", parts.keys[0][0], b"\xff"):
        yield f"one more key {key!r}", of_file(keys=[*parts.keys, (key, UINT32, bytes(4))])
    for place in sorted({0, 1, len(parts.tensors) // 2, len(parts.tensors) - 1}):
        for name, entry in entries(parts, parts.tensors[place]):
            changed = [*parts.tensors[:place], entry, *parts.tensors[place + 1 :]]
            yield f"tensor {place} {name}", of_file(tensors=changed)


def entries(parts: Parts, entry: Entry) -> Iterator[tuple[str, Entry]]:
    """What the header may say wrongly of one of the tensors."""
    first, own = parts.tensors[0] is entry, sum(padded(len(e.data)) for e in before(parts, entry))
    for offset in (0, 1, own - 32, own + 4, own + 32, own + (1 << 20), 1 << 63, MOST - 31, MOST):
        if offset >= 0 and offset != own:
            yield f"at {offset}", replace(entry, offset=offset)
    wide, most = entry.dimensions[0], 1 << 63
    for dimensions in (
        [most], [MOST], [1 << 32, 1 << 32], [1 << 62, 4], [0], [wide, 0], [wide + 1, *entry.dimensions[1:]],
        [wide // 2, *entry.dimensions[1:]], [*entry.dimensions, 2], [1, *entry.dimensions], [MOST, MOST],
    ):  # fmt: skip
        yield f"of dimensions {dimensions}", replace(entry, dimensions=dimensions)
    for count in (0, 3 if len(entry.dimensions) != 3 else 2, 5, 1 << 31, (1 << 32) - 1):
        yield f"of {count} dimensions", replace(entry, num_dimensions=count)
    count = len(entry.data) // TYPES[entry.kind]
    for kind, size in TYPES.items():
        if padded(count * size) != padded(len(entry.data)):  # else the file holds together
            yield f"of type {kind}", replace(entry, kind=kind)
    other = parts.tensors[-1 if first else 0].name
    for name in (b"", other, b"a" * 64, b"\xff", b"x" * 4096, entry.name + b"\0"):
        yield f"called {name[:20]!r}", replace(entry, name=name)


def padded(nbytes: int) -> int:
    return -(-nbytes // 32) * 32


def before(parts: Parts, entry: Entry) -> list[Entry]:
    return parts.tensors[: next(i for i, other in enumerate(parts.tensors) if other is entry)]


def cuts(sound: Sound) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    size = sound.file.stat().st_size
    for end in (0, 3, 8, 20, 24, 40, size // 8, size // 2, size - 4000, size - 33):
        yield f"cut at {end}", itemgetter(slice(end))
    yield "not GGUF", lambda data: b"GGUX" + data[4:]
    yield "twice", lambda data: data + data


def refused(sound: Sound, made: object, change: Change, folder: Path) -> None:
    """Never accepted, except as what it was."""
    parts = Parts.of(sound.file)
    change(parts)
    (folder / "changed.gguf").write_bytes(parts.encoded())
    if sound.made(folder / "changed.gguf", folder) != made:
        raise Silent("accepted, and the draft is another")


def refused_bytes(sound: Sound, change: Callable[[bytes], bytes], folder: Path) -> None:
    (folder / "changed.gguf").write_bytes(change(sound.file.read_bytes()))
    sound.made(folder / "changed.gguf", folder)
    raise Silent("accepted")


def told(sound: Sound, before: object, key: str, kind: int, value: bytes, folder: Path) -> None:
    """What is accepted shows in the facts."""
    (folder / "changed.gguf").write_bytes(Parts.of(sound.file).with_key(key, kind, value).encoded())
    found = read_gguf(folder / "changed.gguf").metadata[key]
    same = found == read_gguf(sound.file).metadata[key]
    if sound.made(folder / "changed.gguf", folder) == before and not same and not key.startswith(WITHOUT_EFFECT):
        raise Silent(f"{key} is {found!r}, and nothing says so")


def targets(corpus: Path) -> Iterator[Case]:
    """Files of targets into which heads are put."""
    (corpus / "into").mkdir()
    heads, target = with_heads(corpus / "into")

    def put(change: Change, folder: Path) -> None:
        parts = Parts.of(target)
        change(parts)
        (folder / "target.gguf").write_bytes(parts.encoded())
        put_heads_back(str(heads), str(folder / "target.gguf"), folder / "whole.gguf")
        read_gguf(folder / "whole.gguf")

    def told_apart(change: Change, folder: Path) -> None:
        put(change, folder)
        raise Silent("accepted")

    for name, change in headers(Parts.of(target)):
        if "dimensions [1," in name:
            continue  # the same bytes of a tensor that is passed on
        yield f"target: {name}", partial(told_apart, change)
    for key, _, _ in Parts.of(target).keys:
        for name, (kind, value) in VALUES.items():
            changed = partial(Parts.with_key, name=key.decode(), kind=kind, value=value)
            yield f"target: {key.decode()} is {name}", partial(put, changed)


if __name__ == "__main__":
    main(__doc__, cases)
