"""Counts the kernels that rounds launch, without a GPU, and writes benchmarks/launches.md and .json.

`make test` compares with them: a number may only go down, and is then written down by running this again.
"""

from __future__ import annotations

import json
from pathlib import Path

from fixtures.gpu.fake_cuda import fake_cuda
from fixtures.gpu.launch_counts import counts

ROOT = Path(__file__).parents[2]

HEADER = """# Launches of a round

`python -m scripts.gpu.launches`, without a GPU: the operators and Triton kernels that run on one, which is as many
kernels or a few more. Llama 3.1 8B, an EAGLE-3 draft of it, and a standalone one with the layers of Llama 3.2 1B; one
sequence with room for 4,096 tokens, on an H100. For the host, a round that is captured in a CUDA graph is one launch;
each kernel in it still waits for the one before. A number here may only go down (`tests/gpu/test_launches.py`).

| | kernels |
|---|---|
"""
FOOTER = """
A greedy draft step stores the head's logits, for two kernels that find the best one: a sequence's are 64 KB of 32,000
draft tokens in bfloat16, beside the 262 MB of the head's weights. A product that keeps the best token only would
spare one kernel and 0.02 % of the bytes, in the place of cuBLAS's.
"""


def main() -> None:
    with fake_cuda() as gpu:
        found = counts(gpu)
    table = "".join(f"| {name} | {number:,} |\n" for name, number in found.items())
    (ROOT / "benchmarks/launches.md").write_text(HEADER + table + FOOTER, encoding="utf-8")
    (ROOT / "benchmarks/launches.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
