"""Samples in Arrow are those of JSONL: for training, its passes, `data check` and `data states`; in shared pages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from conftest import Command
from fixtures.checkpoints import pico
from hypothesis import given
from hypothesis import strategies as st

from draftkit.data.arrow import DATA_FILE, ROWS, SUFFIX
from draftkit.data.columns import SampleTable
from draftkit.data.packing import PackedRows, pack
from draftkit.data.sample_files import (
    held_out,
    open_samples,
    read_origin,
    read_samples,
    read_training_samples,
    samples_sha256,
    split,
    write_samples,
)
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.data.vocabulary import token_counts
from draftkit.errors import DraftkitError, FormatError, SourceError

ORIGIN = SamplesOrigin("zoo:target", "0" * 64, "1" * 64, 64)
FORMS = ("data.jsonl", "data.arrow", "folder")


def made(count: int, seed: int = 0) -> list[Sample]:
    """Samples of 1 to 40 tokens with spans that touch their ends, some without any."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        size = int(rng.integers(1, 41))
        edges = np.unique(rng.integers(0, size + 1, int(rng.integers(0, 5))))
        spans = edges[: len(edges) // 2 * 2].reshape(-1, 2).tolist()
        found.append(Sample.of(f"row-{number}ä", rng.integers(0, 300, size), spans, "ab"[number % 2]))
    return found


def same(one: Sequence[Sample], other: Sequence[Sample]) -> bool:
    def parts(sample: Sample) -> tuple[object, ...]:
        return sample.id, sample.category, sample.tokens.tolist(), sample.loss_mask.tolist()

    return list(map(parts, one)) == list(map(parts, other))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, ROWS, 2 * ROWS + 3])
def test_what_is_written_is_read(form: str, count: int, tmp_path: Path) -> None:
    samples = made(count)
    assert write_samples(tmp_path / form, samples, ORIGIN) == count
    assert read_origin(tmp_path / form) == ORIGIN
    found = open_samples(tmp_path / form)
    assert same(found, samples)
    assert same(list(read_samples(tmp_path / form)), samples)
    assert same([found[-1], *found[:3]], [samples[-1], *samples[:3]])
    with pytest.raises(IndexError):
        found[count]


def passes(samples: Sequence[Sample]) -> list[object]:
    """What passes over all samples find."""
    training, aside = held_out(samples, 0.3)
    rows = PackedRows(samples, training, 64)
    numbers = [row["numbers"] for row in (rows[index] for index in range(len(rows)))]
    return [
        training, aside, numbers, rows.num_tokens, rows[0]["tokens"].tolist(), rows[0]["loss_mask"].tolist(),
        token_counts(samples, training, 300).tolist(), SampleTable.of(samples).has_loss(),
    ]  # fmt: skip


def test_passes_over_columns_find_the_same(tmp_path: Path) -> None:
    samples, more = made(1500), made(20, seed=1)
    write_samples(tmp_path / "data.arrow", samples, ORIGIN)
    write_samples(tmp_path / "more", more, ORIGIN)
    found = open_samples(tmp_path / "data.arrow")
    assert passes(found) == passes(samples)
    assert passes(found + open_samples(tmp_path / "more")) == passes([*samples, *more])


def test_counts_are_those_of_each_sample(tmp_path: Path) -> None:
    samples = made(1200)
    numbers, _ = split(SampleTable.of(samples), 0.5)
    counts = np.zeros(300, dtype=np.int64)
    for number in numbers:
        np.add.at(counts, samples[number].tokens[samples[number].loss_mask], 1)
    assert token_counts(samples, numbers, 300).tolist() == counts.tolist()
    late = Sample.of("late", [5, 400, 3], [(1, 2)])
    with pytest.raises(DraftkitError, match="sample late has the token 400"):
        token_counts([*samples, late], [3, 1200], 300)
    assert token_counts([*samples, late], numbers, 300).tolist() == counts.tolist()  # it is not one of them


@given(st.lists(st.integers(1, 20)), st.integers(20, 64))
def test_rows_are_packed_where_they_fit_best(lengths: list[int], budget: int) -> None:
    """As by looking through all rows."""
    rows: list[list[int]] = []
    left: list[int] = []
    order: list[int] = []  # rows by when they came to have what is left
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [row for row in order if left[row] >= lengths[sample]]
        least = min((left[row] for row in fitting), default=None)
        if least is None:
            rows.append([])
            left.append(budget)
            row = len(rows) - 1
        else:
            row = next(row for row in reversed(order) if left[row] == least)
            order.remove(row)
        rows[row].append(sample)
        left[row] -= lengths[sample]
        order.append(row)
    assert pack(lengths, budget) == rows


def test_the_digest_is_of_what_is_in_samples(tmp_path: Path) -> None:
    samples = made(ROWS + 1)
    digests = set()
    for name, written in {"one.arrow": samples, "two": samples, "less.arrow": samples[:-1]}.items():
        write_samples(tmp_path / name, written, ORIGIN)
        digests.add(samples_sha256(tmp_path / name))
    for number, change in enumerate(("id", "category", "tokens", "loss_mask")):
        other = made(ROWS + 1)
        if change in ("id", "category"):
            other[3] = Sample(**(vars(other[3]) | {change: "another"}))
        elif change == "tokens":
            other[3].tokens[0] += 1
        else:
            other[3].loss_mask[0] ^= True
        write_samples(tmp_path / f"{number}.arrow", other, ORIGIN)
        digests.add(samples_sha256(tmp_path / f"{number}.arrow"))
    assert len(digests) == 6


def test_datasets_reads_the_folder_and_what_it_writes_of_it_is_read(tmp_path: Path) -> None:
    samples = made(50)
    write_samples(tmp_path / "folder", samples, ORIGIN)
    loaded = datasets.load_from_disk(str(tmp_path / "folder"))
    assert loaded["id"][:] == [sample.id for sample in samples]
    kept = loaded.filter(lambda row: len(row["tokens"]) > 20, load_from_cache_file=False)
    kept.save_to_disk(str(tmp_path / "long"), num_shards=2)
    assert read_origin(tmp_path / "long") == ORIGIN
    assert same(open_samples(tmp_path / "long"), [sample for sample in samples if len(sample) > 20])


def test_what_is_there_is_replaced_only_when_asked_and_only_samples(tmp_path: Path) -> None:
    for name in ("data.arrow", "folder"):
        write_samples(tmp_path / name, made(3), ORIGIN)
        with pytest.raises(DraftkitError):
            write_samples(tmp_path / name, made(4), ORIGIN)
        assert len(open_samples(tmp_path / name)) == 3
        write_samples(tmp_path / name, made(4), ORIGIN, force=True)
        assert len(open_samples(tmp_path / name)) == 4
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    with pytest.raises(DraftkitError):
        write_samples(tmp_path / "folder", made(4), ORIGIN, force=True)

    def fails() -> object:
        yield from made(3)
        raise FormatError("a row that cannot be")

    for name in ("begun.arrow", "begun"):
        with pytest.raises(FormatError, match="a row that cannot be"):
            write_samples(tmp_path / name, fails(), ORIGIN)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"data.arrow", "folder"}


def table(**columns: object) -> pa.Table:
    numbers = pa.list_(pa.int32())
    given = {"id": ["a"], "category": ["b"], "tokens": [[1, 2, 3]], "supervised": [[1, 3]]} | columns
    kinds = {"id": pa.string(), "category": pa.string(), "tokens": numbers, "supervised": numbers}
    return pa.table({name: pa.array(values, kinds.get(name)) for name, values in given.items() if values is not None})


@pytest.mark.parametrize(
    "columns",
    [
        {"supervised": [[1, 4]]}, {"supervised": [[2, 1]]}, {"supervised": [[-1, 2]]}, {"supervised": [[1]]},
        {"supervised": [[1, 1]]}, {"supervised": [None]}, {"tokens": None}, {"id": [None]},
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(columns: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table(**columns).schema) as writer:
        writer.write_table(table(**columns))
    with pytest.raises(FormatError, match=r"not samples in Arrow, or damaged|not a file of prepared samples"):
        open_samples(path)


def test_a_truncated_file_and_one_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "data.arrow"
    write_samples(path, made(2000), ORIGIN)
    whole_file = path.read_bytes()
    for size in (0, 3, 100, len(whole_file) // 2, len(whole_file) - 9):
        path.write_bytes(whole_file[:size])
        with pytest.raises(FormatError):
            open_samples(path)
    with pytest.raises(SourceError):
        open_samples(tmp_path / "nothing.arrow")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="there are no samples in Arrow"):
        open_samples(tmp_path / "empty")
    write_samples(tmp_path / "silent.arrow", [Sample.of("a", [1, 2], [])], ORIGIN)
    with pytest.raises(DraftkitError, match="the loss mask of every sample is empty"):
        read_training_samples(tmp_path / "silent.arrow")


@pytest.mark.slow
def test_commands_take_either(draftkit: Command, tmp_path: Path) -> None:
    target = pico.save_tokenizer(pico.save_llama(tmp_path / "target"))
    rows = tmp_path / "rows.jsonl"
    texts = [{"text": f"{number} and so on"} for number in range(30)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    checked = set()
    for form in FORMS:
        prepared = draftkit("data", "prepare", rows, tmp_path / form, "--target", target)
        assert prepared.code == 0, prepared.err
        found = draftkit("data", "check", tmp_path / form, "--target", target, "--json")
        assert found.code in (0, 1)
        checked.add(json.dumps(json.loads(found.out)["findings"], sort_keys=True).replace(form, "DATA"))
        states = draftkit("data", "states", tmp_path / form, tmp_path / f"states-{form}", "--target", target)
        assert states.code == 0, states.err
    assert len(checked) == 1


MEASURE = """
import json, sys, time
from pathlib import Path
from draftkit.data.sample_files import open_samples, split
from draftkit.data.packing import PackedRows
from draftkit.data.vocabulary import token_counts
from scripts.bench.samples import memory
token_counts(open_samples(Path(sys.argv[2])), [0], 512)
before = memory()
samples = open_samples(Path(sys.argv[1]))
training, _ = split(samples, 0.05)
rows = PackedRows(samples, training, 2048)
token_counts(samples, training, 512)
print(json.dumps({name: value - before[name] for name, value in memory().items()}), flush=True)
sys.stdin.readline()
print(json.dumps({name: value - before[name] for name, value in memory().items()}), flush=True)
sys.stdin.readline()
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="a system that does not tell shared pages")
def test_processes_share_the_pages_of_samples(tmp_path: Path) -> None:
    """Two of them have each half of the file; what each has alone does not grow with it."""
    from scripts.bench.samples import random_samples

    data, small = tmp_path / f"data{SUFFIX}", tmp_path / f"small{SUFFIX}"
    write_samples(data, random_samples(6000, 1000), ORIGIN)
    write_samples(small, random_samples(2, 1000), ORIGIN)
    size = data.stat().st_size
    command = [sys.executable, "-c", MEASURE, str(data), str(small)]
    root = Path(__file__).parents[2]
    both = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=root) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        process.stdout.readline()  # it has read everything
    for process in both:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        found = json.loads(process.stdout.readline())
        assert size > 20e6
        assert found["own"] < size / 5, found
        assert size * 0.4 < found["pss"] < size * 0.75, found
    for process in both:
        process.communicate("\n")


def test_the_folder_has_what_datasets_names(tmp_path: Path) -> None:
    write_samples(tmp_path / "folder", made(2), ORIGIN)
    assert {path.name for path in (tmp_path / "folder").iterdir()} == {DATA_FILE, "dataset_info.json", "state.json"}
