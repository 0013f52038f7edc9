"""Counts the kernels that rounds launch, without a GPU, and writes benchmarks/launches.md and .json, with what captured
rounds take by arithmetic.

`make test` compares with them: a number may only go down, and is then written down by running this again.
"""

from __future__ import annotations

import json
from pathlib import Path

from fixtures.gpu.fake_cuda import fake_cuda
from fixtures.gpu.launch_counts import counts

from draftkit.evaluate.round_cost import B200, H100, H200, PER_PASS, RoundCost
from scripts.bench.roofline import EAGLE3_8B, LLAMA_8B, POSITIONS, llama

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
CAPTURED = """
## What a round takes, by arithmetic

Milliseconds of a round at batch 1 and 64, Llama 3.1 8B and 70B in bfloat16 over {positions:,} positions, by the model
of `roofline.md`: bytes at the data sheet's bandwidth, and {gap:g} µs for each kernel of a captured round. Nothing here
was timed. The 141 GB of the 70B fit on one B200 alone; over several cards draftkit lays one layer after another and
captures nothing, so that a round reads at one card's bandwidth, and takes at least the {host:g} µs, which are assumed,
that the host needs for each launch. "× plain": the acceptance length above which drafting pays.

| round | GPU | batch 1, ms | × plain | batch 64, ms | × plain |
|---|---|---|---|---|---|
"""
BESIDE = """
Published rounds, which are other engines' on other days: vLLM on a B200 at batch 1, GPT-OSS 120B, 2.7 ms plain and
4.8 ms with EAGLE-3 at K = 3, 1.78 × plain (vllm#32887); Llama 3.3 70B in NVFP4 on a B200, 12.2 ms plain (vllm#32887);
Llama 3.1 8B, 4.98 ms between tokens with EAGLE at an acceptance length of 2.37, 11.8 ms a round, the GPU not named
(vllm#20459); Llama 3.1 8B on an H100 at batch 1 with EAGLE-3 at K = 2, 1.65 × as fast as plain (vllm#16937). Of SGLang
no figure of a round is known on these GPUs. What they took over the arithmetic is in `roofline.md`: 1.25 to 2.6 times.

Where draftkit must be slower than an engine that serves, and why:

- over several cards: serving engines split every layer, so that n cards read n times as fast, and capture that; here
  the cards take turns. A 70B on four H100s takes about four times as long a round.
- with weights of 8 or 4 bits that transformers can unpack: they are bfloat16 once they are loaded, and read as such, 2
  to 3.6 times the bytes. The 70B in NVFP4 above would take the 70B's row here.
- with prompts coming in: a forward of up to 2,048 rows of prompts stands between rounds, as they are not in one forward
  with what is decoded; and it attends by torch's FlashAttention 2, than which FlashAttention 3 is 1.5 to 2 times as
  fast on an H100 by its authors' figures (arXiv 2407.08608), or, where that does not know the attention (latents,
  capped scores, sinks, windows), by the kernel of rounds. Rounds themselves are not concerned.
- between rounds: the host reads what was accepted before it starts the next round, once a round, where others schedule
  one round ahead. That is tens of microseconds beside 3 to 6 ms of the 8B.
"""


def main() -> None:
    with fake_cuda() as gpu:
        found = counts(gpu)
    table = "".join(f"| {name} | {number:,} |\n" for name, number in found.items())
    (ROOT / "benchmarks/launches.md").write_text(HEADER + table + FOOTER + arithmetic(), encoding="utf-8")
    (ROOT / "benchmarks/launches.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def arithmetic() -> str:
    """What rounds take on GPUs, as Markdown."""
    head = CAPTURED.format(positions=POSITIONS, gap=1e6 * H100.launch_gap, host=1e6 * SPREAD_GAP)
    lines = []
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
                lines.append(f"| {' | '.join(cells)} |\n")
    return head + "".join(lines) + BESIDE


if __name__ == "__main__":
    main()
