"""NaN and infinities are found in every floating dtype, wherever they lie and however the bytes arrive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftkit.errors import FormatError
from draftkit.io import finite
from draftkit.io.dtypes import dtype_name, torch_dtype
from draftkit.io.finite import FLOATING, NonFinite, find_non_finite
from draftkit.io.handles import TensorHandle, raw_memory
from draftkit.io.tensors import open_checkpoint

NAN, INF = float("nan"), float("inf")
HAVE_INFINITY = {"F64", "F32", "F16", "BF16", "F8_E5M2"}


def handle(tensor: torch.Tensor, step: int = 1 << 30) -> TensorHandle:
    """A tensor whose bytes arrive at most `step` at a time, whatever is asked for."""
    memory = raw_memory(tensor.contiguous())

    def read(size: int) -> Iterator[memoryview]:
        return (memory[start : start + min(size, step)] for start in range(0, len(memory), min(size, step)))

    return TensorHandle("w", dtype_name(tensor.dtype), tuple(tensor.shape), Path("memory"), read)


def expected(tensor: torch.Tensor) -> list[NonFinite]:
    """The same from the whole tensor at once, with torch's own predicates."""
    values = tensor.double()
    places = (~values.isfinite()).nonzero()
    if not len(places):
        return []
    counts = int(values.isnan().sum()), int(values.isinf().sum())
    return [NonFinite("w", dtype_name(tensor.dtype), tuple(tensor.shape), *counts, tuple(places[0].tolist()))]


def test_every_floating_dtype_is_searched() -> None:
    fp8 = {"F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    assert {"F64", "F32", "F16", "BF16"} | fp8 == FLOATING


@examples(150)
@given(st.data(), st.sampled_from(sorted(FLOATING)), st.integers(1, 40), st.sampled_from([8, 16, 64]))
def test_any_bits_in_any_chunks(data: st.DataObject, dtype: str, step: int, block: int) -> None:
    tensor = torch.zeros(data.draw(st.lists(st.integers(0, 5), max_size=3)), dtype=torch_dtype(dtype))
    # 0x7f, 0xff, 0x7c and 0x80 make up the special values of these dtypes.
    byte = st.sampled_from([0, 0x7C, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
    raw_memory(tensor)[:] = bytes(data.draw(st.lists(byte, min_size=tensor.nbytes, max_size=tensor.nbytes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finite, "BLOCK_BYTES", block)
        assert find_non_finite({"w": handle(tensor, step)}) == expected(tensor)


@pytest.mark.parametrize("dtype", sorted(FLOATING))
def test_every_code_of_eight_and_sixteen_bits(dtype: str) -> None:
    itemsize = torch_dtype(dtype).itemsize
    bits = torch.arange(256, dtype=torch.uint8) if itemsize == 1 else torch.arange(1 << 16).to(torch.uint16)
    tensor = bits.view(torch_dtype(dtype))
    found = find_non_finite({"w": handle(tensor)})
    assert found == expected(tensor)
    if itemsize <= 2:
        assert found[0].nan > 0
        assert (found[0].inf > 0) == (dtype in HAVE_INFINITY)


WITH_INFINITY = [(dtype, value) for dtype in sorted(HAVE_INFINITY) for value in (NAN, INF, -INF)]


@pytest.mark.parametrize(("dtype", "value"), [*WITH_INFINITY, ("F8_E4M3", NAN)])
def test_one_value_among_a_million(dtype: str, value: float) -> None:
    rows, columns = 1031, 1024
    counts = (1, 0) if value != value else (0, 1)
    for row, column in ((0, 0), (515, 7), (rows - 1, columns - 1)):
        tensor = torch.full((rows, columns), 1.5).to(torch_dtype(dtype))
        assert find_non_finite({"w": handle(tensor)}) == []
        tensor[row, column] = value
        assert find_non_finite({"w": handle(tensor)}) == [
            NonFinite("w", dtype, (rows, columns), *counts, (row, column))
        ]


def test_extreme_numbers_are_numbers() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        limits = torch.finfo(dtype)
        values = torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=torch.float64)
        assert find_non_finite({"w": handle(values.to(dtype))}) == []


def test_tensors_are_told_in_order_under_the_names_given(tmp_path: Path) -> None:
    state = {
        "fc.weight": torch.tensor([[1.0, NAN], [INF, -INF]], dtype=torch.bfloat16),
        "clean": torch.ones(3),
        "d2t": torch.tensor([-1, 1 << 62]),
        "t2d": torch.tensor([True, False]),
        "scalar": torch.tensor(NAN, dtype=torch.float16),
        "empty": torch.empty(0, 4),
    }
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        save_file(state, folder / name) if name.endswith("safetensors") else torch.save(state, folder / name)
        handles = open_checkpoint(folder)
        named = {"renamed": handles["fc.weight"], **{other: handles[other] for other in state if other != "fc.weight"}}
        assert find_non_finite(named) == [
            NonFinite("renamed", "BF16", (2, 2), 1, 2, (0, 1)),
            NonFinite("scalar", "F16", (), 1, 0, ()),
        ]


def test_the_command_names_them_and_writes_nothing(draftkit: Command, tmp_path: Path) -> None:
    tensors = pico.eagle_tensors()
    tensors["fc.weight"][3, 5] = NAN
    tensors["layers.0.mlp.down_proj.weight"][7, 0] = -INF
    pico.write_checkpoint(tmp_path / "source", pico.eagle_config(), tensors)
    ran = draftkit("convert", tmp_path / "source", tmp_path / "out", "--check")
    assert (ran.code, ran.out) == (1, "")
    assert "fc.weight (F16 [64, 128]): 1 NaN, 0 infinite, the first at [3, 5]" in ran.err
    assert "layers.0.mlp.down_proj.weight (F16 [64, 96]): 0 NaN, 1 infinite, the first at [7, 0]" in ran.err
    assert os.listdir(tmp_path) == ["source"]
    assert draftkit("convert", tmp_path / "source", tmp_path / "out").code == 0


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    handles = open_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate((tmp_path / "model.safetensors").stat().st_size - 4)
    with pytest.raises(FormatError, match="shrunk"):
        find_non_finite(handles)


# In a process of its own, whose peak no other test has raised.
PEAK = """
import resource, sys
from pathlib import Path
from draftkit.io.finite import find_non_finite
from draftkit.io.tensors import open_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

handles = open_checkpoint(Path(sys.argv[1]))
assert find_non_finite({"small": handles["small"]}) == []
before = peak()
assert find_non_finite(handles) == []
print(peak() - before)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    header = {
        "large": {"dtype": "BF16", "shape": [128 << 20], "data_offsets": [0, 256 << 20]},
        "small": {"dtype": "BF16", "shape": [2 << 20], "data_offsets": [256 << 20, 260 << 20]},
    }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + (260 << 20))  # zeros that take no room on disk
    ran = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 32 << 10  # kB: an eighth of the tensor
