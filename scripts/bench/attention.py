"""Attention over slots on a GPU: bytes of live cache per second against measured copy bandwidth, and against SDPA.

`python -m scripts.bench.attention [--heads 32] [--groups 8] [--width 128] [--capacity 8192]`

A call reads the keys and values that its sequences hold, once; the copy bandwidth says how long that must take. The
peer is torch's `scaled_dot_product_attention` over the same slots, masked, up to the longest sequence. Both are
captured in a CUDA graph of several layers, more than the L2 cache holds, and replayed. Without CUDA it says so.
`--json FILE` keeps the figures, for `scripts/gpu/promises.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from draftkit.runtime.ops.slot_attention import Scoring, attend, attend_reference
from draftkit.runtime.ops.slot_write import write
from draftkit.runtime.slot_rows import SlotRows

COPIED_BYTES = 1 << 30
REPLAYS = 20
BATCHES = (1, 8, 100)
ROWS = (1, 5, 17)
LENGTHS = (512, 4096)


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of `run` on the device."""
    times = []
    for _ in range(REPLAYS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return median(times)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written ones together, by a kernel: a copy in a CUDA graph is none, and moved 2.7
    of an H200's 4.8 TB/s."""
    source = torch.ones(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / milliseconds(captured(lambda: torch.neg(source, out=target)))


class Bench:
    """Several layers of one decode batch, whose sequences are between half and one and a half times `length` long."""

    def __init__(self, options: argparse.Namespace, batch: int, rows: int, length: int):
        heads, groups, width = options.heads, options.groups, options.width
        dtype = getattr(torch, options.dtype)
        generator = torch.Generator().manual_seed(0)
        lengths = torch.linspace(0.5, 1.5, batch).mul(length).long() if batch > 1 else torch.tensor([length])
        lengths = lengths[torch.randperm(batch, generator=generator)].clamp(rows, options.capacity)
        positions = lengths[:, None] - rows + torch.arange(rows)
        self.rows = SlotRows(torch.arange(batch).cuda(), positions.cuda())
        self.longest = int(lengths.max())
        self.scoring = Scoring(width**-0.5)
        self.query = torch.randn(batch, rows, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
        self.new = torch.randn(batch, rows, groups, width, device="cuda", dtype=dtype).transpose(1, 2)
        self.layer_bytes = int(lengths.sum()) * groups * 2 * width * dtype.itemsize
        cached = torch.cuda.get_device_properties(0).L2_cache_size
        self.layers = [
            torch.randn(2, batch, groups, options.capacity, width, device="cuda", dtype=dtype)
            for _ in range(min(math.ceil(4 * cached / self.layer_bytes), 64))
        ]

    def by_kernel(self) -> None:
        for keys, values in self.layers:
            attend(self.query, keys, values, self.rows, self.scoring)

    def with_writes(self) -> None:
        for keys, values in self.layers:
            write(keys, values, self.new, self.new, self.rows)
            attend(self.query, keys, values, self.rows, self.scoring)

    def by_sdpa(self) -> None:
        for keys, values in self.layers:
            part = keys[:, :, : self.longest], values[:, :, : self.longest]
            attend_reference(self.query, *part, self.rows, self.scoring)

    def largest_difference(self) -> float:
        keys, values = self.layers[0]
        part = keys[:, :, : self.longest], values[:, :, : self.longest]
        expected = attend_reference(self.query, *part, self.rows, self.scoring)
        return float((attend(self.query, keys, values, self.rows, self.scoring) - expected).abs().max())


def row(bench: Bench, bandwidth: float) -> list[str]:
    def per_layer(run: Callable[[], None]) -> float:
        return milliseconds(captured(run)) / len(bench.layers)

    kernel, written, sdpa = (per_layer(run) for run in (bench.by_kernel, bench.with_writes, bench.by_sdpa))
    needed = bench.layer_bytes / bandwidth
    return [
        f"{bench.layer_bytes / 1e6:.1f}",
        f"{needed * 1e3:.1f}",
        f"{kernel * 1e3:.1f}",
        f"{written * 1e3:.1f}",
        f"{sdpa * 1e3:.1f}",
        f"{needed / kernel:.2f}",
        f"{sdpa / kernel:.2f}×",
        f"{bench.largest_difference():.1e}",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8, help="key/value heads")
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--capacity", type=int, default=8192, help="entries of a slot")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = arguments()
    console = Console(width=140)
    if not torch.cuda.is_available():
        console.print("no CUDA device: nothing measured")
        return
    bandwidth = copy_bandwidth()
    shape = f"{options.heads} heads on {options.groups} × {options.width}, {options.dtype}"
    title = f"{torch.cuda.get_device_name()}, copies {bandwidth / 1e6:.0f} GB/s; {shape}; µs per layer"
    shares = ("of copy speed", "against SDPA", "difference")
    columns = ("batch", "rows", "length", "live MB", "at copy speed", "kernel", "with write", "SDPA", *shares)
    table = Table(*columns, title=title)
    figures = []
    for batch, rows, length in product(BATCHES, ROWS, LENGTHS):
        bench = Bench(options, batch, rows, length)
        cells = row(bench, bandwidth)
        table.add_row(str(batch), str(rows), str(length), *cells)
        of_copy = float(cells[columns.index("of copy speed") - 3])
        figures.append({"figure": "attention", "batch": batch, "rows": rows, "length": length, "of_copy": of_copy})
        del bench
    console.print(table)
    if options.json is not None:
        told = {"device": torch.cuda.get_device_name(), "figures": figures}
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
