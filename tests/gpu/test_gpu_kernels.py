"""Every Triton kernel becomes machine code for a GPU, as it is launched; benchmarks/data/kernels.md has all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures.gpu.fake_cuda import Variant
from fixtures.gpu.gpu_kernels import H100, compiled, digests, in_disorder, in_double, kernels, report, variants
from fixtures.gpu.row_reads import SECTOR, WIDE, loads_of_peaks, reads

triton = pytest.importorskip("triton")

DIGESTS = Path(__file__).parents[2] / "benchmarks/data/kernels.json"
# Of the others, the noise must be that of the references, bit for bit.
MAY_FUSE = {
    "_attention_kernel",
    "_join_kernel",
    "_block_peaks_kernel",
    "_join_peaks_kernel",
    "_floor_kernel",
    "_angles_kernel",
    "_row_loss_kernel",
    "_rms_norm_kernel",
}  # the latter in logarithms


@pytest.fixture(scope="module")
def launched() -> dict[str, Variant]:
    """A variant of each kernel."""
    return {variant.name: variant for variant in variants(H100)}


@pytest.mark.slow
def test_every_kernel_is_launched(launched: dict[str, Variant]) -> None:
    assert launched.keys() == kernels().keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", kernels())
def test_a_kernel_compiles_for_a_gpu(name: str, launched: dict[str, Variant], tmp_path: Path) -> None:
    code = compiled(launched[name], H100, tmp_path)
    (line,) = report(H100, [(launched[name], code)], triton.__version__)
    assert not line.faults
    assert code.fused <= (name in MAY_FUSE)
    assert code.loads_ahead == (name == "_attention_kernel")


@pytest.mark.slow
def test_rows_of_logits_are_read_by_wide_loads(tmp_path: Path) -> None:
    """Of any vocabulary, but for a row's first and last block; benchmarks/data/kernels.md has what that spares."""
    found = {size: loads_of_peaks(size, tmp_path) for size in (151936, 151669)}
    assert found[151936] == {WIDE: 8}
    assert found[151669] == {WIDE: 4, 2: 32}


def test_fewer_sectors_are_read_where_rows_begin_anywhere() -> None:
    assert reads(151936, wide=True) == reads(151936, wide=True, aligned=False)
    narrow, now = (reads(151669, wide=wide, aligned=wide) for wide in (False, True))
    assert narrow.sectors > 1.4 * now.sectors >= 1.4 * 151669 * 2 / SECTOR
    assert narrow.requests > 5 * now.requests


def test_double_precision_is_noticed() -> None:
    allowed = ["cvt.rn.f64.s64 %d1, %r1;", "mul.rn.f64 %d2, %d1, 0d3BF921FB54442D19;", "cvt.rn.f32.f64 %f1, %d2;"]
    assert not in_double("\n".join(allowed))
    assert in_double("\n".join(allowed[:1] + allowed[2:]))
    assert in_double("\n".join([*allowed, "add.rn.f64 %d3, %d1, %d2;"]))


def test_places_in_a_reshaped_row_are_noticed() -> None:
    reshape = "%flat = tt.reshape %x_8 allow_reorder : tensor<128x4xf32> -> tensor<512xf32>"
    assert in_disorder(f'{reshape}\n%1:2 = "tt.reduce"(%flat, %0) <{{axis = 0 : i32}}> ({{')
    assert not in_disorder(f'{reshape}\n%1 = "tt.reduce"(%flat) <{{axis = 0 : i32}}> ({{')
    assert not in_disorder('%1:2 = "tt.reduce"(%x, %0) <{axis = 0 : i32}> ({')


@pytest.mark.long
def test_the_table_is_of_these_kernels() -> None:
    known = json.loads(DIGESTS.read_text(encoding="utf-8"))
    if known.pop("triton") != triton.__version__:
        pytest.skip("benchmarks/data/kernels.json was written with another version of Triton")
    stale = sorted(name for name, digest in digests().items() if known.get(name) != digest)
    assert not stale, "benchmarks/data/kernels.md is not of these kernels: make compile-gpu"
    assert known.keys() == kernels().keys()
