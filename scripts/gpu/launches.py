"""Counts the kernels that rounds launch, without a GPU, and prints what captured rounds take by arithmetic.

    python -m scripts.gpu.launches

The counts go to benchmarks/data/launches.json. `make test` compares with them: a number may only go down.
"""

from __future__ import annotations

import json
from pathlib import Path

from fixtures.gpu.fake_cuda import fake_cuda
from fixtures.gpu.launch_counts import counts
from rich.console import Console
from rich.table import Table

from draftkit.evaluate.round_cost import B200, H100, H200, PER_PASS, RoundCost
from scripts.bench.roofline import EAGLE3_8B, LLAMA_8B, POSITIONS, llama

KEPT = Path(__file__).parents[2] / "benchmarks/data/launches.json"

# A layer over rows twice as wide and the fusion of three states; five layers, and the fusion of five states.
EAGLE3_70B = llama(1, 8192, 28672, 64, 8, 128, 32000, others=PER_PASS, entry=8192 * 128 * 80 + 3 * 8192**2)
DFLASH_8B = llama(5, 4096, 14336, 32, 8, 128, 128256, others=PER_PASS, entry=5 * 4096**2)
DFLASH_70B = llama(5, 8192, 28672, 64, 8, 128, 128256, others=PER_PASS, entry=5 * 8192**2)
LLAMA_70B = llama(80, 8192, 28672, 64, 8, 128, 128256)
ROUNDS = (
    ("8B, plain", RoundCost(LLAMA_8B)),
    ("8B, EAGLE-3, K = 3", RoundCost(LLAMA_8B, EAGLE3_8B, 3, 3)),
    ("8B, DFlash, K = 15", RoundCost(LLAMA_8B, DFLASH_8B, 15, 1)),
    ("70B, plain", RoundCost(LLAMA_70B)),
    ("70B, EAGLE-3, K = 3", RoundCost(LLAMA_70B, EAGLE3_70B, 3, 3)),
    ("70B, DFlash, K = 15", RoundCost(LLAMA_70B, DFLASH_70B, 15, 1)),
)
GPUS = (H100, H200, B200)
SPREAD_GAP = 5e-6  # seconds that the host takes to launch a kernel of a round that is not captured, which is assumed


def main() -> None:
    with fake_cuda() as gpu:
        found = counts(gpu)
    KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console = Console(width=120)
    table = Table("round", "kernels", title="Launches on a fake GPU")
    for name, number in found.items():
        table.add_row(name, f"{number:,}")
    console.print(table)
    console.print(arithmetic())


def arithmetic() -> Table:
    """Milliseconds of a round by bytes at the data sheet's bandwidth and a gap for each kernel; nothing is timed.

    Over several cards nothing is captured, and one layer runs after another: the host's time for each launch counts.
    """
    table = Table("round", "GPU", "batch 1, ms", "× plain", "batch 64, ms", "× plain", title="Rounds by arithmetic")
    for size in ("8B", "70B"):
        for device in GPUS:
            captured = size == "8B" or device is B200
            plain: dict[int, float] = {}
            for title, cost in (one for one in ROUNDS if one[0].startswith(size)):
                cells = [title, device.name if captured else f"several {device.name}, not captured"]
                for batch in (1, 64):
                    least = cost.floor(device, batch, POSITIONS)
                    gap = cost.kernels * device.launch_gap
                    seconds = least + gap if captured else max(least + gap, cost.kernels * SPREAD_GAP)
                    cells += [f"{1e3 * seconds:.2f}", f"{seconds / plain.setdefault(batch, seconds):.2f}"]
                table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()
