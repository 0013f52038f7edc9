"""Every Triton kernel becomes machine code for a GPU, as it is launched."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.fake_cuda import Variant
from fixtures.gpu_kernels import H100, compiled, kernels, report, variants

triton = pytest.importorskip("triton")

# Of the others, the noise must be that of the references, bit for bit.
MAY_FUSE = {
    "_attention_kernel",
    "_join_kernel",
    "_statistics_kernel",
    "_row_loss_kernel",
    "_rms_norm_kernel",
}  # the latter in logarithms


@pytest.fixture(scope="module")
def launched() -> dict[str, Variant]:
    """A variant of each kernel."""
    return {variant.name: variant for variant in variants(H100)}


def test_every_kernel_is_launched(launched: dict[str, Variant]) -> None:
    assert launched.keys() == kernels().keys()


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_compiles_for_a_gpu(name: str, launched: dict[str, Variant], tmp_path: Path) -> None:
    code = compiled(launched[name], H100, tmp_path)
    (line,) = report(H100, [(launched[name], code)], triton.__version__)
    assert not line.faults
    assert code.fused <= (name in MAY_FUSE)
    assert code.loads_ahead == (name == "_attention_kernel")
