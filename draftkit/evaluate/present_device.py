"""How fast the device at hand is at what a round takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from draftkit.evaluate.provenance import processor
from draftkit.evaluate.round_cost import DEVICES, Device

READ = 1 << 27  # bytes of a matrix that no cache of a CPU's cores holds
SQUARE = 1024  # rows of a matrix for products
LAUNCHES = 1000
REPEATS = 3


def present_device(device: torch.device, dtype: torch.dtype) -> Device:
    """As the data sheet of a GPU in the table has it; of others as measured: a matrix times a vector for the bandwidth,
    times a matrix for the speed, and an operation on one number for the gap. Takes about a second."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    words = set(name.upper().replace("-", " ").split())
    known = [listed for listed in DEVICES if device.type == "cuda" and listed.name.split()[0] in words]
    if known and "40GB" not in words:
        return known[0]
    matrix = torch.ones(READ // dtype.itemsize // SQUARE, SQUARE, dtype=dtype, device=device)
    square, vector, one = matrix[:SQUARE], matrix[0], matrix[0, :1]
    return Device(
        name,
        bandwidth=READ / _seconds(lambda: matrix @ vector, device),
        speed=2 * SQUARE**3 / _seconds(lambda: square @ square, device),
        gap=_seconds(lambda: [one + one for _ in range(LAUNCHES)], device) / LAUNCHES,
    )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least of a few times, after a first that warms up."""
    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
