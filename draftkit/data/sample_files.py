"""Files of samples: JSONL, whose first line says where the tokens come from, with one sample a line after it; or Arrow.

What is a folder or ends in `.arrow` is Arrow; a name without an ending will be a folder.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftkit.data.arrow import SUFFIX, ArrowSamples, read_arrow_origin, write_arrow
from draftkit.data.columns import ListedSamples, SampleTable
from draftkit.data.samples import (
    FORMAT,
    Sample,
    SamplesOrigin,
    header,
    media_line,
    origin_of,
    parse_media,
    parse_tokens,
)
from draftkit.errors import DraftkitError, FormatError
from draftkit.io.atomic import atomic_file
from draftkit.io.digest import file_sha256
from draftkit.io.jsonl import dump_line, read_lines
from draftkit.media import ImageFile, MediaFolder, Medium, RefusedMedia

ROOT_HINT = "--media-root names the folder of its images (train: --set media_root=FOLDER)"
BEGINS = dump_line({"format": FORMAT})[:-2]  # of a file in JSONL
MANY = 20_000  # samples from which on parsing JSONL takes long enough to say so


def is_arrow(path: Path) -> bool:
    """Whether a file or folder of samples is in Arrow, or will be."""
    return path.is_dir() or path.suffix == SUFFIX or not (path.suffix or path.exists())


def are_samples(path: Path) -> bool:
    """Whether a file or folder holds samples that are prepared already, rather than rows to prepare."""
    if path.is_dir():
        return any(path.glob(f"*{SUFFIX}"))
    if path.suffix == SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(BEGINS)) == BEGINS


def write_samples(path: Path, samples: Iterable[Sample], origin: SamplesOrigin, *, force: bool = False) -> int:
    """Write samples as they come and return how many; the file or folder appears complete or not at all.

    Raises `DraftkitError` when it exists and `force` is not given, when the disk is full, and, before anything is left
    behind, whatever the samples raise.
    """
    if is_arrow(path):
        return write_arrow(path, samples, origin, force=force)
    count = 0
    with atomic_file(path, force) as file:
        file.write(dump_line(header(origin)))
        for sample in samples:
            file.write(dump_line(_line(sample)))
            count += 1
    return count


def read_origin(path: Path) -> SamplesOrigin:
    """Where the tokens of samples come from. Raises `SourceError`, and `FormatError` for any other file."""
    if is_arrow(path):
        return read_arrow_origin(path)
    _, first = next(read_lines(path), (1, {}))
    return origin_of(first, f"{path}, line 1")


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file, one at a time.

    Raises `SourceError` when the file cannot be read, `FormatError` naming the line that is damaged.
    """
    if is_arrow(path):
        yield from ArrowSamples(path)
        return
    read_origin(path)
    for number, line in itertools.islice(read_lines(path), 1, None):
        try:
            yield _document(line)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise FormatError(
                f"not a sample: {type(error).__name__} {error}",
                where=f"{path}, line {number}",
                expected="id, category, tokens and supervised spans [begin, end), ascending, within the tokens",
                hint="prepare the data again",
            ) from error


def open_samples(path: Path) -> SampleTable:
    """All samples of a file or folder: those in Arrow where they lie, those in JSONL parsed. Raises `DraftkitError`."""
    return ArrowSamples(path) if is_arrow(path) else ListedSamples(list(read_samples(path)))


def read_training_samples(path: Path) -> SampleTable:
    """As `open_samples`. Raises `DraftkitError` too when all loss masks are empty."""
    samples = open_samples(path)
    if not samples.has_loss():
        raise DraftkitError(
            "the loss mask of every sample is empty", where=path, hint="draftkit data prepare … reports why"
        )
    return samples


def media_folder(path: Path, media_root: Path | None = None) -> MediaFolder:
    """Where the images of samples lie: below `media_root`, else where they were when the samples were prepared.

    Raises as `read_origin`.
    """
    if media_root is None:
        stated = read_origin(path).media_root
        media_root = None if stated is None else path.absolute().parent / stated
    return MediaFolder(media_root)


def open_images(sample: Sample, folder: MediaFolder) -> list[ImageFile]:
    """The images of a sample, as they were when it was prepared. Raises `RefusedMedia` for one that is gone, damaged or
    another one now."""
    opened = []
    for image in sample.images:
        try:
            found = folder.image(Medium("image", image.place))
        except RefusedMedia as error:
            raise RefusedMedia(
                f"sample {sample.id}: {error}", hint=f"put it back, or prepare the data again; {ROOT_HINT}"
            ) from error
        if found.sha256 != image.sha256:
            raise RefusedMedia(
                f"sample {sample.id}: {Medium('image', image.place).shown} is another image than when it was prepared",
                expected=f"sha256 {image.sha256}",
                hint="prepare the data again",
            )
        opened.append(found)
    return opened


def samples_sha256(path: Path) -> str:
    """The digest by which samples are known: of the bytes of a JSONL file, of what is in Arrow."""
    return ArrowSamples(path).sha256() if is_arrow(path) else file_sha256(path)


def split(samples: SampleTable, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of samples to train on and of a share that is held out, by their ids alone: more data leave the old
    samples on their side."""
    limit = int(share * 2**32)
    digests = (int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") for name in samples.ids())
    aside = np.fromiter((digest < limit for digest in digests), np.bool_, len(samples))
    return np.flatnonzero(~aside), np.flatnonzero(aside)


def held_out(samples: Sequence[Sample], share: float) -> tuple[list[int], list[int]]:
    """`split` of any samples, as lists."""
    kept, aside = split(SampleTable.of(samples), share)
    return kept.tolist(), aside.tolist()


def _line(sample: Sample) -> dict[str, object]:
    return {
        "id": sample.id,
        "category": sample.category,
        "tokens": sample.tokens.tolist(),
        "supervised": sample.spans,
    } | media_line(sample.media, sample.images)


def _document(line: dict[str, object]) -> Sample:
    tokens, spans = parse_tokens(line)
    return Sample.of(str(line["id"]), tokens, spans, str(line["category"]), *parse_media(line, len(tokens)))
