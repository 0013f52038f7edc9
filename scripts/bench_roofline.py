"""What a round costs by arithmetic: the bytes that it reads, what it computes, the kernels that it launches.

    python scripts/bench_roofline.py

Writes benchmarks/roofline.md, without a GPU: draftkit's rounds with the kernels of benchmarks/launches.json, before and
now, and what vLLM has published beside the time that its bytes alone would take. A round takes, for each forward, the
longer of reading its weights and its keys and values once and of computing its products, and --gap microseconds for
each kernel, in which nothing is read. Bandwidth and speed are those of the makers' data sheets; the gap is assumed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@dataclass(frozen=True)
class Device:
    """`bandwidth` in bytes a second, `speed` in bfloat16 operations a second."""

    name: str
    bandwidth: float
    speed: float


A100_40 = Device("A100 40 GB", 1.555e12, 312e12)
H100 = Device("H100 SXM", 3.35e12, 989e12)
B200 = Device("B200", 8.0e12, 2250e12)


@dataclass(frozen=True)
class Model:
    """A decoder: `width` of its rows, `inner` of its MLPs, query `heads` and key/value `groups` of `head` numbers, an
    output layer over `vocabulary` tokens. `bits` of a weight in its layers. `entry`: numbers before the first layer."""

    layers: int
    width: int
    inner: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    bits: float = 16
    entry: int = 0

    @property
    def layer_numbers(self) -> int:
        attention = self.width * self.head * (2 * self.heads + 2 * self.groups)
        return self.layers * (attention + 3 * self.width * self.inner) + self.entry

    @property
    def weights(self) -> float:
        """Bytes that a forward reads whatever its rows are; of the embedding it reads a row each."""
        return self.layer_numbers * self.bits / 8 + 2 * self.width * self.vocabulary

    def seconds(self, device: Device, sequences: int, rows: int, positions: int) -> float:
        """A forward of `rows` in each of so many sequences, which look back on `positions`."""
        cached = 4 * self.layers * self.groups * self.head * positions * sequences
        operations = 2 * sequences * rows * (self.layer_numbers + self.width * self.vocabulary)
        return max((self.weights + cached) / device.bandwidth, operations / device.speed)


LLAMA_8B = Model(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_1B = Model(16, 2048, 8192, 32, 8, 64, 128256)
LLAMA_70B_4_BITS = Model(80, 8192, 28672, 64, 8, 128, 128256, bits=4.5)
QWEN3_32B = Model(64, 5120, 25600, 64, 8, 128, 151936)
QWEN3_2B = Model(28, 2048, 6144, 16, 8, 128, 151936)
# One layer that attends over rows twice as wide, and the fusion of three states.
EAGLE3_8B = replace(LLAMA_8B, layers=1, vocabulary=32000, entry=4096 * 128 * 48 + 3 * 4096 * 4096)


@dataclass(frozen=True)
class Rounds:
    """Rounds of `k` drafts: of a `draft` that runs `passes` times, each but the first over one row."""

    title: str
    target: Model
    draft: Model | None = None
    k: int = 0
    passes: int = 0

    def seconds(self, device: Device, sequences: int, positions: int) -> float:
        total = self.target.seconds(device, sequences, self.k + 1, positions)
        if self.draft is None:
            return total
        first = self.draft.seconds(device, sequences, self.k + 1, positions)
        return total + first + (self.passes - 1) * self.draft.seconds(device, sequences, 1, positions)


OWN = (
    (Rounds("plain", LLAMA_8B), "a plain round, greedy", 1332),
    (Rounds("EAGLE-3, K = 4", LLAMA_8B, EAGLE3_8B, 4, 4), "a round of EAGLE-3, K = 4, greedy", 1648),
    (Rounds("Llama 3.2 1B, K = 4", LLAMA_8B, LLAMA_1B, 4, 4), "a round of standalone, K = 4, greedy", 3993),
)


@dataclass(frozen=True)
class Published:
    """Milliseconds a round of vLLM's at batch 1: those between tokens, times the acceptance length where it drafts."""

    rounds: Rounds
    device: Device | None
    milliseconds: float
    source: str


PLAIN_32B, PLAIN_70B, PLAIN_8B = (
    Rounds(name, target)
    for name, target in (
        ("Qwen3-32B", QWEN3_32B),
        ("Llama-3.3-70B NVFP4", LLAMA_70B_4_BITS),
        ("Llama-3.1-8B", LLAMA_8B),
    )
)
PUBLISHED = (
    Published(PLAIN_8B, A100_40, 1e3 / 77.7, "PR 32887"),
    Published(Rounds("+ PARD 1B, K = 8", LLAMA_8B, LLAMA_1B, 8, 1), A100_40, 3.56e3 / 202.3, "PR 32887"),
    Published(PLAIN_70B, B200, 1e3 / 82, "PR 32887"),
    Published(Rounds("+ 1B, K = 5", LLAMA_70B_4_BITS, LLAMA_1B, 5, 5), B200, 3.83e3 / 158, "PR 32887"),
    Published(Rounds("+ PARD 1B, K = 11", LLAMA_70B_4_BITS, LLAMA_1B, 11, 1), B200, 3.69e3 / 254, "PR 32887"),
    Published(PLAIN_32B, None, 46.06, "PR 24322"),
    Published(Rounds("+ 1.7B, K = 3", QWEN3_32B, QWEN3_2B, 3, 3), None, 2.79 * 22.62, "PR 24322"),
)
POSITIONS = 1024  # that a sequence looks back on, in all cases
HEADER = """# Rounds by arithmetic

`python scripts/bench_roofline.py`, without a GPU; nothing here was timed by draftkit. A round takes, for each forward,
the longer of reading weights, keys and values once at the data sheet's bandwidth and of computing at its speed
("bytes"); each kernel adds {gap:g} µs in which nothing is read, which is assumed. Sequences look back on {positions:,}
positions.

## draftkit, Llama 3.1 8B in bfloat16 on an H100

Kernels as `launches.md` counts them: before transformers' modules were taken over, and now.

| drafter | batch | bytes, ms | kernels before | ms | × bytes | kernels now | ms | × bytes |
|---|---|---|---|---|---|---|---|---|
"""
SECOND = """
## What vLLM has published, batch 1

Milliseconds between tokens, times the acceptance length. The device of PR 24322 is not named: its rounds are compared
with its own plain ones alone. "To plain" is how many times as long as a plain round: as published, and by bytes.

| target, draft | device | published, ms | bytes, ms | × bytes | to plain | by bytes | source |
|---|---|---|---|---|---|---|---|
"""


def own_lines(gap: float) -> list[str]:
    known = json.loads((BENCHMARKS / "launches.json").read_text(encoding="utf-8"))
    lines = []
    for rounds, name, before in OWN:
        for sequences in (1, 8, 64):
            least = rounds.seconds(H100, sequences, POSITIONS)
            cells = [rounds.title, f"{sequences}", f"{1e3 * least:.2f}"]
            for kernels in (before, known[name]):
                whole = least + kernels * gap
                cells += [f"{kernels:,}", f"{1e3 * whole:.2f}", f"{whole / least:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def published_lines() -> list[str]:
    lines = []
    plain = PUBLISHED[0]
    for case in PUBLISHED:
        plain = case if case.rounds.draft is None else plain
        device = case.device or H100  # of one that is not known, only ratios are shown
        least = 1e3 * case.rounds.seconds(device, 1, POSITIONS)
        shown = (case.device.name, f"{least:.2f}", f"{case.milliseconds / least:.2f}") if case.device else ("?", "", "")
        by_bytes = least / (1e3 * plain.rounds.seconds(device, 1, POSITIONS))
        cells = [
            case.rounds.title, shown[0], f"{case.milliseconds:.2f}", *shown[1:],
            f"{case.milliseconds / plain.milliseconds:.2f}", f"{by_bytes:.2f}", case.source,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", type=float, default=1.5, help="microseconds between kernels of a CUDA graph")
    gap = parser.parse_args().gap
    head = HEADER.format(gap=gap, positions=POSITIONS)
    text = head + "\n".join(own_lines(gap * 1e-6)) + "\n" + SECOND + "\n".join(published_lines()) + "\n"
    (BENCHMARKS / "roofline.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
