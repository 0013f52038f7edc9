"""Samples in Arrow: a file, or a folder that `datasets.load_from_disk` reads too, which is mapped into memory.

Processes that read it share its pages, and nothing is parsed. Columns: `id` and `category`, texts; `tokens`, lists of
int32; `supervised`, lists of int32, the spans of the loss mask as begin, end, begin, end, and so on; `media` and
`images`, lists of the spans that stand for images and of these. Where the tokens come from is JSON in the metadata of
the schema, and in a folder in the description of `dataset_info.json`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftkit.data.columns import Columns, SampleTable
from draftkit.data.samples import MAX_TOKEN, Sample, SamplesOrigin, header, origin_of, parse_media
from draftkit.errors import DraftkitError, FormatError, SourceError
from draftkit.io.atomic import atomic_file, atomic_folder
from draftkit.io.jsonfile import read_object
from draftkit.media import FiledMedium, MediaSpan
from draftkit.version import with_extra

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".arrow"
ROWS = 1000  # samples that are written at once
METADATA = b"draftkit"
DATA_FILE = "data-00000-of-00001.arrow"  # as datasets names it
INFO_FILE, STATE_FILE = "dataset_info.json", "state.json"
AGAIN = "prepare the data again"
MEDIA = ("media", "images")  # the columns of what lies beside the tokens


def write_arrow(out: Path, samples: Iterable[Sample], origin: SamplesOrigin, *, force: bool = False) -> int:
    """Write samples to a file, or to a folder where `out` does not end in `.arrow`; it appears complete or not at all.

    Returns how many there are. Raises `DraftkitError` as `write_samples`.
    """
    _pyarrow()
    if out.suffix == SUFFIX:
        with atomic_file(out, force) as file:
            return _write(file, samples, origin)
    with atomic_folder(out, (lambda folder: _is_written(folder)) if force else None) as folder:
        with open(folder / DATA_FILE, "wb") as file:
            count = _write(file, samples, origin)
        _write_info(folder, origin)
    return count


def _is_written(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} <= {DATA_FILE, INFO_FILE, STATE_FILE}


def _write(file: IO[bytes], samples: Iterable[Sample], origin: SamplesOrigin) -> int:
    pa = _pyarrow()
    schema = _schema().with_metadata({METADATA: json.dumps(header(origin)).encode()})
    count = 0
    with pa.ipc.new_stream(file, schema) as writer:
        rows = iter(samples)
        while some := list(islice(rows, ROWS)):
            writer.write_batch(_batch(some, schema))
            count += len(some)
    return count


def _schema() -> pa.Schema:
    pa = _pyarrow()
    numbers = pa.list_(pa.field("item", pa.int32()))
    whole, text = pa.int32(), pa.string()
    span = pa.struct([("start", whole), ("length", whole), ("modality", text), ("index", whole)])
    image = pa.struct([("place", text), ("sha256", text)])
    columns = [("id", text), ("category", text), ("tokens", numbers), ("supervised", numbers)]
    return pa.schema([*columns, ("media", pa.list_(span)), ("images", pa.list_(image))])


def _batch(samples: list[Sample], schema: pa.Schema) -> pa.RecordBatch:
    pa = _pyarrow()

    def lists(rows: list[NDArray[np.int32]]) -> object:
        begins = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(begins), pa.array(np.concatenate(rows)), type=schema.field(2).type)

    edges = [np.array(sample.spans, dtype=np.int32).reshape(-1) for sample in samples]
    names, kinds = (pa.array([getattr(sample, name) for sample in samples]) for name in ("id", "category"))
    columns = [names, kinds, lists([sample.tokens for sample in samples]), lists(edges)]
    for name in MEDIA:
        rows = [[asdict(one) for one in getattr(sample, name)] for sample in samples]
        columns.append(pa.array(rows, schema.field(name).type))
    return pa.record_batch(columns, schema=schema)


def _write_info(folder: Path, origin: SamplesOrigin) -> None:
    """What datasets keeps beside its data."""
    from datasets import DatasetInfo, Features

    info = DatasetInfo(description=json.dumps(header(origin)), features=Features.from_arrow_schema(_schema()))
    info.write_to_directory(str(folder))
    state = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    state |= {"_data_files": [{"filename": DATA_FILE}], "_format_kwargs": {}, "_output_all_columns": False}
    state["_fingerprint"] = hashlib.sha256((folder / INFO_FILE).read_bytes()).hexdigest()[:16]
    (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")


class ArrowSamples(SampleTable):
    """The samples of a file or folder, in pages that the system reads when they are needed.

    Raises `SourceError` where it cannot be read, `FormatError` where it is damaged or holds something else.
    """

    def __init__(self, path: Path):
        tables = [_open(file) for file in _files(path)]
        self.origin = _origin(path, tables)
        batches = [batch for table in tables for batch in table.to_batches() if len(batch)]
        self._batches = [_Batch(batch, path) for batch in batches]
        self._firsts = [0, *accumulate(map(len, batches))]
        lengths = [np.diff(batch.begins) for batch in self._batches]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths], dtype=np.int64)

    def sample(self, number: int) -> Sample:
        part = bisect_right(self._firsts, number) - 1
        return self._batches[part].sample(number - self._firsts[part])

    def ids(self) -> Iterator[str]:
        return (name for batch in self._batches for name in batch.names.to_pylist())

    def columns(self) -> Iterator[Columns]:
        return (batch.columns() for batch in self._batches)

    def has_images(self) -> bool:
        return any(batch.has_media for batch in self._batches)

    def sha256(self) -> str:
        """The digest of all that is in the samples, however they lie in files."""
        digest = hashlib.sha256()
        for name in ("names", "kinds"):
            for batch in self._batches:
                digest.update(json.dumps(getattr(batch, name).to_pylist())[1:-1].encode() + b", ")
        for batch in self._batches:
            sizes = np.stack((np.diff(batch.begins), np.diff(batch.edge_begins)))
            for values in (sizes.astype("<i4").T, batch.tokens, batch.edges):
                digest.update(np.ascontiguousarray(values).data)
        if any(batch.has_media for batch in self._batches):
            for batch in self._batches:
                digest.update(b"".join(json.dumps(stated).encode() for stated in batch.media()))
        return digest.hexdigest()


class _Batch:
    """Samples as they lie in a file. `tokens` int32 [N] and where each sample begins, [D + 1]; the edges of spans
    likewise."""

    def __init__(self, batch: pa.RecordBatch, path: Path):
        self._path = path
        try:
            batch.validate()
        except _pyarrow().ArrowInvalid as error:
            raise _damaged(path, error) from error
        self.names, self.kinds = batch.column("id"), batch.column("category")
        self.tokens, self.begins = _lists(batch.column("tokens"))
        self.edges, self.edge_begins = _lists(batch.column("supervised"))
        self._media = [batch.column(name) for name in MEDIA]
        self.has_media = any(len(column.flatten()) for column in self._media)
        self._check(path)

    def _check(self, path: Path) -> None:
        """Raise `FormatError` for spans that are not ascending within their samples."""
        sizes, counts = np.diff(self.begins), np.diff(self.edge_begins)
        restarts = self.edge_begins[1:-1]
        good = bool((sizes >= 0).all() and (counts >= 0).all() and not (counts % 2).any())
        if good and len(self.edges):
            rises = np.diff(self.edges, prepend=-1) > 0
            rises[restarts[restarts < len(self.edges)]] = True
            good = bool(rises.all() and self.edges.min() >= 0 and (self.edges <= np.repeat(sizes, counts)).all())
        if not good:
            raise _damaged(path, "spans of a loss mask lie outside its tokens")

    def sample(self, place: int) -> Sample:
        tokens = self.tokens[self.begins[place] : self.begins[place + 1]]
        edges = self.edges[self.edge_begins[place] : self.edge_begins[place + 1]].reshape(-1, 2).tolist()
        if len(tokens) and tokens.min() < 0:
            raise FormatError(f"sample {self.names[place]} has a token id below 0", expected=f"0 to {MAX_TOKEN}")
        name, kind = self.names[place].as_py(), self.kinds[place].as_py()
        return Sample.of(name, tokens, map(tuple, edges), kind, *self._media_of(place, len(tokens)))  # type: ignore[arg-type]

    def _media_of(self, place: int, length: int) -> tuple[tuple[MediaSpan, ...], tuple[FiledMedium, ...]]:
        """The spans and images of a sample of that many tokens."""
        if not self.has_media:
            return (), ()
        try:
            return parse_media(_stated_media(column[place].as_py() for column in self._media), length)
        except (TypeError, ValueError) as error:
            raise _damaged(self._path, f"images of {self.names[place]}: {error}") from error

    def media(self) -> Iterator[dict[str, object]]:
        """What is stated of the images of each sample."""
        if not self.has_media:
            return itertools.repeat({"media": [], "images": []}, len(self.names))
        return (_stated_media(column[place].as_py() for column in self._media) for place in range(len(self.names)))

    def columns(self) -> Columns:
        sizes = np.diff(self.begins)
        shifts = np.repeat(self.begins[:-1], np.diff(self.edge_begins))  # edges are counted from their sample
        toggled = np.zeros(len(self.tokens) + 1, dtype=np.int8)
        np.add.at(toggled, self.edges[::2] + shifts[::2], 1)
        np.subtract.at(toggled, self.edges[1::2] + shifts[1::2], 1)
        return Columns(sizes.astype(np.int64), self.tokens, toggled[:-1].cumsum(dtype=np.int8).astype(np.bool_))


def _stated_media(columns: Iterable[list[dict[str, object]]]) -> dict[str, object]:
    """Spans and images of a sample as they stand in JSONL."""
    media, images = columns
    return {"media": [[*span.values()] for span in media], "images": images}


def _lists(column: Any) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The values of a column of lists, and where each list begins and the last one ends."""
    begins = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy(zero_copy_only=True)[begins[0] : begins[-1]]
    return values, begins - begins[0]


def read_arrow_origin(path: Path) -> SamplesOrigin:
    """Where the tokens of a file or folder come from. Raises `DraftkitError` as `ArrowSamples`."""
    return _origin(path, [_open(file) for file in _files(path)[:1]])


def _origin(path: Path, tables: list[pa.Table]) -> SamplesOrigin:
    """The origin that is stated with the data; datasets that others have written of them keep the description."""
    stated = (tables[0].schema.metadata or {}).get(METADATA)
    info = path / INFO_FILE
    if stated is None and info.is_file():
        stated = str(read_object(info).get("description")).encode()
    try:
        found = json.loads(stated or b"{}")
    except ValueError:
        found = {}
    return origin_of(found if isinstance(found, dict) else {}, str(path))


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise SourceError("there are no samples in Arrow", where=path, hint="write them with draftkit data prepare")
    return files


def _open(file: Path) -> pa.Table:
    pa = _pyarrow()
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(file, error) from error
    wanted = list(_schema())
    lacking = [f.name for f in wanted if f.name not in table.column_names or table.schema.field(f.name).type != f.type]
    if lacking or any(table.column(field.name).null_count for field in wanted):
        raise _damaged(file, f"columns {', '.join(lacking) or 'with nothing in them'}")
    return table


def _damaged(where: Path, problem: object) -> FormatError:
    return FormatError(
        f"not samples in Arrow, or damaged: {str(problem).splitlines()[0]}", where=where,
        expected="what `draftkit data prepare` writes: id, category, tokens, supervised", hint=AGAIN,
    )  # fmt: skip


def _pyarrow() -> Any:
    """The package, which comes with datasets. Raises `DraftkitError` where it is not there."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise DraftkitError("samples in Arrow are read and written with datasets", hint=with_extra("train")) from error
    return pa
